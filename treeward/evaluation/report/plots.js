// What every plot needs: scales, axes, a legend, and marks that pointer and keyboard can visit.
"use strict";

const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "1 4"];

const linear = (from, to, start, end) => (value) => start + ((value - from) / (to - from || 1)) * (end - start);
const logarithmic = (from, to, start, end) => {
  const scale = linear(Math.log(from), Math.log(to), start, end);
  return (value) => scale(Math.log(value));
};

// Round numbers within [low, high], about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const result = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) result.push(index * step + 0); // not -0
  return result;
}

// 1, 2, 4, ... or 1, 10, 100, ...
function logarithmicTicks(low, high, count) {
  const base = Math.log2(high / low) <= 12 ? 2 : 10;
  let result = [];
  for (let power = Math.ceil(Math.log(low) / Math.log(base) - 1e-9); base ** power <= high * 1.000001; power++) {
    result.push(base ** power);
  }
  const every = Math.ceil(result.length / Math.max(count, 1));
  return result.filter((_, index) => index % every === 0);
}

// As many decimals as the ticks need, the same for all.
function tickText(values, format) {
  if (format === "percent") return values.map((value) => `${+(value * 100).toFixed(4)}%`);
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(values[0]) || 1;
  if (step >= 1e6 || step < 1e-4) return values.map((value) => formatNumber(value));
  let digits = 0;
  while (digits < 4 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
  return values.map((value) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })
    .replace("-", MINUS));
}

const ruler = document.createElement("canvas").getContext("2d");
function textWidth(text, size = 12.5) {
  ruler.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}

function shorten(text, width) {
  if (textWidth(text) <= width) return text;
  const letters = Array.from(text);
  while (letters.length > 1 && textWidth(`${letters.join("")}…`) > width) letters.pop();
  return `${letters.join("")}…`;
}

// The smallest interval around the values, a little wider so that no mark touches the edge.
function extent(values, padding = 0.04) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!isNumber(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (low === high) return [low - 0.5, high + 0.5];
  return [low - (high - low) * padding, high + (high - low) * padding];
}

