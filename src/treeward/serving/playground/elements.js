// Elements, numbers in words, and requests to the server that gave the page. Text of unknown origin is only ever text.
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "1 4"];

// h("a", {href: "#x", onclick: f}, "text", node)
export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value || value === 0 || value === "") element.setAttribute(name, value);
  }
  element.append(...children.flat(3).filter(Boolean));
  return element;
}

export const byId = (id) => document.getElementById(id);
export const isNumber = Number.isFinite;
export const nameOf = (index) => `Completion ${index + 1}`;
export const colourOf = (index) => `s${index % 6}`;
// Those of one colour have other dashes.
export const dashOf = (index) => DASHES[(index + Math.floor(index / 6)) % 6];
export const plural = (count, word) => `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;

// Three decimals, or as many digits as tell a small or a large number.
export function formatNumber(value, digits = 3) {
  if (!isNumber(value)) return "\u2013";
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e6) ? size.toExponential(2) : size.toFixed(digits);
  // What rounds to 0 has no sign.
  return (value < 0 && /[1-9]/.test(text) ? "\u2212" : "") + text;
}

export const formatShare = (value) => `${(value * 100).toFixed(value > 0.999 || value < 0.001 ? 3 : 1)}%`;

export function swatch(index) {
  const line = s("line", { class: "line", x1: 0, x2: 22, y1: 6, y2: 6, "stroke-dasharray": dashOf(index) });
  return s("svg", { class: colourOf(index), width: 22, height: 12, viewBox: "0 0 22 12", "aria-hidden": "true" }, line);
}

// A mistake that is told to the person as it is.
export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// The JSON of a route. Paths are relative, so that the page works below a prefix of a proxy.
export async function ask(path, body, signal) {
  const token = sessionStorage.getItem("treeward-token");
  const headers = { "content-type": "application/json", ...(token && { authorization: `Bearer ${token}` }) };
  let response, found;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: JSON.stringify(body), signal });
    found = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server cannot be reached, or does not answer as treeward does.");
  }
  if (response.ok) return found;
  const later = response.headers.get("retry-after");
  const said = found.error?.message ?? `status ${response.status}`;
  throw new Trouble(`The server refused: ${said}.${later ? ` Try again in ${later} s.` : ""}`, response.status);
}
