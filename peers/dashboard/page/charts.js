// Charts of our own: a curve over steps, and who was there. SVG, drawn anew when data or width change.

const SVG = "http://www.w3.org/2000/svg";
const RIGHT = 14, TOP = 10, BOTTOM = 20, ROW = 14;

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round numbers that divide a range into some four pieces.
export function ticks(low, high, count = 4) {
  const span = high - low;
  if (!(span > Math.abs(high) * 1e-9) || !Number.isFinite(span)) return [low];
  const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const first = Math.ceil(low / step), last = Math.min(first + 20, Math.floor(high / step + 1e-9));
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

function scale(steps) {
  const first = steps.length ? steps[0] : 0, last = steps.length ? steps[steps.length - 1] : 1;
  return { first, last: Math.max(last, first + 1) };
}

function frame(svg, height, { first, last }) {
  const width = Math.max(200, svg.clientWidth || 600);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const left = width > 700 ? 120 : 56;
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - RIGHT);
  for (const tick of ticks(first, last, Math.max(2, width / 160))) {
    if (!Number.isInteger(tick)) continue;
    svg.append(element("line", { class: "grid", x1: x(tick), x2: x(tick), y1: TOP, y2: height - BOTTOM }));
    svg.append(element("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, String(tick)));
  }
  return { width, left, x };
}

// rows: [step, …]; value(row) is the number shown, null for none. Returns nothing; the chart keeps its cursor.
export class Curve {
  constructor(svg, value, words, tell) {
    this.svg = svg; this.value = value; this.words = words; this.tell = tell; this.rows = []; this.at = null; this.range = null;
    svg.addEventListener("pointermove", (event) => this.point(event));
    svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  show(rows, range) {
    this.rows = rows.filter((row) => this.value(row) !== null && Number.isFinite(this.value(row)));
    this.range = range;
    this.draw();
  }

  draw() {
    const { svg, rows } = this, height = 190;
    const { width, left, x } = frame(svg, height, this.range || scale(rows.map((row) => row[0])));
    if (!rows.length) {
      svg.append(element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "No step has closed yet: the curve begins with the first"));
      return;
    }
    const values = rows.map(this.value);
    let low = Math.min(...values), high = Math.max(...values);
    if (high - low <= Math.abs(high) * 1e-9) { low -= Math.abs(low) * 0.1 + 0.1; high += Math.abs(high) * 0.1 + 0.1; }
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
    for (const tick of ticks(low, high)) {
      svg.append(element("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      svg.append(element("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
    }
    const path = rows.map((row, index) => `${index ? "L" : "M"}${x(row[0]).toFixed(1)} ${y(this.value(row)).toFixed(1)}`).join("");
    svg.append(element("path", { class: "curve", d: path }));
    if (rows.length === 1) svg.append(element("circle", { cx: x(rows[0][0]), cy: y(values[0]), r: 3, class: "curve" }));
    const last = rows[rows.length - 1];
    svg.setAttribute("aria-label", `${this.words.title}: ${this.words.say(this.value(last))} at step ${last[0]}, ` +
      `between ${this.words.say(low)} and ${this.words.say(high)} since step ${rows[0][0]}`);
    if (this.at !== null && rows[this.at]) {
      const at = x(rows[this.at][0]);
      svg.append(element("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }));
    }
    this.x = x;
  }

  point(event) {
    if (!this.rows.length || !this.x) return;
    const box = this.svg.getBoundingClientRect(), want = event.clientX - box.left;
    let best = 0;
    this.rows.forEach((row, index) => {
      if (Math.abs(this.x(row[0]) - want) < Math.abs(this.x(this.rows[best][0]) - want)) best = index;
    });
    this.move(best);
  }

  key(event) {
    const last = this.rows.length - 1, at = this.at ?? last;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.move(Math.max(0, Math.min(last, to)));
  }

  move(index) {
    if (index === this.at) return;
    this.at = index;
    this.tell(this.rows[index]);
    this.draw();
  }
}

// lives: [{name, off, spans: [{from, to}], marks: [{step, sign, bad}]}]
export class Timeline {
  constructor(svg) {
    this.svg = svg; this.lives = []; this.range = { first: 0, last: 1 };
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  show(lives, range) { this.lives = lives; this.range = range; this.draw(); }

  draw() {
    const height = TOP + BOTTOM + ROW * Math.max(1, this.lives.length);
    const { width, left, x } = frame(this.svg, height, this.range);
    this.lives.forEach((life, index) => {
      const y = TOP + ROW * (index + 0.5);
      for (const span of life.spans) {
        const from = Math.max(left, x(span.from)), to = Math.min(width - RIGHT, Math.max(x(span.to), from + 2));
        this.svg.append(element("line", { class: life.off ? "life off" : "life", x1: from, x2: to, y1: y, y2: y }));
      }
      for (const mark of life.marks) {
        this.svg.append(element("text", { class: mark.bad ? "mark bad" : "mark", x: x(mark.step), y: y + 4, "text-anchor": "middle" }, mark.sign));
      }
      this.svg.append(element("text", { class: "name", x: left - 6, y: y + 4, "text-anchor": "end" }, cut(life.name, left > 60 ? 18 : 8)));
    });
    const gone = this.lives.filter((life) => life.off).length;
    this.svg.setAttribute("aria-label", `${this.lives.length} peers, ${gone} of them not there any more; the list below says who came and went`);
  }
}

function cut(name, most) { return name.length > most ? `${name.slice(0, most - 1)}…` : name; }

export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return String(Number(value.toPrecision(4)));
}

export { scale };