// An SVG with axes; x() and y() map data to its pixels.
function axes(width, height, { xRange, yRange, xLabel, yLabel, xFormat, yFormat, xScale, xNamed, grid = true, bottom = 0 }) {
  const roomForLabel = yLabel ? 26 : 12;
  const yTicks = ticks(yRange[0], yRange[1], clamp(height / 60, 3, 6));
  const yTexts = tickText(yTicks, yFormat);
  const left = Math.ceil(Math.max(...yTexts.map((text) => textWidth(text)), 8)) + 12;
  const lastTick = xNamed?.length ? xNamed.at(-1).label : xScale === "log" ? String(+xRange[1].toPrecision(6)) : tickText(ticks(xRange[0], xRange[1], 5), xFormat).at(-1);
  const box = { left, right: width - Math.max(14, Math.ceil(textWidth(lastTick) / 2) + 2), top: roomForLabel, bottom: height - (xLabel ? 46 : 26) - bottom };
  const x = (xScale === "log" ? logarithmic : linear)(xRange[0], xRange[1], box.left, box.right);
  const y = linear(yRange[0], yRange[1], box.bottom, box.top);
  const count = clamp((box.right - box.left) / 80, 2, 9);
  const xTicks = xNamed ? xNamed.map((tick) => tick.x) : (xScale === "log" ? logarithmicTicks : ticks)(xRange[0], xRange[1], count);
  // A name that would touch the one before it is left out; its tick stays.
  let end = -Infinity;
  const apart = ({ x: at, label }) => {
    const half = textWidth(label) / 2;
    if (x(at) - half < end + 6) return "";
    end = x(at) + half;
    return label;
  };
  const xTexts = xNamed ? xNamed.map(apart) : xScale === "log" ? xTicks.map((value) => String(+value.toPrecision(6))) : tickText(xTicks, xFormat);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true", focusable: "false" },
    grid && yTicks.map((tick) => s("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) })),
    yTicks.map((tick, index) => s("text", { class: "tick", x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, yTexts[index])),
    s("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    xTicks.map((tick, index) => [
      s("line", { class: "axis", x1: x(tick), x2: x(tick), y1: box.bottom, y2: box.bottom + 4 }),
      s("text", { class: "tick", x: x(tick), y: box.bottom + 18, "text-anchor": "middle" }, xTexts[index]),
    ]),
    yLabel && s("text", { class: "axis-label", x: 2, y: 12 }, shorten(yLabel, width - 16)),
    xLabel && s("text", { class: "axis-label", x: (box.left + box.right) / 2, y: box.bottom + 38, "text-anchor": "middle" },
      shorten(xLabel, width - 16)));
  return { svg, x, y, box };
}

function swatch(index, shape = "square", dash = index) {
  return s("svg", { class: `swatch s${index % SERIES_COLOURS}`, width: 22, height: 12, viewBox: "0 0 22 12", "aria-hidden": "true" },
    shape === "square" ? s("rect", { class: "mark", x: 4, y: 0, width: 12, height: 12, rx: 2 })
      : s("line", { class: "line", x1: 0, x2: 22, y1: 6, y2: 6, "stroke-dasharray": DASHES[dash % DASHES.length] }));
}

function legend(series, shape) {
  if (series.every((one) => !one.name)) return null;
  return h("ul", { class: "legend" }, series.map((one, index) =>
    h("li", { dir: "auto" }, swatch(one.colour ?? index, shape, one.dash ?? index), " ", one.name)));
}

// A plot in its place: drawn anew when its width changes, with marks to visit.
// `draw(width)` gives {svg, canvas?, marks, by}; a mark is {x, y, box?, lines}; `by` is "x", "y" or "xy".
function plot({ label, draw, onopen }) {
  const holder = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": label });
  let drawn = null;
  let width = 0;
  let current = -1;
  let ring = null;
  const render = () => {
    drawn = draw(width);
    current = -1;
    ring = s("rect", { class: "ring", rx: 4, visibility: "hidden" });
    drawn.svg.append(ring);
    holder.replaceChildren(...[drawn.canvas, drawn.svg].filter(Boolean));
  };
  const show = (index, { speak = false } = {}) => {
    const mark = drawn.marks[index];
    if (!mark) return hide();
    current = index;
    const box = mark.box || { x: mark.x - 8, y: mark.y - 8, width: 16, height: 16 };
    for (const name of ["x", "y", "width", "height"]) ring.setAttribute(name, box[name]);
    ring.setAttribute("visibility", "visible");
    showTip(mark.lines, () => {
      const place = holder.getBoundingClientRect();
      const scale = place.width / width;
      return [place.left + mark.x * scale, place.top + mark.y * scale];
    });
    if (speak) document.getElementById("spoken").textContent = mark.lines.filter(Boolean).join(", ");
    return undefined;
  };
  const hide = () => {
    current = -1;
    if (ring) ring.setAttribute("visibility", "hidden");
    hideTip();
  };
  const nearest = (event) => {
    const place = holder.getBoundingClientRect();
    const scale = width / place.width;
    const [px, py] = [(event.clientX - place.left) * scale, (event.clientY - place.top) * scale];
    let best = -1;
    let least = drawn.by === "xy" ? 30 ** 2 : Infinity;
    drawn.marks.forEach((mark, index) => {
      const dx = drawn.by === "y" ? 0 : mark.x - px;
      const dy = drawn.by === "x" ? 0 : mark.y - py;
      if (dx * dx + dy * dy < least) [best, least] = [index, dx * dx + dy * dy];
    });
    return best;
  };
  const hover = (event) => {
    const index = nearest(event);
    if (index !== current) show(index);
  };
  holder.addEventListener("pointermove", hover);
  holder.addEventListener("pointerdown", hover);
  holder.addEventListener("pointerleave", hide);
  holder.addEventListener("blur", hide);
  if (onopen) holder.addEventListener("click", () => current >= 0 && onopen(drawn.marks[current]));
  holder.addEventListener("keydown", (event) => {
    const last = drawn.marks.length - 1;
    const leap = Math.max(1, Math.round(last / 20));
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: leap, PageUp: -leap }[event.key];
    if (event.key === "Escape") hide();
    else if (event.key === "Enter" && onopen && current >= 0) onopen(drawn.marks[current]);
    else if (event.key === "Home" || event.key === "End") show(event.key === "Home" ? 0 : last, { speak: true });
    else if (step) show(current < 0 ? (step > 0 ? 0 : last) : clamp(current + step, 0, last), { speak: true });
    else return;
    if (event.key !== "Escape") event.preventDefault();
  });
  new ResizeObserver(() => {
    const next = Math.floor(holder.clientWidth);
    if (next < 1 || next === width) return;
    width = next;
    render();
  }).observe(holder);
  if (onopen) holder.classList.add("opens");
  recoloured.push(() => width > 0 && drawn.canvas && render());
  return holder;
}

// Plots on a canvas hold colours of their own: they are drawn again when the theme changes.
const recoloured = [];

let tipAnchor = null;

function showTip(lines, anchor) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...lines.filter(Boolean).map((line, index) =>
    h("div", { class: index === 0 ? "tip-head" : null, dir: "auto" }, textNodes(line))));
  tip.hidden = false;
  tipAnchor = anchor;
  placeTip();
}

// Focus may scroll the page under the tip: it goes with its mark.
function placeTip() {
  const tip = document.getElementById("tip");
  if (tip.hidden) return;
  const [x, y] = tipAnchor();
  const place = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  tip.style.left = `${clamp(x - place.width / 2, 8, Math.max(8, room - place.width - 8))}px`;
  tip.style.top = `${y - place.height - 14 >= 8 ? y - place.height - 14 : y + 18}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

// Colours as the canvas wants them: resolved by the browser for the theme that is shown.
function colour(name) {
  const probe = h("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
