// Scales and ticks. A scale maps a domain to pixels and back, linearly or by logarithm.

function scale(domain, pixels, log) {
  const map = log ? Math.log : (v) => v;
  const back = log ? Math.exp : (v) => v;
  const [a, b] = [map(domain[0]), map(domain[1])];
  const unit = (pixels[1] - pixels[0]) / (b - a || 1);
  const to = (value) => pixels[0] + (map(value) - a) * unit;
  to.invert = (pixel) => back(a + (pixel - pixels[0]) / unit);
  to.log = log;
  return to;
}

// The round step that comes closest to the wanted number of ticks.
function niceStep(span, count) {
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = raw / power;
  return power * (size < 1.5 ? 1 : size < 3.2 ? 2 : size < 7.2 ? 5 : 10);
}

const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600,
  43200, 86400, 172800];

function linearTicks([low, high], count, clock) {
  const span = high - low;
  if (!(span > 0)) return { values: [low], step: Math.abs(low) || 1 };
  let step = niceStep(span, count);
  if (clock && span / count > 1) {
    step = CLOCK.find((s) => s >= (span / count) * 0.999) || niceStep(span / 86400, count) * 86400;
  }
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + span * 1e-9; i++) {
    values.push(i * step);
  }
  return { values, step };
}

function logTicks([low, high], count) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return linearTicks([low, high], count).values;
  const parts = decades < count / 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  const values = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    if (parts.length === 1 && p % every) continue;
    for (const part of parts) {
      const value = Number((part * 10 ** p).toPrecision(3));
      if (value >= low * 0.9999 && value <= high * 1.0001) values.push(value);
    }
  }
  return values;
}

// Ticks with their texts; `kind` is tokens, seconds, rate, percent or number.
function ticks(domain, log, count, kind) {
  if (log) {
    const values = logTicks(domain, count);
    return values.map((v) => ({ value: v, text: tickText(v, kind, null) }));
  }
  const { values, step } = linearTicks(domain, count, kind === 'seconds');
  return values.map((v) => ({ value: v, text: tickText(v, kind, step) }));
}

function tickText(value, kind, step) {
  if (Math.abs(value) < (step || 0) * 1e-6) return kind === 'percent' ? '0%' : '0';
  if (kind === 'tokens') return large(value, 4);
  if (kind === 'seconds') return duration(value);
  if (kind === 'rate') return rate(value);
  if (kind === 'percent') return minus(significant(value * 100, 4)) + '%';
  if (step === null) return plain(value);
  if (step >= 1) return Math.abs(value) >= 10000 ? large(value, 4) : minus(value.toFixed(0));
  // All labels of an axis have the same decimals, so that they line up.
  const decimals = Math.ceil(-Math.log10(step) - 1e-9);
  const tidy = Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) < 1e-6;
  return minus(value.toFixed(Math.min(10, tidy ? decimals : decimals + 1)));
}

function extent(values, positive) {
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    if (v === null || v === undefined || (positive && v <= 0)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return low <= high ? [low, high] : null;
}

function pad([low, high], share, log) {
  if (log) {
    const factor = (high / low) ** share || 1;
    return low === high ? [low / 1.5, high * 1.5] : [low / factor, high * factor];
  }
  const space = (high - low) * share || Math.abs(high) * 0.1 || 1;
  return [low - space, high + space];
}
