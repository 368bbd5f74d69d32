// The page: which charts there are, the controls above them, the legend, the theme.

readHash();
const remembered = rememberedTheme();
if (remembered === 'light' || remembered === 'dark') setTheme(remembered, false);

const all = []; // every chart
const redraw = () => all.forEach((chart) => chart.draw());
const OF_MAIN = ['metric', 'xlog', 'ylog', 'range', 'smooth', 'seeds', 'rates'];
function changed(key) {
  writeHash();
  if (OF_MAIN.includes(key)) main.draw(); else redraw();
}

const axis = () => {
  const a = AXES[state.x];
  return { label: a.label, kind: a.kind, text: a.text, log: false };
};

// --- metrics ----------------------------------------------------------------------------------

const capital = (name) => name.charAt(0).toUpperCase() + name.slice(1).replace(/_/g, ' ');

function metrics() {
  const found = new Map();
  const usual = [['valid.loss', 'Validation loss'], ['train.loss', 'Training loss']];
  if (DATA.unit === 'images') usual.unshift(['valid.accuracy', 'Accuracy']);
  for (const [key, label] of usual) {
    if (hasMetric(key)) found.set(key, label);
  }
  for (const entry of DATA.entries) {
    for (const run of entry.runs) {
      for (const name of Object.keys(run.valid)) {
        const key = `valid.${name}`;
        if (!(name in AXES) && !found.has(key) && hasMetric(key)) found.set(key, capital(name));
      }
    }
  }
  return found;
}
const METRICS = metrics();

const isLoss = (metric) => metric.endsWith('.loss');
const isShare = (metric) => /accuracy|top[_-]?[0-9]/.test(metric);

function buildMain() {
  const metric = METRICS.has(state.metric) ? state.metric : METRICS.keys().next().value;
  const smooth = metric.startsWith('train.') ? Number(state.smooth) || 0 : 0;
  const series = metricSeries(metric, { smooth, seeds: state.seeds === '1', rates: state.rates === '1' });
  const share = isShare(metric);
  const falling = isLoss(metric);
  return {
    series,
    x: { ...axis(), log: state.xlog === '1' },
    y: {
      label: METRICS.get(metric), kind: share ? 'percent' : 'number', log: state.ylog === '1',
      text: share ? percent : lossText,
      domain: state.range === 'detail' && (falling || share) ? detail(series, falling) : null,
    },
  };
}

// --- the main chart ---------------------------------------------------------------------------

const isGrid = DATA.entries.some((e) => e.runs.some((run) => !run.best));
const isSeeded = DATA.entries.some((e) => e.runs.filter((run) => run.best).length > 1);

function segmented(key, title, options, hint) {
  const group = el('div', { class: 'segments', role: 'group', 'aria-label': title, title: hint });
  const mark = () => {
    for (const b of group.children) b.setAttribute('aria-pressed', String(b.value === state[key]));
  };
  for (const [value, label] of options) {
    const button = el('button', { type: 'button', value, 'data-key': key }, label);
    button.addEventListener('click', () => {
      if (key === 'x' || key === 'xlog') resetZoom();
      state[key] = value;
      mark();
      changed(key);
    });
    group.append(button);
  }
  mark();
  marks.push(mark);
  return el('div', { class: 'control' }, el('span', {}, title), group);
}
const marks = [];

function slider() {
  const output = el('output', {});
  const input = el('input', { type: 'range', min: 0, max: 10, step: 0.5, 'aria-label': 'Smoothing, percent of the run' });
  const show = () => {
    input.value = state.smooth;
    output.textContent = Number(state.smooth) ? `${state.smooth}%` : 'off';
  };
  input.addEventListener('input', () => { state.smooth = input.value; show(); changed('smooth'); });
  show();
  marks.push(show);
  const box = el('div', { class: 'control' }, el('span', {}, 'Smoothing'), el('div', { class: 'slider' }, input, output));
  const toggle = () => { box.hidden = !state.metric.startsWith('train.'); };
  toggle();
  marks.push(toggle);
  return box;
}

let main = null;
function resetZoom() {
  state.zoom = '';
  if (main) main.zoom = null;
}

