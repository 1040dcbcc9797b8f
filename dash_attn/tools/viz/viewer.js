"use strict";
// Charts on canvas. The wheel or a pinch zooms, dragging pans. A pointer over a task, or a tap on it, names the task and
// traces the order of its dQ tile. Charts of one section share their time axis.
// Events arrive sorted by (worker, lane, begin) and never overlap in a lane.
const [COMPUTE, REDUCE, STALL] = [0, 1, 2];
const page = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const colourBy = document.getElementById("colour");
// GUTTER: left of the rows, for worker numbers. LABEL: one line above the rows. AXIS: below them, for the time.
const GUTTER = 46, LABEL = 16, AXIS = 38, COMPUTE_SHARE = 0.6;
const FONTS = [12, 11, 10, 9]; // pixels; the largest that fits is taken
const FONT = "px system-ui, sans-serif";
const SLACK = { mouse: 3, pen: 6, touch: 10 }; // pixels that a pointer may move and still count as a click or a tap
let theme, lastScroll = -1e9;

function fail(message) {
  const box = document.getElementById("error");
  box.textContent = "This page could not be drawn: " + message;
  box.style.display = "block";
}
window.addEventListener("error", (event) => fail(event.message));
window.addEventListener("unhandledrejection", (event) => fail(String(event.reason)));

async function unpack(meta) {
  const bytes = Uint8Array.from(atob(meta.blob), (c) => c.charCodeAt(0));
  const inflate = new DecompressionStream("deflate"), writer = inflate.writable.getWriter();
  writer.write(bytes);
  writer.close();
  const buffer = await new Response(inflate.readable).arrayBuffer();
  let at = 0;
  const take = (Kind, count) => {
    const column = new Kind(buffer, at, count);
    at += column.byteLength;
    return column;
  };
  const data = { begin: take(Float32Array, meta.events), end: take(Float32Array, meta.events), task: take(Uint32Array, meta.events) };
  data.first = take(Uint32Array, meta.workers * meta.lanes + 1);
  for (const name of ["batch", "head", "q", "kv", "turn", "target"]) data[name] = take(Uint32Array, meta.tasks);
  Object.assign(data, { heads: meta.heads, batches: meta.batches });
  data.role = take(Uint8Array, meta.events);
  // Events of each task by role, its row, and the contributors of each sum in turn.
  data.of = [0, 1, 2].map(() => new Int32Array(meta.tasks).fill(-1));
  data.worker = new Uint32Array(meta.tasks);
  for (let row = 0; row < data.first.length - 1; row++)
    for (let i = data.first[row]; i < data.first[row + 1]; i++) {
      data.of[data.role[i]][data.task[i]] = i;
      data.worker[data.task[i]] = Math.floor(row / meta.lanes);
    }
  data.sums = new Map();
  for (let t = 0; t < meta.tasks; t++) {
    const sum = data.target[t];
    if (!data.sums.has(sum)) data.sums.set(sum, []);
    data.sums.get(sum)[data.turn[t]] = t;
  }
  return data;
}

// Colours: heads and sequences by hue, tiles along the ramp, from the first to the last of the charts on one axis.
const KEYS = {
  q: (data, task) => data.q[task],
  kv: (data, task) => data.kv[task],
  head: (data, task) => data.batch[task] * data.heads + data.head[task],
  sequence: (data, task) => data.batch[task],
};
const hued = () => colourBy.value === "head" || colourBy.value === "sequence";
function swatch(key, count, role) {
  let rgb = page.hues[key % page.hues.length];
  if (!hued()) {
    const last = page.ramp.length - 1, place = (key / Math.max(1, count - 1)) * last;
    const low = Math.min(Math.floor(place), last - 1), share = place - low;
    rgb = page.ramp[low].map((c, i) => c + (page.ramp[low + 1][i] - c) * share);
  }
  // A reduction is its task, further from the background: darker on light paper, lighter on dark.
  if (role === REDUCE) rgb = rgb.map((c) => (theme.dark ? c + (255 - c) * page.tint : c * page.shade));
  return rgb.map(Math.round);
}

