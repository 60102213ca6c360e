// Returns the texts of a page whose contrast with what is behind them is less than 4.5 (WCAG 2, level AA).
const parse = (text) => { const found = text.match(/[\d.]+/g).map(Number); return found.length < 4 ? [...found, 1] : found; };
const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
const back = (node) => { for (; node; node = node.parentElement) { const c = parse(getComputedStyle(node).backgroundColor); if (c[3] > 0) return c; }
  return parse(getComputedStyle(document.body).backgroundColor); };
const low = [];
for (const node of document.querySelectorAll("body *")) {
  const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!text || !node.checkVisibility() || node.closest(".unseen, noscript, .skip")) continue;
  const style = getComputedStyle(node);
  const front = parse(node.closest("svg") ? style.fill : style.color), behind = node.closest("svg") ? back(node.closest("svg")) : back(node);
  const [a, b] = [light(front), light(behind)].sort((x, y) => y - x);
  const ratio = (a + .05) / (b + .05);
  if (ratio < 4.5) low.push(`${node.tagName}.${node.getAttribute("class") || ""} ${ratio.toFixed(2)}: ${node.textContent.trim().slice(0, 30)}`);
}
return low;