function setUpMain() {
  if (!METRICS.size) return;
  byId('curves').hidden = false;
  if (!METRICS.has(state.metric)) state.metric = METRICS.keys().next().value;
  DEFAULTS.metric = METRICS.keys().next().value;
  const controls = byId('controls');
  if (METRICS.size > 1) controls.append(segmented('metric', 'Show', [...METRICS]));
  controls.append(
    segmented('x', 'Over', ALONG.map((name) => [name, { step: 'Steps', seconds: 'Wall-clock' }[name] || AXES[name].label])),
    segmented('xlog', 'x axis', [['', 'Linear'], ['1', 'Log']]),
    segmented('ylog', 'y axis', [['', 'Linear'], ['1', 'Log']]),
    segmented('range', 'Range', [['detail', 'Detail'], ['all', 'All']], 'Detail leaves out the fall of the first tenth'));
  if (isSeeded) controls.append(segmented('seeds', 'Seeds', [['1', 'Shown'], ['', 'Mean only']]));
  if (isGrid) controls.append(segmented('rates', 'Rates', [['', 'Best'], ['1', 'All']]));
  controls.append(slider());
  controls.addEventListener('click', () => marks.forEach((mark) => mark()));
  main = new Chart(byId('main'), {
    title: 'Curves', ends: true, build: buildMain,
    height: (w) => Math.round(Math.max(300, Math.min(480, w * 0.5))),
    zoomed: (zoom) => {
      const parts = zoom ? [...zoom.x, ...(zoom.y || [])] : [];
      state.zoom = parts.map((v) => significant(v, 6)).join(' ');
      writeHash();
    },
  });
  all.push(main);
  zoomFromHash();
}

function zoomFromHash() {
  const parts = state.zoom.split(' ').map(Number);
  const fine = state.zoom && parts.every(Number.isFinite) && [2, 4].includes(parts.length);
  if (main) main.zoom = fine ? { x: parts.slice(0, 2), y: parts.length > 2 ? parts.slice(2) : null } : null;
}

// --- the legend -------------------------------------------------------------------------------

// What one legend hides is hidden in all charts; each has what is drawn below it.
function legend(host, items) {
  const labels = [...new Set([...DATA.entries, ...DATA.rates].map((item) => item.label))];
  if (items.length < 2) { host.hidden = true; return; }
  let before = new Set(); // what was hidden when a double-click began
  const isolate = (label, away) => {
    const alone = away.size === labels.length - 1 && !away.has(label);
    setHidden(alone ? [] : labels.filter((other) => other !== label));
  };
  for (const entry of items) {
    const button = el('button', {
      type: 'button', title: 'Click: show or hide. Double-click, Alt-click or Shift+Enter: alone.',
    }, el('i', { class: `swatch ${dashOf(entry) ? 'dashed' : ''}` }),
    entry.label, entry.compared ? null : el('small', {}, 'not comparable'));
    button.firstChild.style.setProperty('--c', `var(--${entry.colour})`);
    button.dataset.label = entry.label;
    button.addEventListener('click', (event) => {
      const away = hidden();
      if (event.detail % 2 === 1) before = hidden();
      const second = event.detail > 0 && event.detail % 2 === 0; // of a double-click
      if (second) isolate(entry.label, before);
      else if (event.altKey || event.shiftKey) isolate(entry.label, away);
      else if (away.delete(entry.label)) setHidden(away);
      else setHidden(away.add(entry.label));
      marks.forEach((each) => each());
      changed();
    });
    host.append(button);
  }
  const mark = () => {
    const away = hidden();
    for (const b of host.children) b.setAttribute('aria-pressed', String(!away.has(b.dataset.label)));
  };
  mark();
  marks.push(mark);
}

// --- learning rates ---------------------------------------------------------------------------

function buildRates() {
  const away = hidden();
  const curves = DATA.rates.filter((curve) => !away.has(curve.label));
  const finite = curves.flatMap((c) => c.points.flatMap((p) => p.losses)).sort((a, b) => a - b);
  const low = finite[0];
  const middle = finite[finite.length >> 1];
  // One wild rate must not flatten the valley that the picture is about.
  const cap = finite.length ? Math.min(finite[finite.length - 1], low + 3 * (middle - low) || Infinity) : 1;
  let rows = 0; // marks of different optimizers at the top stand below each other
  const series = curves.map((curve) => ({
    label: curve.label, colour: colour(curve.colour), dash: curve.dash, role: 'main', name: 'mean',
    width: 2, opacity: 1, points: true, best: curve.best, rank: curve.points.some((p) => p.dead || p.mean > cap) ? rows++ : 0,
    x: curve.points.map((p) => p.lr), y: curve.points.map((p) => p.mean),
    dots: curve.points.flatMap((p) => (p.losses.length > 1 ? p.losses.map((v) => [p.lr, v]) : [])),
    tops: curve.points.filter((p) => p.dead || p.mean > cap).map((p) => ({ x: p.lr, dead: p.dead > 0 })),
    note: (i) => {
      const p = curve.points[i];
      const dead = p.dead ? `, ${p.dead} diverged` : '';
      return (p.lr === curve.best ? 'best' : `${p.losses.length} run${p.losses.length === 1 ? '' : 's'}`) + dead;
    },
  }));
  return {
    series,
    x: { label: 'Peak learning rate', kind: 'rate', text: (v) => `lr ${rate(v)}`, log: true, pad: 0.06 },
    y: { label: `Final ${DATA.score}`, ...(DATA.unit === 'images' ? { kind: 'percent', text: percent } : { kind: 'number', text: lossText }), log: false,
      domain: finite.length ? pad([low, cap], 0.06, false) : null },
  };
}

