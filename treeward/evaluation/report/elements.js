// Making elements, writing numbers, and showing text of unknown origin without letting it act.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const ABSENT = "–";
const MINUS = "−";
const SERIES_COLOURS = 6;
const LONG_TEXT = 280;
const MANY_ROWS = 50;
const WIDE_COLUMNS = 3;

// h("a", {href: "#x", class: "y", onclick: f}, "text", node): text is only ever text.
function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

function s(tag, properties, ...children) {
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

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
let lastId = 0;
const newId = (prefix) => `${prefix}-${++lastId}`;

// Decimals by size: at least three digits that count.
const DECIMALS = [[1000, 0], [100, 1], [10, 2], [0.1, 3], [0.01, 4], [1e-4, 5], [0, 3]];

// Those of the largest, so that numbers side by side have the same.
const decimalsOf = (values) => {
  const largest = Math.max(0, ...values.filter(isNumber).map(Math.abs));
  return DECIMALS.find(([from]) => largest >= from)[1];
};

// The same rules as format_number of blocks.py; a test compares them.
function formatNumber(value, format = "number", decimals = decimalsOf([value])) {
  if (!isNumber(value)) return ABSENT;
  const size = Math.abs(value);
  const fixed = (digits) => size.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  let text;
  if (format === "percent") text = `${(size * 100).toFixed(1)}%`;
  else if (format === "points") text = `${(size * 100).toFixed(1)} points`;
  else if (format === "integer" || (Number.isInteger(size) && size >= 100)) text = fixed(0);
  else if (size !== 0 && (size < 1e-4 || size >= 1e6)) text = size.toExponential(2).replace("e-", `e${MINUS}`);
  else text = fixed(decimals);
  const negative = value < 0 && /[1-9]/.test(text);
  return (negative ? MINUS : (format === "signed" || format === "points") && value > 0 ? "+" : "") + text;
}

// A number that is given, not measured: without decimals that say nothing.
const roundNumber = (value, format) => formatNumber(value, format).replace(/\.0+(?=%|$)/, "");

// "71.0% (62.1% to 79.0%, n = 100)"; what is not known is left out.
function formatInterval(item, format) {
  const parts = [];
  const decimals = decimalsOf([item.value, item.low, item.high]);
  if (isNumber(item.low) || isNumber(item.high)) {
    const [low, high] = [formatNumber(item.low, format, decimals), formatNumber(item.high, format, decimals)];
    parts.push(`${low} to ${high}`.replaceAll(" points", ""));
  }
  if (isNumber(item.count)) parts.push(`n = ${formatNumber(item.count, "integer")}`);
  return formatNumber(item.value, format, decimals) + (parts.length ? ` (${parts.join(", ")})` : "");
}

// A number in a table: its interval beside it in a quieter voice, so that a column of values can be read down.
function numberCell(item, format) {
  const whole = formatInterval(item, format);
  const value = formatNumber(item.value, format, decimalsOf([item.value, item.low, item.high]));
  return [h("span", { class: "cell-value" }, value), h("span", { class: "cell-range" }, whole.slice(value.length))];
}

// Characters that are invisible or reorder their neighbours, and halves of surrogate pairs; not the joiners of emoji.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]|\p{Cs}/gu;

// Text as nodes: hidden characters become labels such as U+202E, and what matches `search` is marked.
function textNodes(text, search = null) {
  const nodes = [];
  const push = (part) => {
    let from = 0;
    for (const match of part.matchAll(HIDDEN)) {
      nodes.push(part.slice(from, match.index));
      const code = `U+${match[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
      nodes.push(h("span", { class: "hidden-character", title: "a character that is not visible" }, code));
      from = match.index + match[0].length;
    }
    nodes.push(part.slice(from));
  };
  text = text.replace(/\r\n/g, "\n");
  if (!search) {
    push(text);
    return nodes;
  }
  let from = 0;
  for (const match of text.matchAll(search)) {
    push(text.slice(from, match.index));
    const first = nodes.length;
    push(match[0]);
    nodes.push(h("mark", null, nodes.splice(first)));
    from = match.index + match[0].length;
  }
  push(text.slice(from));
  return nodes;
}

// One line of at most `length` characters, without what is not visible.
function excerpt(text, length) {
  const line = text.slice(0, 4 * length).replace(HIDDEN, " ").replace(/\s+/g, " ").trim();
  if (line.length <= length) return line;
  return `${Array.from(line.slice(0, length)).slice(0, -1).join("")}…`;
}

// Paragraphs, lists of lines that begin with "- ", **bold** and `code`; everything else is text.
function markdown(text) {
  const inline = (words) => words.split(/(\*\*[^*]+\*\*|`[^`]+`)/).map((part) => {
    if (/^\*\*[^*]+\*\*$/.test(part)) return h("strong", null, part.slice(2, -2));
    if (/^`[^`]+`$/.test(part)) return h("code", null, part.slice(1, -1));
    return part;
  });
  return text.split(/\n\s*\n/).map((part) => part.trim()).filter(Boolean).map((part) => {
    const lines = part.split("\n");
    if (!lines.every((line) => line.startsWith("- "))) return h("p", { dir: "auto" }, inline(part));
    return h("ul", null, lines.map((line) => h("li", { dir: "auto" }, inline(line.slice(2)))));
  });
}

// Order of table cells: numbers by size, text by the alphabet, what is absent last whatever the direction.
function compareCells(a, b, descending) {
  const key = (cell) => (cell !== null && typeof cell === "object" ? cell.value : cell);
  const [left, right] = [key(a), key(b)];
  const absent = (value) => value === null || value === undefined || value === "";
  if (absent(left) || absent(right)) return absent(left) - absent(right);
  const order = isNumber(left) && isNumber(right) ? left - right
    : String(left).localeCompare(String(right), "en", { numeric: true });
  return descending ? -order : order;
}

// Long text is folded into its beginning.
function cellText(text, most = LONG_TEXT) {
  if (text.length <= most) return textNodes(text);
  const all = h("details", { class: "long" }, h("summary", { dir: "auto" }, excerpt(text, most)));
  all.addEventListener("toggle", () => {
    if (all.children.length === 1) all.append(h("div", { class: "words", dir: "auto" }, textNodes(text)));
  });
  return all;
}

// A table with a caption; columns are {key, label, format}. A column that `explains` another stands, on a narrow screen,
// folded below that one's cells: beside them it would set the height of rows whose width is out of sight.
// Its headings sort it, if it has rows to sort. Whole numbers
// have no decimals if the column has nothing else; of many rows the first are shown until all are asked for.
function dataTable(columns, rows, { caption, sortable = true, headColumn = true, most = MANY_ROWS } = {}) {
  const body = h("tbody");
  const state = { key: null, descending: false, most };
  const isText = (column) => (column.format || "text") === "text";
  const whole = new Set(columns.filter((column) => column.format === "number"
    && rows.every((row) => !isNumber(row[column.key]?.value) && (!isNumber(row[column.key]) || Number.isInteger(row[column.key]))))
    .map((column) => column.key));
  const formatOf = (column) => (whole.has(column.key) ? "integer" : isText(column) ? "number" : column.format);
  const shown = (cell, column) => {
    if (cell === null || cell === undefined) return ABSENT;
    if (typeof cell === "object" && !Array.isArray(cell)) return numberCell(cell, cell.format || formatOf(column));
    if (typeof cell === "number") return formatNumber(cell, formatOf(column));
    return cellText(Array.isArray(cell) ? cell.join(", ") : String(cell));
  };
  const kindOf = (column) => `${isText(column) ? "text" : "numeric"}${column.explains ? " explains" : ""}`;
  const explained = (row, column) => columns.filter((other) => other.explains === column.key && row[other.key])
    .map((other) => h("details", { class: "explanation" }, h("summary", null, other.label), textNodes(row[other.key])));
  const heads = columns.map((column) => h("th", { scope: "col", class: kindOf(column) },
    sortable && rows.length > 1
      ? h("button", { type: "button", class: "sort", onclick: () => sort(column) }, column.label ?? column.key)
      : column.label ?? column.key));
  const draw = () => {
    const order = state.key === null ? rows
      : [...rows].sort((a, b) => compareCells(a[state.key], b[state.key], state.descending));
    body.replaceChildren(...order.slice(0, state.most).map((row) => h("tr", null, columns.map((column, index) => {
      const properties = { class: kindOf(column), dir: isText(column) ? "auto" : null };
      return h(headColumn && index === 0 ? "th" : "td", headColumn && index === 0 ? { ...properties, scope: "row" } : properties,
        shown(row[column.key], column), explained(row, column));
    }))));
  };
  const sort = (column) => {
    state.descending = state.key === column.key ? !state.descending : !isText(column);
    state.key = column.key;
    heads.forEach((head, index) => {
      if (columns[index].key !== state.key) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    });
    draw();
  };
  draw();
  const more = rows.length > most && h("button", { type: "button", class: "quiet", onclick: () => {
    state.most = Infinity;
    draw();
    more.remove();
  } }, `Show all ${formatNumber(rows.length, "integer")} rows`);
  // In a table of many columns intervals stand below their values and headings wrap, or the last would be out of sight.
  const hasInterval = (column) => rows.some((row) => isNumber(row[column.key]?.low));
  const isDense = columns.filter(hasInterval).length > WIDE_COLUMNS || columns.length > 2 * WIDE_COLUMNS;
  const scroller = h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: isDense ? "dense" : null },
      h("caption", { class: "visually-hidden" }, caption), h("thead", null, h("tr", null, heads)), body));
  return more ? h("div", { class: "long-table" }, scroller, more) : scroller;
}