function readTheme() {
  const css = getComputedStyle(document.documentElement);
  theme = Object.fromEntries(["paper", "ink", "muted", "line", "bubble", "stall", "stall-pale"].map((n) => [n, css.getPropertyValue("--" + n).trim()]));
  const tile = document.createElement("canvas"), g = tile.getContext("2d");
  tile.width = tile.height = 8;
  g.fillStyle = theme["stall-pale"];
  g.fillRect(0, 0, 8, 8);
  g.strokeStyle = theme.stall;
  g.lineWidth = 1.5;
  for (const d of [-8, 0, 8]) { g.beginPath(); g.moveTo(d - 1, 9); g.lineTo(d + 9, -1); g.stroke(); }
  theme.hatch = tile;
  theme.dark = matchMedia("(prefers-color-scheme: dark)").matches;
}

function ticks(from, to, room) {
  const raw = (to - from) / Math.max(2, room / 64), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const list = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to * (1 + 1e-9); k++) list.push(k * step);
  return list;
}
const number = (x) => String(Number(x.toPrecision(6)));

class Chart {
  constructor(box, meta, data, group) {
    Object.assign(this, { box, meta, data, group });
    [this.base, this.over] = box.querySelectorAll("canvas");
    this.rowHeight = Math.max(5, Math.min(24, 560 / meta.workers));
    // Two ends need a line of text each, unless they are one.
    this.ends = meta.bound === null || this.bounded() ? 1 : 2;
    this.top = LABEL * this.ends + 2;
    this.bottom = this.top + this.rowHeight * meta.workers;
    this.height = this.bottom + AXIS;
    this.thin = meta.lanes > 1 && this.rowHeight < 9; // reductions beside the compute would only be noise: stalls stay
    for (const canvas of [this.base, this.over]) canvas.style.height = this.height + "px";
  }
  bounded() { return Math.abs(this.meta.bound - this.meta.makespan) <= 1e-9 * this.meta.makespan; }
  x(time) { return GUTTER + ((time - this.group.begin) / (this.group.end - this.group.begin)) * (this.width - GUTTER - 2); }
  time(x) { return this.group.begin + ((x - GUTTER) / (this.width - GUTTER - 2)) * (this.group.end - this.group.begin); }
  band(row, lane) {
    const gap = this.rowHeight > 9 ? 1 : 0, top = this.top + row * this.rowHeight + gap, high = this.rowHeight - 2 * gap;
    if (this.meta.lanes === 1 || (this.thin && lane === 0)) return [top, high];
    if (this.thin) return [top + high * COMPUTE_SHARE, high * (1 - COMPUTE_SHARE)];
    if (lane === 0) return [top, high * COMPUTE_SHARE];
    const share = (high * (1 - COMPUTE_SHARE)) / (this.meta.lanes - 1);
    return [top + high * COMPUTE_SHARE + share * (lane - 1), share];
  }
  // The first event of a lane that ends after a time: ends are sorted, since events of a lane do not overlap.
  find(row, lane, time) {
    const { first, end } = this.data, at = row * this.meta.lanes + lane;
    let low = first[at], high = first[at + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }
  fit(canvas) {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.box.clientWidth;
    this.base.dataset.plot = [GUTTER, this.top, this.width - 2, this.rowHeight].join(" ");
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    return g;
  }
  draw() {
    const g = this.fit(this.base), { begin, end, task, role, first, q } = this.data;
    const hatch = g.createPattern(theme.hatch, "repeat"), fills = new Map(), keyOf = KEYS[colourBy.value];
    g.save();
    g.beginPath();
    g.rect(GUTTER, 0, this.width - GUTTER, this.bottom);
    g.clip();
    g.textAlign = "center";
    g.textBaseline = "middle";
    const room = this.labelRoom(g), labels = [];
    for (let row = 0; row < this.meta.workers; row++) {
      const gap = this.rowHeight > 9 ? 1 : 0, edge = this.x(0);
      g.fillStyle = theme.bubble;
      g.fillRect(edge, this.top + row * this.rowHeight + gap, this.x(this.meta.makespan) - edge, this.rowHeight - 2 * gap);
      for (let lane = 0; lane < this.meta.lanes; lane++) {
        const [top, high] = this.band(row, lane), stop = first[row * this.meta.lanes + lane + 1];
        let drawn = -1;
        for (let i = this.find(row, lane, this.group.begin); i < stop && begin[i] < this.group.end; i++) {
          const left = this.x(begin[i]), right = this.x(end[i]);
          if (right - drawn < 0.5 || (this.thin && role[i] === REDUCE)) continue; // nothing of it would be seen
          drawn = right;
          if (role[i] === STALL) g.fillStyle = this.thin ? theme.stall : hatch;
          else {
            const key = keyOf(this.data, task[i]) * 2 + role[i];
            if (!fills.has(key)) fills.set(key, swatch(key >> 1, this.group.counts[colourBy.value], role[i]));
            const rgb = fills.get(key);
            g.fillStyle = `rgb(${rgb})`;
            const seam = right - left > 5 ? 0.5 : 0;
            g.fillRect(left, top, Math.max(right - left - seam, 0.5), high);
            const [from, to] = [Math.max(left, GUTTER), Math.min(right, this.width)];
            if (role[i] === COMPUTE && to - from >= room) {
              const light = rgb[0] * 0.299 + rgb[1] * 0.587 + rgb[2] * 0.114 > 133;
              labels.push([q[task[i]], (from + to) / 2, top + high / 2 + 0.5, light ? "#1f2430" : "#fff", `rgb(${rgb})`]);
            }
            continue;
          }
          g.fillRect(left, top, Math.max(right - left, 0.5), high);
        }
      }
    }
    const { makespan, bound } = this.meta;
    if (this.ends === 2) this.rule(g, bound, [4, 3], 1.3, 1, "lower bound");
    this.rule(g, makespan, [], 2, 0, bound !== null && this.ends === 1 ? "makespan = lower bound" : "makespan");
    this.labelRoom(g);
    g.textAlign = "center";
    g.lineWidth = 4;
    g.lineJoin = "round";
    const ends = [makespan, bound ?? makespan].map((time) => this.x(time));
    for (const [text, x, y, ink, ground] of labels) {
      if (ends.some((end) => Math.abs(end - x) < room)) { // the line must not read as a digit
        g.strokeStyle = ground;
        g.strokeText(text, x, y);
      }
      g.fillStyle = ink;
      g.fillText(text, x, y);
    }
    g.restore();
    this.frame(g);
  }
  // Sets the font of the numbers in tasks and returns the width that a bar needs to hold one. The widest number and
  // the shortest bar of the chart decide: a chart with only some of its numbers would be hard to read.
  labelRoom(g) {
    const { begin, end, role } = this.data, widest = "0".repeat(String(this.meta.q - 1).length);
    const [, high] = this.band(0, 0), scale = this.x(1) - this.x(0);
    if (this.short === undefined) {
      this.short = Infinity;
      for (let i = 0; i < role.length; i++) if (role[i] === COMPUTE) this.short = Math.min(this.short, end[i] - begin[i]);
    }
    for (const size of FONTS) {
      if (size > high - 2) continue;
      g.font = size + FONT;
      const room = g.measureText(widest).width + 2;
      if (room <= this.short * scale) return room;
    }
    return Infinity;
  }
  // A line at a time, with its name above the rows.
  rule(g, time, dash, width, line, name) {
    const x = this.x(time) - width / 2, text = `${name} ${number(Number(time.toPrecision(5)))}`;
    if (x < GUTTER || x > this.width) return;
    g.font = 12 + FONT;
    // The name stands left of its line, else right of it. Where it fits on neither side, the line begins below it.
    const wide = g.measureText(text).width, right = Math.min(x + 5, this.width - wide - 2);
    const left = x - wide - 5 > GUTTER ? x - wide - 5 : right, crossed = left < x && left + wide > x;
    g.strokeStyle = theme.ink;
    g.lineWidth = width;
    g.setLineDash(dash);
    g.beginPath();
    g.moveTo(x, LABEL * (line + crossed) + 2);
    g.lineTo(x, this.bottom);
    g.stroke();
    g.setLineDash([]);
    g.fillStyle = theme.ink;
    g.textBaseline = "middle";
    g.textAlign = "left";
    g.fillText(text, left, LABEL * (line + 0.5) + 1);
  }
  frame(g) {
    const bottom = this.bottom;
    g.font = 12 + FONT;
    g.fillStyle = theme.muted;
    g.textBaseline = "middle";
    g.textAlign = "right";
    const every = [1, 2, 4, 8, 16, 32].find((k) => k * this.rowHeight >= 13) || 64;
    for (let row = 0; row < this.meta.workers; row += every) g.fillText(row, GUTTER - 6, this.top + (row + 0.5) * this.rowHeight);
    g.save();
    g.translate(8, (this.top + bottom) / 2);
    g.rotate(-Math.PI / 2);
    g.textAlign = "center";
    g.fillText("worker", 0, 0);
    g.restore();
    g.textBaseline = "top";
    g.strokeStyle = theme.line;
    g.lineWidth = 1;
    for (const time of ticks(this.group.begin, this.group.end, this.width)) {
      const x = this.x(time), text = number(time), half = g.measureText(text).width / 2;
      g.beginPath();
      g.moveTo(x, bottom);
      g.lineTo(x, bottom + 4);
      g.stroke();
      g.textAlign = "center";
      g.fillText(text, Math.min(x, this.width - half - 1), bottom + 6);
    }
    g.fillText(`time [${this.meta.unit}]`, (GUTTER + this.width) / 2, bottom + 22);
  }
  hit(x, y) {
    const row = Math.floor((y - this.top) / this.rowHeight), time = this.time(x);
    if (x < GUTTER || row < 0 || row >= this.meta.workers) return -1;
    const reach = 1.5 * (this.time(1) - this.time(0)); // the nearest within a pixel or two: thin bars can be caught
    for (let lane = 0; lane < this.meta.lanes; lane++) {
      const [top, high] = this.band(row, lane), i = this.find(row, lane, time - reach);
      if (y < top || y > top + high || i >= this.data.first[row * this.meta.lanes + lane + 1]) continue;
      if (this.data.begin[i] <= time + reach) return this.data.end[i] <= time && this.data.begin[i + 1] <= time ? i + 1 : i;
    }
    return -1;
  }
  // What is known of a task, and the way its sum takes through the workers, turn by turn.
  describe(event) {
    const d = this.data, t = d.task[event], order = d.sums.get(d.target[t]);
    const span = (name, i) => (i < 0 ? "" : `\n${name} ${number(d.begin[i])} to ${number(d.end[i])} ${this.meta.unit}`);
    const wait = d.of[STALL][t], before = order[d.turn[t] - 1];
    const lines = [`worker ${d.worker[t]}, turn ${d.turn[t]} (0 to ${order.length - 1})`, span("compute", d.of[COMPUTE][t])];
    lines.push(wait < 0 ? "\nno stall" : `\nstall ${number(d.end[wait] - d.begin[wait])} ${this.meta.unit}`);
    if (wait >= 0 && before !== undefined) lines.push(` for turn ${d.turn[before]} (kv tile ${d.kv[before]}, worker ${d.worker[before]})`);
    lines.push(span("reduce", d.of[REDUCE][t]));
    const tile = d.q[t] < this.meta.tiles ? `q tile ${d.q[t]}` : "dK and dV"; // of the end of a cut chain
    const place = (d.batches > 1 ? `${this.meta.word} ${d.batch[t]}, ` : "") + `head ${d.head[t]}, ${tile}, kv tile ${d.kv[t]}`;
    return [place, lines.join("")];
  }
  hover(event) {
    const g = this.fit(this.over), d = this.data;
    if (event < 0) return;
    const t = d.task[event], order = d.sums.get(d.target[t]);
    g.beginPath();
    g.rect(GUTTER, 0, this.width - GUTTER, this.bottom);
    g.clip();
    const box = (i) => {
      const row = d.worker[d.task[i]];
      let lane = 0;
      while (i >= d.first[row * this.meta.lanes + lane + 1]) lane++;
      const [top, high] = this.band(row, lane);
      return [this.x(d.begin[i]), top, this.x(d.end[i]) - this.x(d.begin[i]), high];
    };
    g.strokeStyle = theme.ink;
    g.lineWidth = 1.5;
    const centres = order.map((task) => d.of[REDUCE][task]).filter((i) => i >= 0).map(box);
    for (const [left, top, wide, high] of centres) g.strokeRect(left, top, wide, high);
    g.beginPath();
    centres.forEach(([left, top, wide, high], i) => g[i ? "lineTo" : "moveTo"](left + wide / 2, top + high / 2));
    for (const [colour, width] of [[theme.paper, 4], [theme.ink, 1.5]]) {
      [g.strokeStyle, g.lineWidth] = [colour, width];
      g.stroke();
    }
    g.lineWidth = 2.5;
    for (const role of [COMPUTE, REDUCE, STALL]) if (d.of[role][t] >= 0) g.strokeRect(...box(d.of[role][t]));
  }
}

class Group {
  constructor(charts) {
    this.charts = charts;
    this.limit = Math.max(...charts.map((c) => c.meta.makespan)) * 1.005 || 1;
    [this.begin, this.end] = [0, this.limit];
    const most = (count) => Math.max(...charts.map(count));
    this.counts = { q: most((c) => c.meta.q), kv: most((c) => c.meta.kv), head: most((c) => c.data.batches * c.data.heads), sequence: most((c) => c.data.batches) };
    for (const chart of charts) {
      chart.group = this;
      this.listen(chart);
    }
  }
  show(begin, end) {
    const span = Math.min(this.limit, Math.max(end - begin, this.limit * 1e-5));
    this.begin = Math.max(0, Math.min(begin, this.limit - span));
    this.end = this.begin + span;
    tip.style.display = "none";
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }
  draw() {
    for (const chart of this.charts) {
      chart.draw();
      chart.hover(-1);
      chart.base.dataset.view = [this.begin, this.end].map(number).join(" ");
    }
  }
  zoom(factor, at) { this.show(at - (at - this.begin) * factor, at + (this.end - at) * factor); }
  pan(share) { this.show(this.begin + share * (this.end - this.begin), this.end + share * (this.end - this.begin)); }
  listen(chart) {
    const canvas = chart.base, fingers = new Map();
    let pressed = null; // where a pointer went down, until it has moved too far for a click or a tap
    const spot = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    const point = (event) => {
      const i = chart.hit(...spot(event));
      chart.hover(i);
      tip.style.display = i < 0 ? "none" : "block";
      if (i < 0) return;
      const [head, body] = chart.describe(i), title = document.createElement("b");
      title.textContent = head;
      tip.replaceChildren(title, body);
      tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6)) + "px";
      // A finger hides what is under it: its box stands above it.
      const under = event.clientY + 16, above = event.clientY - tip.offsetHeight - (event.pointerType === "touch" ? 24 : 12);
      const high = event.pointerType === "touch" ? above > 4 : under + tip.offsetHeight > innerHeight;
      tip.style.top = (high ? above : under) + "px";
    };
    const hide = () => {
      chart.hover(-1);
      tip.style.display = "none";
    };
    canvas.addEventListener("wheel", (event) => {
      const full = event.deltaY > 0 && this.end - this.begin >= this.limit;
      // A page that is being scrolled goes on scrolling when a chart comes under the pointer.
      if (full || (!event.ctrlKey && performance.now() - lastScroll < 250)) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / chart.width);
      else this.zoom(Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0018)), chart.time(spot(event)[0]));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, spot(event)[0]);
      pressed = fingers.size === 1 ? [event.clientX, event.clientY] : null;
      if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return point(event);
      if (pressed && Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]) <= (SLACK[event.pointerType] || 3)) return;
      pressed = null;
      const old = [...fingers.values()], x = spot(event)[0];
      fingers.set(event.pointerId, x);
      const now = [...fingers.values()];
      if (now.length === 1 && Math.abs(now[0] - old[0]) > 0) {
        chart.box.classList.add("dragging");
        this.pan((old[0] - now[0]) / (chart.width - GUTTER));
      } else if (now.length === 2) {
        const middle = (now[0] + now[1]) / 2;
        this.zoom(Math.abs(old[0] - old[1]) / Math.max(8, Math.abs(now[0] - now[1])), chart.time(middle));
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      fingers.delete(event.pointerId);
      chart.box.classList.remove("dragging");
      if (pressed) point(event);
      pressed = null;
    });
    // A finger leaves the canvas as soon as it is lifted; what its tap shows stays until the next touch elsewhere.
    canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
    canvas.addEventListener("pointercancel", (event) => {
      fingers.delete(event.pointerId);
      chart.box.classList.remove("dragging");
      pressed = null;
      hide();
    });
    document.addEventListener("pointerdown", (event) => { if (event.target !== canvas) chart.hover(-1); });
    canvas.addEventListener("dblclick", () => this.show(0, this.limit));
    canvas.addEventListener("keydown", (event) => {
      const middle = (this.begin + this.end) / 2;
      const does = { "+": () => this.zoom(0.7, middle), "=": () => this.zoom(0.7, middle), "-": () => this.zoom(1 / 0.7, middle) };
      Object.assign(does, { ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15) });
      for (const key of ["0", "Home", "Escape"]) does[key] = () => this.show(0, this.limit);
      if (!does[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      does[event.key]();
    });
  }
}

