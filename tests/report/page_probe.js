// Run in the page: every text's contrast (WCAG) with what lies behind it, and whether anything is cut off.
const channel = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const parse = c => {
  const m = c.match(/[\d.]+/g).map(Number);
  return m.length > 3 && m[3] === 0 ? null : m.slice(0, 3);
};
const light = c => { const [r, g, b] = c.map(v => channel(v / 255)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = e => {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c) return c;
  }
  return [255, 255, 255];
};
const found = [];
for (const e of document.body.querySelectorAll('*')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || ['STYLE', 'SCRIPT', 'title'].includes(e.tagName) || !e.getClientRects().length) continue;
  const style = getComputedStyle(e);
  const colour = parse(e instanceof SVGElement ? style.fill : style.color);
  const [a, b] = [light(colour), light(behind(e))].sort((x, y) => y - x);
  found.push({text: e.textContent.trim().slice(0, 40), contrast: (a + 0.05) / (b + 0.05)});
}
const drawings = [...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  return {width: box.width, height: box.height, cut: texts.filter(([, r]) =>
    r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1).map(([t]) => t)};
});
const data = {found, drawings, wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  page: light(behind(document.body))};
const out = document.createElement('pre');
out.id = 'probe';
out.textContent = JSON.stringify(data);
document.documentElement.append(out);
