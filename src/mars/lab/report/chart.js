// One chart in SVG: axes, bands, lines, marks, labels at the ends of lines. hand.js moves it.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const measure = document.createElement('canvas').getContext('2d');
let charts = 0;

function textWidth(text, size = 12, weight = 400) {
  measure.font = `${weight} ${size}px ${FONT}`;
  return measure.measureText(text).width;
}

function fitted(text, room, size, weight) {
  let cut = text;
  while (cut.length > 1 && textWidth(cut + '…', size, weight) > room) cut = cut.slice(0, -1);
  return textWidth(text, size, weight) <= room ? text : cut + '…';
}

class Chart {
  // spec: title, height(width), build() → { series, x, y, guides }, ends (label lines), near (px)
  constructor(host, spec) {
    this.host = host;
    this.spec = spec;
    this.zoom = null; // { x: [a, b], y: [a, b] or null }
    this.clip = `clip${charts++}`;
    this.head = el('figcaption', {}, el('span', {}, spec.title || ''));
    this.box = el('div', { class: 'plot', tabindex: '0', role: 'img' });
    this.tip = el('div', { class: 'tip', 'aria-live': 'polite' });
    this.tip.hidden = true;
    host.append(this.head, this.box, this.tip);
    saveButtons(this);
    hands(this);
    this.width = 0;
    new ResizeObserver(() => {
      if (Math.round(host.clientWidth) !== this.width) this.draw();
    }).observe(host);
  }

  // Everything from data to pixels; cheap enough to do on each change.
  draw() {
    this.width = Math.round(this.host.clientWidth);
    if (!this.width) return;
    this.model = this.spec.build();
    this.series = this.model.series.filter((s) => s.x.length);
    this.height = this.spec.height(this.width);
    this.domains();
    this.layout();
    const root = svg('svg', {
      xmlns: 'http://www.w3.org/2000/svg', width: this.width, height: this.height,
      viewBox: `0 0 ${this.width} ${this.height}`, 'font-family': FONT, 'font-size': 12,
    });
    this.root = root;
    const { left, right, top, bottom } = this.edges;
    const plot = svg('g', { 'clip-path': `url(#${this.clip})` });
    root.append(
      svg('clipPath', { id: this.clip },
        svg('rect', { x: left, y: top, width: right - left, height: bottom - top })),
      this.axes(), plot,
    );
    if (this.series.length) {
      for (const guide of this.model.guides || []) this.guide(root, plot, guide);
      for (const s of this.series) if (s.lo) plot.append(this.band(s));
      for (const role of ['thin', 'main']) {
        for (const s of this.series) if (s.role === role) plot.append(this.line(s));
      }
      for (const s of this.series) this.marks(root, plot, s);
      if (this.labels) root.append(this.endLabels());
    } else {
      root.append(this.text((left + right) / 2, (top + bottom) / 2, 'Nothing to show',
        { 'text-anchor': 'middle' }));
    }
    this.over = svg('g', { 'pointer-events': 'none' });
    root.append(this.over);
    this.box.replaceChildren(root);
    this.box.setAttribute('aria-label', this.describe());
    this.tip.hidden = true;
  }

  domains() {
    const { x, y } = this.model;
    const all = (pick) => this.series.flatMap(pick);
    const whole = extent(all((s) => s.x), x.log) || (x.log ? [1, 10] : [0, 1]);
    this.fullX = x.pad ? pad(whole, x.pad, x.log) : whole[0] === whole[1] ? pad(whole, 0.1, x.log) : whole;
    this.dx = this.zoom ? this.zoom.x : this.fullX;
    if (this.zoom && this.zoom.y) { this.dy = this.zoom.y; return; }
    let values = this.zoom ? null : y.domain;
    if (!values) values = extent(all((s) => this.within(s)), y.log);
    for (const guide of this.model.guides || []) {
      if (values && !this.zoom) values = [Math.min(values[0], guide.y), Math.max(values[1], guide.y)];
    }
    this.dy = pad(values || (y.log ? [1, 10] : [0, 1]), 0.04, y.log);
    if (y.floor !== undefined && this.dy[0] < y.floor && values && values[0] >= y.floor) {
      this.dy[0] = y.floor;
    }
  }

  // The y values of a series inside the shown range of x, the band's too.
  within(s) {
    const [a, b] = this.dx;
    const out = [];
    s.x.forEach((v, i) => {
      if (v < a || v > b) return;
      out.push(s.y[i]);
      if (s.lo) out.push(s.lo[i], s.hi[i]);
    });
    return out;
  }