function legend() {
  const strip = document.getElementById("key"), g = strip.getContext("2d"), count = 10;
  [strip.width, strip.height] = [90, 12];
  for (let i = 0; i < count; i++) {
    g.fillStyle = `rgb(${swatch(i, count, COMPUTE)})`;
    g.fillRect(i * 9, 0, 9, 12);
  }
  for (const box of document.querySelectorAll("[data-role]")) {
    const kind = ["compute", "reduce"].indexOf(box.dataset.role);
    if (kind >= 0) box.style.background = `rgb(${hued() ? swatch(0, 1, kind) : swatch(1, 4, kind)})`;
  }
}

async function start() {
  const groups = [];
  const redraw = () => { tip.style.display = "none"; readTheme(); legend(); groups.forEach((group) => group.draw()); };
  for (const box of document.querySelectorAll(".group")) {
    const charts = [];
    for (const view of box.querySelectorAll(".view")) {
      const meta = page.charts[Number(view.dataset.chart)];
      charts.push(new Chart(view, meta, await unpack(meta)));
    }
    groups.push(new Group(charts));
  }
  if (groups.length) redraw();
  window.addEventListener("resize", redraw);
  window.addEventListener("scroll", () => { lastScroll = performance.now(); tip.style.display = "none"; }, { passive: true });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  if (colourBy) colourBy.addEventListener("change", redraw);
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".view")) tip.style.display = "none"; });
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => groups.forEach((group) => {
      const factor = Number(button.dataset.zoom);
      if (factor) group.zoom(factor, (group.begin + group.end) / 2);
      else group.show(0, group.limit);
    }));
  document.documentElement.dataset.ready = groups.reduce((sum, group) => sum + group.charts.length, 0);
}
start();
