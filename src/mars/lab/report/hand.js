// Hover, drag, wheel and keys on a chart.

function hands(chart) {
  const { box } = chart;
  let start = null; // where a drag began
  let at = null; // the crosshair's x, in data

  const place = (event) => {
    const r = box.getBoundingClientRect();
    return [event.clientX - r.left, event.clientY - r.top];
  };
  const clamp = ([x, y]) => {
    const { left, right, top, bottom } = chart.edges;
    return [Math.min(Math.max(x, left), right), Math.min(Math.max(y, top), bottom)];
  };
  const zoomTo = (zoom) => {
    chart.zoom = zoom;
    chart.draw();
    if (chart.spec.zoomed) chart.spec.zoomed(zoom);
  };

  box.addEventListener('pointerdown', (event) => {
    if (event.button || !chart.series.length) return;
    start = clamp(place(event));
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener('pointermove', (event) => {
    if (!chart.root || !chart.series.length) return;
    const p = clamp(place(event));
    if (start) {
      frame(chart, start, p);
      return;
    }
    at = chart.sx.invert(p[0]);
    readout(chart, p[0], p[1]);
  });
  box.addEventListener('pointerup', (event) => {
    if (!start) return;
    const [from, to] = [start, clamp(place(event))];
    start = null;
    const [w, h] = [Math.abs(to[0] - from[0]), Math.abs(to[1] - from[1])];
    if (w < 6) { frame(chart, null); readout(chart, to[0], to[1]); return; }
    const sorted = (a, b) => [Math.min(a, b), Math.max(a, b)];
    const x = sorted(chart.sx.invert(from[0]), chart.sx.invert(to[0]));
    // A flat drag chooses a range of x and lets y fit; a box chooses both.
    const y = h < 24 ? null : sorted(chart.sy.invert(from[1]), chart.sy.invert(to[1]));
    zoomTo({ x, y });
  });
  box.addEventListener('pointercancel', () => { start = null; frame(chart, null); });
  box.addEventListener('pointerleave', () => { if (!start) clearReadout(chart); });
  box.addEventListener('dblclick', () => zoomTo(null));
  box.addEventListener('blur', () => clearReadout(chart));

  const around = (x, factor) => {
    const map = (v) => chart.sx.invert(x + (v - x) * factor);
    const { left, right } = chart.edges;
    const [a, b] = [Math.max(map(left), chart.fullX[0]), Math.min(map(right), chart.fullX[1])];
    const whole = a <= chart.fullX[0] && b >= chart.fullX[1];
    zoomTo(whole ? null : { x: [a, b], y: null });
  };
  // The wheel scrolls the page unless the chart was chosen by a click or Ctrl is held.
  box.addEventListener('wheel', (event) => {
    if (!chart.series.length || (document.activeElement !== box && !event.ctrlKey)) return;
    event.preventDefault();
    around(clamp(place(event))[0], Math.exp(Math.sign(event.deltaY) * 0.2));
  }, { passive: false });

  box.addEventListener('keydown', (event) => {
    if (!chart.series.length) return;
    const { left, right, top } = chart.edges;
    const now = at === null ? (left + right) / 2 : chart.sx(at);
    const step = (right - left) / 60;
    const moves = { ArrowLeft: -step, ArrowRight: step, PageUp: -8 * step, PageDown: 8 * step };
    if (event.key in moves) {
      const x = Math.min(Math.max(now + moves[event.key], left), right);
      at = chart.sx.invert(x);
      readout(chart, x, top + 10);
    } else if (event.key === '+' || event.key === '=') around(now, 0.7);
    else if (event.key === '-') around(now, 1 / 0.7);
    else if (event.key === '0' || event.key === 'Escape') { at = null; zoomTo(null); } else return;
    event.preventDefault();
  });
}

// The rectangle of a drag; null removes it.
function frame(chart, from, to) {
  chart.over.replaceChildren();
  chart.tip.hidden = true;
  if (!from) return;
  const { top, bottom } = chart.edges;
  const flat = Math.abs(to[1] - from[1]) < 24;
  const [y, h] = flat ? [top, bottom - top] : [Math.min(from[1], to[1]), Math.abs(to[1] - from[1])];
  chart.over.append(svg('rect', {
    x: Math.min(from[0], to[0]), width: Math.abs(to[0] - from[0]), y, height: h,
    fill: colour('accent'), 'fill-opacity': 0.12, stroke: colour('accent'), 'stroke-opacity': 0.6,
  }));
}

function clearReadout(chart) {
  if (!chart.over) return;
  chart.over.replaceChildren();
  chart.tip.hidden = true;
}

function nearest(chart, s, x) {
  let found = null;
  s.x.forEach((v, i) => {
    if (s.y[i] === null || v < chart.dx[0] || v > chart.dx[1]) return;
    const away = Math.abs(chart.sx(v) - x);
    if (!found || away < found.away) found = { i, away };
  });
  return found && (!chart.spec.near || found.away <= chart.spec.near) ? found.i : null;
}

// Crosshair, dots, and a small table of the values under it, the lowest first.
function readout(chart, x, y) {
  const rows = [];
  for (const s of chart.series) {
    if (s.role !== 'main') continue;
    const i = nearest(chart, s, x);
    if (i !== null) rows.push({ s, x: s.x[i], y: s.y[i], i });
  }
  // The crosshair snaps to the closest point that was measured.
  const away = (r) => Math.abs(chart.sx(r.x) - x);
  const closest = rows.reduce((a, b) => (a && away(a) <= away(b) ? a : b), null);
  chart.over.replaceChildren();
  chart.tip.hidden = !rows.length;
  if (!closest) return;
  x = chart.sx(closest.x);
  const { top, bottom } = chart.edges;
  chart.over.append(svg('line', { x1: x, x2: x, y1: top, y2: bottom, stroke: colour('quiet'), 'stroke-dasharray': '2 3' }));
  for (const r of rows) {
    chart.over.append(svg('circle', {
      cx: chart.sx(r.x), cy: chart.sy(r.y), r: 3.5, fill: r.s.colour, stroke: colour('paper'), 'stroke-width': 1.5,
    }));
  }
  rows.sort((a, b) => a.y - b.y);
  const { model } = chart;
  const body = rows.map((r) => el('tr', {},
    el('td', {}, swatch(r.s)), el('th', { scope: 'row' }, r.s.label),
    el('td', {}, model.y.text(r.y)),
    el('td', { class: 'quiet' }, r.s.note ? r.s.note(r.i) : r.s.lo ? `${model.y.text(r.s.lo[r.i])}–${model.y.text(r.s.hi[r.i])}` : '')));
  chart.tip.replaceChildren(el('div', { class: 'quiet' }, model.x.text(closest.x)), el('table', {}, ...body));
  const space = chart.host.clientWidth;
  const wide = chart.tip.offsetWidth;
  const side = x + 16 + wide < space ? x + 16 : x - 16 - wide;
  chart.tip.style.left = `${Math.max(0, Math.min(side, space - wide))}px`;
  const tall = chart.tip.offsetHeight;
  chart.tip.style.top = `${chart.box.offsetTop + Math.max(0, Math.min(y - tall / 2, chart.height - tall))}px`;
}

function swatch(s) {
  const line = svg('line', { x1: 1, x2: 15, y1: 5, y2: 5, stroke: s.colour, 'stroke-width': 3, 'stroke-dasharray': s.dash || null });
  return svg('svg', { width: 16, height: 10, 'aria-hidden': 'true' }, line);
}
