// Data, settings that live in the address, and numbers as people read them.

const DATA = JSON.parse(document.getElementById('data').textContent);
for (const entry of DATA.entries) {
  for (const { train, valid } of entry.runs) {
    for (const part of [train, valid]) { // tokens may be given as those of a step
      if (typeof part.tokens === 'number') part.tokens = part.step.map((s) => s * part.tokens);
    }
  }
}
const byId = (id) => document.getElementById(id);

function make(space, name, attributes, children) {
  const node = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children) if (child !== null) node.append(child);
  return node;
}
const el = (name, attributes, ...children) => make(null, name, attributes, children);
const svg = (name, attributes, ...children) =>
  make('http://www.w3.org/2000/svg', name, attributes, children);

// --- settings -------------------------------------------------------------------------------

const DEFAULTS = {
  metric: DATA.unit === 'images' ? 'valid.accuracy' : 'valid.loss', x: DATA.progress, xlog: '', ylog: '', range: 'detail', smooth: '2',
  seeds: '1', rates: '', group: 'all', hide: '', zoom: '',
};
const state = { ...DEFAULTS };
// Curves that are made from a results file may have no times.
const isTimed = DATA.entries.some((entry) => entry.runs.some(
  (run) => [run.valid, run.train].some((series) => (series.seconds || []).some(Boolean))));
const ALONG = [DATA.progress, 'step', ...(isTimed ? ['seconds'] : [])];

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(DEFAULTS)) {
    state[key] = given.has(key) ? given.get(key) : DEFAULTS[key];
  }
  // An address may be typed by anybody.
  if (!ALONG.includes(state.x)) state.x = DEFAULTS.x;
  if (!Number.isFinite(Number(state.smooth))) state.smooth = DEFAULTS.smooth;
}

function writeHash() {
  const changed = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (value !== DEFAULTS[key]) changed.set(key, value);
  }
  const hash = changed.toString();
  try {
    history.replaceState(null, '', hash ? '#' + hash : location.pathname + location.search);
  } catch {
    // some viewers of local files forbid it: the page works without
  }
}

const hidden = () => new Set(state.hide ? state.hide.split('\n') : []);
const setHidden = (labels) => { state.hide = [...labels].join('\n'); };

// --- colours --------------------------------------------------------------------------------

// CSS may say light-dark(…): a hidden element tells what that is now.
function colour(name) {
  const probe = byId('probe');
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
};

function rememberedTheme() {
  try { return localStorage.getItem('mars-report-theme'); } catch { return null; }
}

function setTheme(name, remember) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  if (!remember) return;
  try { localStorage.setItem('mars-report-theme', name); } catch { /* private mode */ }
}

// --- numbers --------------------------------------------------------------------------------

function significant(value, digits) {
  if (value === 0) return '0';
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)) + 1e-9));
  const text = value.toFixed(Math.min(decimals, 12));
  return text.includes('.') ? text.replace(/\.?0+$/, '') : text;
}

const minus = (text) => text.replace('-', '−');

function large(value, digits = 3) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']]) {
    if (size >= unit * 0.9995) return minus(significant(value / unit, digits)) + name;
  }
  return minus(significant(value, digits));
}

function duration(value) {
  if (value === 0) return '0';
  if (value < 0.9995) return significant(value * 1e3, 3) + ' ms';
  if (value < 59.95) return significant(value, 3) + ' s';
  for (const [unit, name, small, part] of
    [[86400, 'd', 3600, 'h'], [3600, 'h', 60, 'min'], [60, 'min', 1, 's']]) {
    const total = Math.round(value / small);
    if (total * small < unit) continue;
    const whole = Math.floor(total / (unit / small));
    const rest = total % (unit / small);
    return `${whole} ${name}` + (rest ? ` ${rest} ${part}` : '');
  }
  return '';
}

function rate(value) {
  if (value !== 0 && Math.abs(value) < 1e-3) {
    return value.toExponential(3).replace(/\.?0+e/, 'e').replace('e+', 'e');
  }
  return significant(value, 4);
}

const percent = (value) => minus(significant(value * 100, 3)) + '%';
const plain = (value) => minus(Math.abs(value) >= 1000 ? large(value) : significant(value, 4));
const lossText = (value) => minus(value.toFixed(4));
