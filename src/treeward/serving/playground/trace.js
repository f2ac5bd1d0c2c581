// The score over the words: a chart with a cursor, and the texts shaded.
import { byId, colourOf, dashOf, formatNumber, h, nameOf, s, swatch } from "./elements.js";

const HEIGHT = 300;
const TOP = 26;
const BOTTOM = HEIGHT - 44;
let observer = null;

// White space that would not be seen by itself.
const visible = (text) => text.replaceAll("\n", "\u21b5").replace(/^ +| +$/g, (spaces) => "\u00b7".repeat(spaces.length));
// What a point adds to the text since the point before it.
const textOf = (trace, at) => trace.words.slice(at ? trace.points[at - 1].words : 0, trace.points[at].words).join("");
const changeOf = (trace, at) => (at ? trace.points[at].score - trace.points[at - 1].score : 0);
const pointAt = (trace, word) => (word > trace.words.length ? -1 : trace.points.findLastIndex((point) => point.words <= word));

const segmenter = new Intl.Segmenter(undefined, { granularity: "word" });

// The words of a text in any language, and its punctuation, each with the white space before it.
export function wordsOf(text) {
  const words = [];
  let space = "";
  for (const { segment } of segmenter.segment(text)) {
    if (segment.trim()) words.push(space + segment);
    space = segment.trim() ? "" : space + segment;
  }
  if (space) words.push((words.pop() ?? "") + space);
  return words;
}

// At most `most` numbers of words from 1 to all, at equal distances; all of them is always one.
export function cutsOf(words, most) {
  const count = Math.min(most, words.length);
  const step = count > 1 ? (words.length - 1) / (count - 1) : 0;
  return Array.from({ length: count }, (_, i) => words.length - Math.round((count - 1 - i) * step));
}

// `traces`: {index, points: [{words, score}], words: [text]} of the completions that have one.
export function showTraces(traces) {
  observer?.disconnect();
  byId("tip").hidden = true;
  byId("legend").replaceChildren(...traces.map((trace) => h("li", {}, swatch(trace.index), ` ${nameOf(trace.index)}`)));
  const last = Math.max(1, ...traces.map((trace) => trace.words.length));
  byId("texts").replaceChildren(...traces.map((trace) => shaded(trace, traces)));
  byId("chart").replaceChildren();
  if (!traces.length) return;
  byId("cursor").max = last;
  byId("cursor").value = last;
  observer = new ResizeObserver(() => byId("chart").replaceChildren(chart(traces, last)));
  observer.observe(byId("chart"));
  byId("cursor").oninput = byId("cursor").onfocus = () => choose(traces, Number(byId("cursor").value));
  byId("cursor").onblur = byId("chart").onpointerleave = () => choose(traces, null);
  byId("chart").onpointermove = (event) => choose(traces, byId("chart").wordAt(event.offsetX));
}