  layout() {
    const { x, y } = this.model;
    const top = y.label ? 30 : 12;
    const bottom = this.height - (x.label ? 42 : 26);
    this.ty = ticks(this.dy, y.log, Math.max(3, (bottom - top) / 50), y.kind);
    const left = Math.ceil(Math.max(...this.ty.map((t) => textWidth(t.text)), 16)) + 12;
    const main = this.series.filter((s) => s.role === 'main');
    this.labels = this.spec.ends && this.width > 620 && main.length > 1 && main.length < 13;
    const room = this.labels ? Math.max(...main.map((s) => textWidth(s.label, 12.5, 600))) + 16 : 14;
    const right = this.width - Math.min(room, this.width * 0.25);
    this.edges = { left, right, top, bottom };
    this.sx = scale(this.dx, [left, right], x.log);
    this.sy = scale(this.dy, [bottom, top], y.log);
    const wide = x.kind === 'seconds' ? 104 : 92;
    this.tx = ticks(this.dx, x.log, Math.max(2, (right - left) / wide), x.kind);
  }

  text(x, y, content, attributes = {}) {
    return svg('text', { x, y, fill: colour('quiet'), ...attributes }, content);
  }

  axes() {
    const { left, right, top, bottom } = this.edges;
    const g = svg('g', { class: 'axes' });
    for (const t of this.ty) {
      const y = Math.round(this.sy(t.value)) + 0.5;
      g.append(svg('line', { x1: left, x2: right, y1: y, y2: y, stroke: colour('rule') }));
      g.append(this.text(left - 8, y + 4, t.text, { 'text-anchor': 'end' }));
    }
    let free = -Infinity; // labels never touch: one that would is left out
    for (const t of this.tx) {
      const x = this.sx(t.value);
      const half = textWidth(t.text) / 2;
      g.append(svg('line', { x1: x, x2: x, y1: bottom, y2: bottom + 4, stroke: colour('quiet') }));
      const at = Math.min(Math.max(x, half + 2), this.width - half - 2);
      if (at - half < free) continue;
      g.append(this.text(at, bottom + 18, t.text, { 'text-anchor': 'middle' }));
      free = at + half + 10;
    }
    g.append(svg('line', { x1: left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5, stroke: colour('quiet') }));
    const { x, y } = this.model;
    if (x.label) {
      g.append(this.text((left + right) / 2, bottom + 37, x.label, { 'text-anchor': 'middle', class: 'x-label' }));
    }
    if (y.label) g.append(this.text(2, top - 16, y.label, { class: 'y-label' }));
    return g;
  }

  // Pixel points of the shown part; where many fall into a pixel, its lowest and highest.
  pixels(s, ys) {
    const [a, b] = this.dx;
    let from = 0;
    let to = s.x.length;
    while (from + 1 < to && s.x[from + 1] < a) from++;
    while (to - 1 > from && s.x[to - 2] > b) to--;
    const dense = to - from > 2.5 * (this.edges.right - this.edges.left);
    const out = [];
    let column = null;
    const flush = () => {
      if (!column) return;
      const { first, low, high, last } = column;
      const unique = new Set([first, ...(low.i < high.i ? [low, high] : [high, low]), last]);
      for (const p of unique) out.push([p.x, p.y]);
      column = null;
    };
    for (let i = from; i < to; i++) {
      const bad = ys[i] === null || (this.sy.log && ys[i] <= 0) || (this.sx.log && s.x[i] <= 0);
      if (bad) { flush(); out.push(null); continue; }
      const p = { i, x: this.sx(s.x[i]), y: this.sy(ys[i]) };
      if (!dense) { out.push([p.x, p.y]); continue; }
      const key = Math.round(p.x);
      if (!column || column.key !== key) {
        flush();
        column = { key, first: p, low: p, high: p, last: p };
      }
      if (p.y < column.low.y) column.low = p;
      if (p.y > column.high.y) column.high = p;
      column.last = p;
    }
    flush();
    return out;
  }

  path(points) {
    let d = '';
    let pen = 'M';
    for (const p of points) {
      if (!p) { pen = 'M'; continue; }
      // Far outside the picture, coordinates are cut: renderers dislike huge ones.
      d += `${pen}${p[0].toFixed(1)} ${Math.max(-9999, Math.min(9999, p[1])).toFixed(1)}`;
      pen = 'L';
    }
    return d;
  }