// --- small charts -----------------------------------------------------------------------------

function tile(id, title, metric, y, more = {}) {
  const host = byId(id);
  if (!isCurve(metric)) { host.hidden = true; return false; }
  const build = () => {
    const series = metricSeries(metric, { smooth: more.smooth || 0, raw: more.raw, seeds: false });
    return { series, x: axis(), y: { label: '', log: false, text: plain, kind: 'number', ...y }, guides: more.guides ? more.guides() : [] };
  };
  all.push(new Chart(host, { title, build, height: () => 220 }));
  return true;
}

// Var(c)/Var(g) if noise were independent: one dashed line, or one a value of κ.
function independentGuides() {
  const away = hidden();
  const values = new Set();
  for (const entry of DATA.entries) {
    if (away.has(entry.label)) continue;
    for (const run of entry.runs) {
      const group = run.diagnostics[state.group];
      for (const v of (group && group.independent) || []) if (v !== null) values.add(v.toPrecision(4));
    }
  }
  return [...values].slice(0, 3).map((v) => ({ y: Number(v), label: `${plain(Number(v))} if noise were independent` }));
}

function setUpDiagnostics() {
  const groups = new Set();
  for (const e of DATA.entries) for (const run of e.runs) Object.keys(run.diagnostics).forEach((g) => groups.add(g));
  if (!groups.size) return;
  if (!groups.has(state.group)) state.group = groups.has('all') ? 'all' : [...groups][0];
  byId('diagnostics').hidden = false;
  legend(byId('diagnostics-legend'), DATA.entries.filter(
    (e) => e.runs.some((run) => Object.keys(run.diagnostics).length)));
  if (groups.size > 1) {
    const names = ['all', ...[...groups].filter((g) => g !== 'all')];
    byId('diagnostics-controls').append(segmented('group', 'Group', names.map((g) => [g, g])));
  }
  tile('d-clipped', 'Share of tensors clipped', 'diagnostics.clipped', { kind: 'percent', text: percent, floor: 0 });
  tile('d-norm', 'Norm of the corrected gradient, ‖c‖', 'diagnostics.c_norm', {});
  tile('d-cosine', 'Cosine of this and the last gradient, cos(g, h)', 'diagnostics.cosine', {});
  tile('d-variance', 'Noise added by the correction, Var(c)/Var(g)', 'diagnostics.variance_ratio', {}, { guides: independentGuides });
}

function setUpCost() {
  const shown = [
    tile('t-speed', `${capital(DATA.unit)} per second`, `train.${DATA.unit}_per_second`, { kind: 'tokens', text: large, floor: 0 }, { smooth: 2 }),
    tile('t-norm', 'Gradient norm before clipping', 'train.grad_norm', { floor: 0 }, { smooth: 2, raw: true }),
    tile('t-lr', 'Learning rate', 'train.lr', { kind: 'rate', text: rate, floor: 0 }),
    tile('t-mfu', 'Model FLOPs utilisation', 'train.mfu', { kind: 'percent', text: percent, floor: 0 }),
  ];
  if (shown.some(Boolean) || byId('bars')) byId('cost').hidden = false;
}

// A table that is cut looks whole where scroll bars are hidden: what goes on fades out.
for (const box of document.querySelectorAll('.scroll')) {
  const look = () => {
    const rest = box.scrollWidth - box.clientWidth;
    box.classList.toggle('over', rest > 4);
    box.classList.toggle('more', rest - box.scrollLeft > 4);
  };
  box.addEventListener('scroll', look, { passive: true });
  new ResizeObserver(look).observe(box);
}

setUpMain();
legend(byId('legend'), DATA.entries);
if (DATA.rates.length) {
  byId('rates').hidden = false;
  legend(byId('rates-legend'), DATA.rates.map((curve) => ({ ...curve, compared: true })));
  all.push(new Chart(byId('rates-chart'), {
    title: 'Sensitivity to the learning rate', ends: false, near: 16, build: buildRates,
    height: (w) => Math.round(Math.max(280, Math.min(400, w * 0.42))),
  }));
}
setUpDiagnostics();
setUpCost();
redraw();

// --- theme, address, print --------------------------------------------------------------------

byId('theme').addEventListener('click', () => { setTheme(isDark() ? 'light' : 'dark', true); redraw(); });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
addEventListener('hashchange', () => { readHash(); zoomFromHash(); marks.forEach((mark) => mark()); redraw(); });
let screenTheme = null;
addEventListener('beforeprint', () => { screenTheme = document.documentElement.dataset.theme || ''; setTheme('light', false); redraw(); });
addEventListener('afterprint', () => { setTheme(screenTheme, false); redraw(); });