function chart(traces, last) {
  const width = Math.max(byId("chart").clientWidth, 240);
  const scores = traces.flatMap((trace) => trace.points.map((point) => point.score));
  const room = (Math.max(...scores) - Math.min(...scores)) * 0.08 || 0.5; // equal scores have no span
  const [low, high] = [Math.min(...scores) - room, Math.max(...scores) + room];
  const yTicks = ticks(low, high, 5);
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(yTicks[1] - yTicks[0] || 1) + 0.01)));
  const left = 16 + 8 * Math.max(...yTicks.map((tick) => formatNumber(tick, digits).length));
  const x = (word) => left + ((word - 1) / Math.max(last - 1, 1)) * (width - 14 - left);
  const y = (score) => BOTTOM - ((score - low) / (high - low)) * (BOTTOM - TOP);
  byId("chart").wordAt = (at) => Math.min(last, Math.max(1, Math.round(1 + ((at - left) / (width - 14 - left)) * (last - 1))));
  byId("chart").place = { x, y };
  const text = (at, properties, words) => s("text", { x: at, ...properties }, words);
  return s("svg", { width, height: HEIGHT, "aria-hidden": "true" },
    yTicks.map((tick) => [
      s("line", { class: tick === 0 ? "axis" : "rule", x1: left, x2: width - 14, y1: y(tick), y2: y(tick) }),
      text(left - 8, { y: y(tick) + 4, "text-anchor": "end" }, formatNumber(tick, digits)),
    ]),
    s("line", { class: "axis", x1: left, x2: width - 14, y1: BOTTOM, y2: BOTTOM }),
    ticks(1, last, width / 110).filter(Number.isInteger).map((tick) => text(x(tick), { y: BOTTOM + 18, "text-anchor": "middle" }, String(tick))),
    text(2, { y: 14 }, "score"),
    text((left + width) / 2, { y: BOTTOM + 38, "text-anchor": "middle" }, "words of the completion"),
    s("line", { class: "cross", y1: TOP, y2: BOTTOM, visibility: "hidden" }),
    traces.map((trace) => {
      const path = trace.points.map((point, at) => `${at ? "L" : "M"}${x(point.words).toFixed(1)} ${y(point.score).toFixed(1)}`);
      const end = trace.points.at(-1);
      return [
        s("path", { class: `line ${colourOf(trace.index)}`, d: path.join(""), "stroke-dasharray": dashOf(trace.index) }),
        s("circle", { class: `mark ${colourOf(trace.index)}`, cx: x(end.words), cy: y(end.score), r: 4 }),
      ];
    }));
}

// Shows the scores at a word, in the tip and in the texts; null for none.
function choose(traces, word) {
  const cross = byId("chart").querySelector(".cross");
  const rows = traces.map((trace) => {
    const at = word === null ? -1 : pointAt(trace, word);
    trace.spans.forEach((span, i) => span.classList.toggle("current", i === at));
    return at >= 0 && h("p", {}, swatch(trace.index), ` ${nameOf(trace.index)}: `, h("b", {}, formatNumber(trace.points[at].score)), h("span", { class: "faint" }, ` ${visible(textOf(trace, at))}`));
  });
  cross.setAttribute("visibility", word === null ? "hidden" : "visible");
  byId("tip").hidden = word === null;
  if (word === null) return;
  const at = byId("chart").place.x(word);
  cross.setAttribute("x1", at);
  cross.setAttribute("x2", at);
  byId("cursor").value = word;
  byId("tip").replaceChildren(h("p", { class: "tip-head" }, `word ${word}`), ...rows.filter(Boolean));
  byId("cursor").setAttribute("aria-valuetext", byId("tip").innerText.replace(/\s*\n\s*/g, "; "));
  const place = byId("chart").getBoundingClientRect();
  const widest = innerWidth - byId("tip").offsetWidth - 8;
  byId("tip").style.left = `${Math.max(8, Math.min(place.left + at + 14, widest))}px`;
  byId("tip").style.top = `${Math.max(8, place.top + 30)}px`;
}

function shaded(trace, traces) {
  const largest = Math.max(1e-9, ...traces.flatMap((one) => one.points.map((_, at) => Math.abs(changeOf(one, at)))));
  trace.spans = trace.points.map((point, at) => {
    const change = changeOf(trace, at);
    const span = h("span", { class: `shade ${change >= 0 ? "up" : "down"}`, onpointerenter: () => choose(traces, point.words) }, textOf(trace, at));
    // The square root lets small changes be seen beside a large one.
    span.style.setProperty("--share", `${Math.round(60 * Math.sqrt(Math.abs(change) / largest))}%`);
    return span;
  });
  const words = h("div", { class: "words", dir: "auto", tabindex: "0", role: "region", "aria-label": `Text of ${nameOf(trace.index).toLowerCase()}, shaded`, onpointerleave: () => choose(traces, null) }, trace.spans);
  return h("article", { class: `text ${colourOf(trace.index)}` }, h("h3", {}, nameOf(trace.index)), words);
}

// Round numbers within [low, high], about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}
