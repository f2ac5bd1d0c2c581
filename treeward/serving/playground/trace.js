// The score over the tokens: a chart that pointer and keyboard read, the texts shaded, and the same as tables.
import { byId, clamp, colourOf, dashOf, formatNumber, h, nameOf, s, swatch, visible } from "./elements.js";

const HEIGHT = 300;
const MANY_ROWS = 600;
const MANY_CHARACTERS = 400; // where a text may be higher than its box on a narrow page, and is scrolled

// `traces`: {index, points: [{tokens, score}], tokens: [{text}]} of the answers that have one.
export function showTraces(traces) {
  chart?.end();
  chart = traces.length ? new Chart(traces) : null;
  byId("tables").replaceChildren(...traces.map(table));
}

let chart = null;

// What a point adds to the text since the point before it.
const textOf = (trace, at) => trace.tokens.slice(at ? trace.points[at - 1].tokens : 0, trace.points[at].tokens).map((token) => token.text).join("");
const changeOf = (trace, at) => (at ? trace.points[at].score - trace.points[at - 1].score : null);
// The last point that is at or before a token.
const pointAt = (trace, token) => trace.points.findLastIndex((point) => point.tokens <= token);

class Chart {
  constructor(traces) {
    this.traces = traces;
    this.last = Math.max(...traces.map((trace) => trace.tokens.length));
    this.stops = [...new Set(traces.flatMap((trace) => trace.points.map((point) => point.tokens)))].sort((a, b) => a - b);
    this.token = this.last;
    this.largest = Math.max(1e-9, ...traces.flatMap((trace) => trace.points.map((_, at) => Math.abs(changeOf(trace, at) ?? 0))));
    this.holder = h("div", {
      class: "plot", tabindex: "0", role: "slider", "aria-label": "The score over the tokens of each answer; arrow keys go from token to token",
      "aria-valuemin": 1, "aria-valuemax": this.last, "aria-orientation": "horizontal", onkeydown: (event) => this.press(event),
      onpointermove: (event) => this.point(event), onpointerdown: (event) => this.point(event), onpointerleave: () => this.leave(),
      onfocus: () => this.choose(this.token), onblur: () => this.leave(),
    });
    this.legend = h("ul", { class: "legend", "aria-hidden": "true" }, traces.map((trace) => h("li", {}, swatch(trace.index), " ", nameOf(trace.index))));
    byId("chart").replaceChildren(this.legend, this.holder);
    byId("texts").replaceChildren(...traces.map((trace) => this.text(trace)));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.holder);
    this.scrolled = () => this.placeTip();
    addEventListener("scroll", this.scrolled, { passive: true });
    this.draw();
    this.describe();
  }

  end() {
    this.observer.disconnect();
    removeEventListener("scroll", this.scrolled);
    byId("tip").hidden = true;
  }

  draw() {
    const width = Math.max(Math.round(this.holder.clientWidth), 240);
    if (width === this.width) return;
    this.width = width;
    const values = this.traces.flatMap((trace) => trace.points.map((point) => point.score));
    let [low, high] = [Math.min(...values), Math.max(...values)];
    const room = (high - low) * 0.08 || 0.5;
    [low, high] = [low - room, high + room];
    const yTicks = ticks(low, high, 5);
    const decimals = decimalsOf(yTicks);
    const box = { left: 16 + 8 * Math.max(...yTicks.map((tick) => formatNumber(tick, { digits: decimals }).length)), right: width - 14, top: 26, bottom: HEIGHT - 44 };
    this.x = (token) => (this.last === 1 ? (box.left + box.right) / 2 : box.left + ((token - 1) / (this.last - 1)) * (box.right - box.left));
    this.y = (score) => box.bottom - ((score - low) / (high - low)) * (box.bottom - box.top);
    const xTicks = ticks(1, this.last, width / 110).filter((tick) => Number.isInteger(tick) && tick >= 1);
    this.cross = s("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
    this.dots = this.traces.map((trace) => s("circle", { class: `dot ${colourOf(trace.index)}`, r: 5, visibility: "hidden" }));
    this.holder.replaceChildren(s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true", focusable: "false" },
      yTicks.map((tick) => [
        s("line", { class: tick === 0 ? "zero" : "grid", x1: box.left, x2: box.right, y1: this.y(tick), y2: this.y(tick) }),
        s("text", { class: "tick", x: box.left - 8, y: this.y(tick) + 4, "text-anchor": "end" }, formatNumber(tick, { digits: decimals })),
      ]),
      s("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      xTicks.map((tick) => s("text", { class: "tick", x: this.x(tick), y: box.bottom + 18, "text-anchor": "middle" }, String(tick))),
      s("text", { class: "tick", x: 2, y: 14 }, "score"),
      s("text", { class: "tick", x: (box.left + box.right) / 2, y: box.bottom + 38, "text-anchor": "middle" }, "tokens of the answer"),
      this.cross,
      this.traces.map((trace) => this.line(trace)),
      this.dots));
    if (!byId("tip").hidden) this.choose(this.token, this.span);
  }

  line(trace) {
    const path = trace.points.map((point, at) => `${at ? "L" : "M"}${this.x(point.tokens).toFixed(1)} ${this.y(point.score).toFixed(1)}`).join("");
    const end = trace.points.at(-1);
    const colour = colourOf(trace.index);
    return [
      s("path", { class: `line ${colour}`, d: path, "stroke-dasharray": dashOf(trace.index) }),
      s("circle", { class: `mark ${colour}`, cx: this.x(end.tokens), cy: this.y(end.score), r: 4 }),
    ];
  }

  press(event) {
    const at = this.stops.indexOf(this.token);
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return this.leave();
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return undefined;
    event.preventDefault();
    return this.choose(this.stops[clamp(at + steps[event.key], 0, this.stops.length - 1)]);
  }

  point(event) {
    const place = this.holder.getBoundingClientRect();
    const at = ((event.clientX - place.left) * this.width) / place.width;
    const nearest = this.stops.reduce((best, stop) => (Math.abs(this.x(stop) - at) < Math.abs(this.x(best) - at) ? stop : best));
    this.choose(nearest);
  }

  // `span`: of the text, if it is there that the pointer is.
  choose(token, span = null) {
    this.token = token;
    this.span = span;
    const x = this.x(token);
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
    this.cross.setAttribute("visibility", "visible");
    const rows = this.traces.map((trace, row) => {
      const at = token > trace.tokens.length ? -1 : pointAt(trace, token);
      const point = trace.points[at];
      this.dots[row].setAttribute("visibility", point ? "visible" : "hidden");
      if (point) {
        this.dots[row].setAttribute("cx", this.x(point.tokens));
        this.dots[row].setAttribute("cy", this.y(point.score));
      }
      this.mark(trace, at);
      return point && h("p", {}, swatch(trace.index), ` ${nameOf(trace.index)}: `, h("b", {}, formatNumber(point.score)), h("span", { class: "faint" }, ` ${visible(textOf(trace, at))}`));
    });
    byId("tip").replaceChildren(h("p", { class: "tip-head" }, `token ${token}`), ...rows.filter(Boolean));
    byId("tip").hidden = false;
    this.placeTip();
    this.describe();
  }

  placeTip() {
    const tip = byId("tip");
    if (tip.hidden) return;
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const place = (this.span ?? this.holder).getBoundingClientRect();
    let [left, top] = [place.left, place.bottom + 8];
    if (this.span) {
      if (top + height > innerHeight) top = place.top - height - 8;
    } else {
      left += (this.x(this.token) * place.width) / this.width + 14;
      if (left + width > innerWidth) left -= 28 + width;
      top = place.top + 30;
    }
    tip.style.left = `${clamp(left, 8, Math.max(8, innerWidth - width - 8))}px`;
    tip.style.top = `${clamp(top, 8, Math.max(8, innerHeight - height - 8))}px`;
  }

  leave() {
    byId("tip").hidden = true;
    this.cross.setAttribute("visibility", "hidden");
    for (const dot of this.dots) dot.setAttribute("visibility", "hidden");
    for (const trace of this.traces) this.mark(trace, -1);
  }

  mark(trace, at) {
    trace.marked?.classList.remove("current");
    trace.marked = trace.spans[at];
    trace.marked?.classList.add("current");
    if (trace.marked && !this.span) showWithin(trace.marked, trace.words);
  }

  describe() {
    const said = this.traces.filter((trace) => this.token <= trace.tokens.length).map((trace) => {
      const at = pointAt(trace, this.token);
      return at < 0 ? "" : `${nameOf(trace.index)} ${formatNumber(trace.points[at].score)} after "${visible(textOf(trace, at))}"`;
    });
    this.holder.setAttribute("aria-valuenow", this.token);
    this.holder.setAttribute("aria-valuetext", `token ${this.token}: ${said.filter(Boolean).join("; ")}`);
  }

  text(trace) {
    trace.spans = trace.points.map((point, at) => {
      const change = changeOf(trace, at);
      const span = h("span", {
        class: change === null ? "shade" : change >= 0 ? "shade up" : "shade down",
        onpointerenter: (event) => this.choose(point.tokens, event.currentTarget), onpointerleave: () => this.leave(),
      }, textOf(trace, at));
      // The square root lets small changes be seen beside a large one.
      span.style.setProperty("--share", `${change === null ? 0 : Math.round(60 * Math.sqrt(Math.abs(change) / this.largest))}%`);
      return span;
    });
    const isLong = trace.text.length + 30 * (trace.text.split("\n").length - 1) > MANY_CHARACTERS;
    trace.words = h("div", { class: "words", dir: "auto", ...(isLong && { tabindex: "0", role: "region", "aria-label": `Text of ${nameOf(trace.index).toLowerCase()}, shaded` }) }, trace.spans);
    return h("article", { class: `text ${colourOf(trace.index)}`, "aria-label": `${nameOf(trace.index)}, shaded` }, h("h3", {}, nameOf(trace.index)), trace.words);
  }
}

// Scrolls the box alone: the page stays where the reader is.
function showWithin(span, box) {
  const [inner, outer] = [span.getBoundingClientRect(), box.getBoundingClientRect()];
  if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom;
  else if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top;
}

function table(trace) {
  const rows = trace.points.slice(0, MANY_ROWS).map((point, at) => h("tr", {},
    h("td", { class: "numeric" }, String(point.tokens)), h("td", { class: "piece" }, visible(textOf(trace, at))),
    h("td", { class: "numeric" }, formatNumber(point.score)), h("td", { class: "numeric" }, formatNumber(changeOf(trace, at), { sign: true }))));
  return h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": `${nameOf(trace.index)}: the score over the tokens` },
    h("table", {}, h("caption", {}, nameOf(trace.index)),
      h("thead", {}, h("tr", {}, ["token", "text", "score", "change"].map((name) => h("th", { scope: "col", class: name === "text" ? null : "numeric" }, name)))),
      h("tbody", {}, rows)));
}

// Round numbers within [low, high], about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const result = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) result.push(index * step + 0); // not -0
  return result;
}

function decimalsOf(values) {
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) : 0.1;
  let digits = 0;
  while (digits < 6 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
  return digits;
}
