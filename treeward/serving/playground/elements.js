// Making elements and writing numbers; text of unknown origin is only ever text.
const SVG = "http://www.w3.org/2000/svg";
const MINUS = "\u2212";
export const ABSENT = "\u2013";
const SERIES_COLOURS = 6;
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "1 4"];

// h("a", {href: "#x", class: "y", onclick: f}, "text", node)
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function s(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// What a tab keeps until it is closed; a browser may keep nothing, or not so much, and the page works all the same.
export const kept = {
  get(name) {
    try {
      return sessionStorage.getItem(name) || "";
    } catch {
      return "";
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(name, value);
    } catch {
      this.forget(name);
    }
  },
  forget(name) {
    try {
      sessionStorage.removeItem(name);
    } catch {
      // there was nothing
    }
  },
};

export const byId = (id) => document.getElementById(id);
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
export const nameOf = (index) => `Answer ${index + 1}`;
export const namesOf = (places) => (places.length === 1 ? nameOf(places[0]) : `Answers ${places.slice(0, -1).map((index) => index + 1).join(", ")} and ${places.at(-1) + 1}`);
export const colourOf = (index) => `s${index % SERIES_COLOURS}`;
// Those of one colour have other dashes.
export const dashOf = (index) => DASHES[(index + Math.floor(index / SERIES_COLOURS)) % DASHES.length];

// Three decimals, or as many digits as tell a small or a large number.
export function formatNumber(value, { sign = false, digits = 3 } = {}) {
  if (!isNumber(value)) return ABSENT;
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? size.toExponential(2).replace("e-", `e${MINUS}`).replace("e+", "e") : size.toFixed(digits);
  return (value < 0 && /[1-9]/.test(text) ? MINUS : sign && value > 0 ? "+" : "") + text;
}

export function formatShare(value) {
  if (!isNumber(value)) return ABSENT;
  if (value > 0.999 && value < 1) return "> 99.9%";
  if (value < 0.001 && value > 0) return "< 0.1%";
  return `${(value * 100).toFixed(1)}%`;
}

export const plural = (count, word) => `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;

export function swatch(index) {
  return s("svg", { class: `swatch ${colourOf(index)}`, width: 22, height: 12, viewBox: "0 0 22 12", "aria-hidden": "true" },
    s("line", { class: "line", x1: 0, x2: 22, y1: 6, y2: 6, "stroke-dasharray": dashOf(index) }));
}

// White space that would not be seen by itself.
export const visible = (text) => text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replace(/^ +| +$/g, (spaces) => "\u00b7".repeat(spaces.length));
