// Download what a chart shows: SVG, PNG, or its numbers as CSV.

function saveButtons(chart) {
  const kinds = { SVG: saveSvg, PNG: savePng, CSV: saveCsv };
  const buttons = Object.entries(kinds).map(([name, save]) => {
    const title = `Download as ${name}`;
    const button = el('button', { type: 'button', title, 'aria-label': `${title}: ${chart.spec.title}` }, name);
    button.addEventListener('click', () => save(chart));
    return button;
  });
  chart.head.append(el('span', { class: 'save' }, ...buttons));
}

function download(chart, ending, blob) {
  const name = (chart.spec.title || 'chart').toLowerCase().replace(/[^a-z0-9]+/g, '-').replace(/^-|-$/g, '');
  const link = el('a', { href: URL.createObjectURL(blob), download: `${name}.${ending}` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// The drawing with a background, a title, and a legend where lines are not labelled.
function picture(chart) {
  const copy = chart.root.cloneNode(true);
  copy.lastChild.remove(); // the crosshair
  const { width } = chart;
  const main = chart.series.filter((s) => s.role === 'main');
  const legend = svg('g', { 'font-size': 12 });
  let [x, y] = [12, chart.height + 18];
  if (!chart.labels) {
    for (const s of main) {
      const wide = textWidth(s.label) + 44;
      if (x + wide > width && x > 12) { x = 12; y += 20; }
      legend.append(
        svg('line', { x1: x, x2: x + 18, y1: y - 4, y2: y - 4, stroke: s.colour, 'stroke-width': 3, 'stroke-dasharray': s.dash || null }),
        svg('text', { x: x + 24, y, fill: colour('ink') }, s.label));
      x += wide;
    }
  }
  const height = chart.labels ? chart.height : y + 12;
  const top = 30;
  copy.setAttribute('height', height + top);
  copy.setAttribute('viewBox', `0 ${-top} ${width} ${height + top}`);
  copy.prepend(
    svg('rect', { x: 0, y: -top, width, height: height + top, fill: colour('paper') }),
    svg('text', { x: 2, y: -10, 'font-size': 15, 'font-weight': 600, fill: colour('ink') }, chart.spec.title || ''));
  copy.append(legend);
  return { text: new XMLSerializer().serializeToString(copy), width, height: height + top };
}

function saveSvg(chart) {
  download(chart, 'svg', new Blob([picture(chart).text], { type: 'image/svg+xml' }));
}

function savePng(chart) {
  const { text, width, height } = picture(chart);
  const image = new Image();
  image.onload = () => {
    const canvas = el('canvas', { width: width * 2, height: height * 2 });
    const context = canvas.getContext('2d');
    context.scale(2, 2);
    context.drawImage(image, 0, 0);
    canvas.toBlob((blob) => download(chart, 'png', blob), 'image/png');
  };
  image.src = 'data:image/svg+xml;charset=utf-8,' + encodeURIComponent(text);
}

// Spreadsheets run cells that begin like a formula: such text gets a quote before it.
function cell(value) {
  if (value === null || value === undefined) return '';
  if (typeof value === 'number') return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return `"${text.replace(/"/g, '""')}"`;
}

function csv(chart) {
  const { x, y } = chart.model;
  const rows = [['series', 'line', x.label || 'x', y.label || chart.spec.title, 'lowest', 'highest']];
  for (const s of chart.series) {
    s.x.forEach((v, i) => rows.push(
      [s.label, s.name || '', v, s.y[i], s.lo ? s.lo[i] : null, s.hi ? s.hi[i] : null]));
  }
  return rows.map((row) => row.map(cell).join(',')).join('\r\n') + '\r\n';
}

function saveCsv(chart) {
  download(chart, 'csv', new Blob([csv(chart)], { type: 'text/csv;charset=utf-8' }));
}