  line(s) {
    const points = this.pixels(s, s.y);
    const single = points.filter(Boolean).length === 1;
    if (single) {
      const [x, y] = points.find(Boolean);
      return svg('circle', { cx: x, cy: y, r: 3, fill: s.colour, opacity: s.opacity });
    }
    return svg('path', {
      d: this.path(points), fill: 'none', stroke: s.colour, 'stroke-width': s.width,
      'stroke-opacity': s.opacity, 'stroke-dasharray': s.dash || null, class: `line ${s.role}`,
      'stroke-linejoin': 'round', 'stroke-linecap': 'round', 'data-label': s.label,
    });
  }

  band(s) {
    const high = this.pixels(s, s.hi).filter(Boolean);
    const low = this.pixels(s, s.lo).filter(Boolean).reverse();
    return svg('path', {
      d: this.path([...high, ...low]) + 'Z', fill: s.colour, 'fill-opacity': 0.16, class: 'band',
    });
  }

  // Dots of a series that has them; crosses and arrows at the top for what is not in the picture.
  marks(root, plot, s) {
    const ring = colour('paper');
    for (const [x, y] of s.dots || []) {
      plot.append(svg('circle', { cx: this.sx(x), cy: this.sy(y), r: 2.2, fill: s.colour, opacity: 0.55 }));
    }
    if (s.points) {
      s.x.forEach((x, i) => {
        if (s.y[i] === null) return;
        const best = x === s.best;
        plot.append(svg('circle', {
          cx: this.sx(x), cy: this.sy(s.y[i]), r: best ? 5.5 : 3.5, fill: best ? ring : s.colour,
          stroke: s.colour, 'stroke-width': best ? 2.5 : 1,
        }));
      });
    }
    for (const { x, dead } of s.tops || []) {
      const at = this.sx(x);
      if (at < this.edges.left - 1 || at > this.edges.right + 1) continue;
      const y = this.edges.top + 7 + 12 * s.rank;
      const d = dead
        ? `M${at - 4} ${y - 4}l8 8m0 -8l-8 8` : `M${at} ${y - 4}l4.5 8h-9z`;
      root.append(svg('path', {
        d, stroke: s.colour, 'stroke-width': dead ? 2 : 1, fill: dead ? 'none' : s.colour, class: 'top',
      }));
    }
  }

  guide(root, plot, { y, label, colour: tint }) {
    const at = this.sy(y);
    const { left, right } = this.edges;
    plot.append(svg('line', {
      x1: left, x2: right, y1: at, y2: at, stroke: tint || colour('quiet'), 'stroke-dasharray': '4 4',
    }));
    if (label) root.append(this.text(right - 2, at - 6, label, { 'text-anchor': 'end', 'font-size': 11 }));
  }

  endLabels() {
    const { right, top, bottom } = this.edges;
    const g = svg('g', { class: 'ends', 'font-size': 12.5 });
    const list = this.series.filter((s) => s.role === 'main').map((s) => {
      let i = s.x.length - 1;
      while (i > 0 && (s.x[i] > this.dx[1] || s.y[i] === null)) i--;
      return { s, y: Math.min(Math.max(this.sy(s.y[i]), top + 4), bottom - 4) };
    }).sort((a, b) => a.y - b.y);
    const gap = 15;
    list.forEach((item, i) => { if (i) item.y = Math.max(item.y, list[i - 1].y + gap); });
    let limit = bottom - 2;
    for (let i = list.length - 1; i >= 0; i--) {
      list[i].y = Math.min(list[i].y, limit);
      limit = list[i].y - gap;
    }
    for (const { s, y } of list) {
      g.append(this.text(right + 8, y + 4, fitted(s.label, this.width - right - 10, 12.5, 600), { fill: s.colour, 'font-weight': 600 }));
    }
    return g;
  }

  describe() {
    const main = this.series.filter((s) => s.role === 'main');
    const lasts = main.slice(0, 8).map((s) => {
      const known = s.y.filter((v) => v !== null);
      return known.length ? `${s.label} ends at ${plain(known[known.length - 1])}` : s.label;
    });
    const { x, y } = this.model;
    return `${this.spec.title || y.label} over ${(x.label || 'x').toLowerCase()}. ${lasts.join(', ')}.`;
  }
}
