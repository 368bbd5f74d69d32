// From runs to series: smoothing, the mean over seeds, and the single seeds behind it.

const AXES = {
  tokens: { label: 'Tokens', kind: 'tokens', text: (v) => large(v) + ' tokens' },
  epoch: { label: 'Epochs', kind: 'number', text: (v) => `epoch ${plain(v)}` },
  step: { label: 'Steps', kind: 'number', text: (v) => `step ${Math.round(v).toLocaleString('en')}` },
  seconds: { label: 'Wall-clock time, without validation', kind: 'seconds', text: duration },
};

// The columns of a metric such as "valid.loss" or "diagnostics.cosine" in one run, or null.
function columns(run, metric, smooth) {
  const [part, name] = metric.split('.');
  const from = part === 'diagnostics' ? run.diagnostics[state.group] : run[part];
  const known = (column) => (from[column] || []).some((v) => v !== null);
  if (!from || !known(state.x) || !known(name)) return null;
  const thinned = smooth > 0 && metric === 'train.loss' ? from.smooth : null;
  const given = thinned || from[name];
  let y = given;
  if (smooth > 0) {
    const kept = smoothCache.get(given);
    y = kept && kept.smooth === smooth ? kept.y : smoothed(from.step, given, smooth);
    smoothCache.set(given, { smooth, y });
  }
  return { step: from.step, x: from[state.x], y };
}
const smoothCache = new WeakMap();

// A two-sided exponential mean over steps: no lag. `share` is its width in percent of the run.
function smoothed(steps, y, share) {
  const width = ((steps[steps.length - 1] - steps[0]) * share) / 100 || 1;
  const n = y.length;
  const sum = new Float64Array(n);
  const weight = new Float64Array(n);
  for (const order of [1, -1]) {
    let s = 0;
    let w = 0;
    for (let k = 0, i = order > 0 ? 0 : n - 1; k < n; k++, i += order) {
      const before = i - order;
      const fade = k ? Math.exp(-Math.abs(steps[i] - steps[before]) / width) : 0;
      s *= fade;
      w *= fade;
      // The point itself must count once, not once for each direction.
      sum[i] += s;
      weight[i] += w;
      if (y[i] !== null) { s += y[i]; w += 1; }
    }
  }
  return y.map((v, i) => (v === null ? null : (sum[i] + v) / (weight[i] + 1)));
}

function interpolate(xs, ys, x) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0 || x < xs[0] || x > xs[high]) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  if (xs[low] === x || high === low) return ys[low];
  if (ys[low] === null || ys[high] === null) return null;
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

// Mean, lowest and highest of several runs at the steps of the first, as far as all of them go.
function average(all) {
  const first = all[0];
  const out = { step: [], x: [], y: [], lo: [], hi: [] };
  first.step.forEach((step, i) => {
    const ys = all.map((c, j) => (j ? interpolate(c.step, c.y, step) : c.y[i]));
    if (ys.some((v) => v === null)) return;
    const xs = all.map((c, j) => (j ? interpolate(c.step, c.x, step) : c.x[i]));
    out.step.push(step);
    out.x.push(xs.reduce((a, b) => a + b, 0) / xs.length);
    out.y.push(ys.reduce((a, b) => a + b, 0) / ys.length);
    out.lo.push(Math.min(...ys));
    out.hi.push(Math.max(...ys));
  });
  return out;
}

// Runs that must not be compared with the rest are dotted.
const dashOf = (entry) => (entry.compared ? entry.dash : '1 5');

// Series of one optimizer: thin lines of seeds, then the mean with its band.
function entrySeries(entry, metric, { smooth = 0, seeds = true, rates = false, raw = false } = {}) {
  const look = { label: entry.label, colour: colour(entry.colour), dash: dashOf(entry) };
  const known = (runs, width = smooth) => runs
    .map((run) => ({ run, c: columns(run, metric, width) })).filter(({ c }) => c);
  const best = known(entry.runs.filter((run) => run.best));
  const done = best.filter(({ run }) => run.status === 'done');
  const meant = done.length ? done : best;
  const out = [];
  const thin = ({ run, c }, opacity) => out.push({
    ...look, ...c, role: 'thin', name: `lr ${rate(run.lr)}, seed ${run.seed}`, opacity, width: 1,
  });
  if (rates) known(entry.runs.filter((run) => !run.best)).forEach((r) => thin(r, 0.45));
  const alone = best.length === 1;
  if (seeds && !alone) best.forEach((r) => thin(r, 0.4));
  // Where smoothing hides spikes, what was measured stays visible behind.
  if (smooth > 0 && (raw || alone)) known(best.map(({ run }) => run), 0).forEach((r) => thin(r, 0.22));
  if (meant.length) {
    const mean = meant.length > 1 ? average(meant.map(({ c }) => c)) : meant[0].c;
    const name = alone ? `lr ${rate(best[0].run.lr)}, seed ${best[0].run.seed}` : 'mean';
    out.push({ ...look, ...mean, role: 'main', name, width: 2, opacity: 1 });
  }
  return out;
}

function metricSeries(metric, options) {
  const away = hidden();
  return DATA.entries.filter((entry) => !away.has(entry.label))
    .flatMap((entry) => entrySeries(entry, metric, options));
}

const hasMetric = (metric) =>
  DATA.entries.some((e) => e.runs.some((run) => columns(run, metric, 0)));

// Two points or more in some run: of a study, a step's time is one number, which tables have.
const isCurve = (metric) => DATA.entries.some((e) => e.runs.some((run) => {
  const found = columns(run, metric, 0);
  return found && found.y.filter((v) => v !== null).length > 1;
}));

// A range for y that leaves out the fall of the first tenth, which would flatten all the rest.
function detail(series, falling) {
  const main = series.filter((s) => s.role === 'main' && s.y.length > 4);
  if (!main.length) return null;
  const at = [];
  let low = Infinity;
  // The longest run says where the first tenth ends: one that stopped early is short.
  const start = Math.max(...main.map((s) => s.step[s.step.length - 1])) * 0.1;
  for (const s of main) {
    const late = s.y.filter((v, i) => v !== null && s.step[i] >= start);
    if (!late.length) continue;
    if (!falling) late.forEach((v, i) => { late[i] = -v; });
    at.push(Math.max(late[0], late[late.length - 1]));
    low = Math.min(low, ...late);
  }
  if (!at.length) return null;
  at.sort((a, b) => a - b);
  const middle = at[at.length >> 1];
  const high = Math.min(at[at.length - 1], low + 3 * (middle - low));
  if (!(high > low)) return null;
  return falling ? [low, high] : [-high, -low];
}
