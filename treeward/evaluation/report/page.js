// The page: chapters and their blocks, the contents, the theme, printing.
"use strict";

const report = JSON.parse(document.getElementById("report-data").textContent);
const printing = [];

const FIGURES = {
  headline: (block) => h("ul", { class: "cards" }, block.items.map(headlineCard)),
  text: (block) => h("div", { class: "prose" }, markdown(block.markdown)),
  bars: barsFigure,
  histogram: histogramFigure,
  reliability: reliabilityFigure,
  scatter: scatterFigure,
  matrix: matrixFigure,
  curves: curvesFigure,
  table: (block) => dataTable(block.columns, block.rows, { caption: block.title, most: block.most }),
  examples: examplesTable,
  samples: samplesList,
};

// A headline number, its interval in words and, for a fraction, on a line from 0 to 1.
function headlineCard(item) {
  const format = item.format || "number";
  const at = (node, name, value) => {
    node.style.setProperty(name, `${clamp(value, 0, 1) * 100}%`);
    return node;
  };
  const decimals = decimalsOf([item.value, item.low, item.high]);
  const hasInterval = isNumber(item.low) && isNumber(item.high);
  let line = null;
  if (format === "percent" && isNumber(item.value)) {
    line = h("div", { class: "interval", "aria-hidden": "true" },
      isNumber(item.reference) && at(h("span", { class: "chance" }), "left", item.reference),
      hasInterval && at(at(h("span", { class: "span" }), "left", item.low), "width", item.high - item.low),
      at(h("span", { class: "dot" }), "left", item.value));
  }
  const facts = [
    hasInterval && `95% interval ${formatNumber(item.low, format, decimals).replace(" points", "")} to ${formatNumber(item.high, format, decimals)}`,
    [isNumber(item.count) && `n = ${formatNumber(item.count, "integer")}`,
      isNumber(item.reference) && `chance ${roundNumber(item.reference, format)}`].filter(Boolean).join(" · "),
  ].filter(Boolean);
  return h("li", { class: "card" },
    h("div", { class: "card-label", dir: "auto" }, textNodes(String(item.label))),
    h("div", { class: "card-value" }, typeof item.value === "string" ? item.value : formatNumber(item.value, format, decimals)),
    line, facts.map((fact) => h("div", { class: "card-facts" }, fact)),
    item.note && h("div", { class: "card-note", dir: "auto" }, textNodes(String(item.note))));
}

function drawn(block) {
  try {
    return FIGURES[block.kind](block);
  } catch (error) {
    console.error(`block ${block.kind} "${block.title}":`, error);
    return h("p", { class: "trouble" }, `This block could not be drawn (${error.message}). Its numbers are in the JSON.`);
  }
}

function section(block, level) {
  const id = newId("block");
  const heading = block.title && h(`h${level}`, { id, dir: "auto" }, textNodes(block.title));
  const inside = () => [block.note && h("p", { class: "note", dir: "auto" }, textNodes(block.note)), drawn(block)];
  const properties = { class: `block kind-${block.kind}${block.folded ? " folded" : ""}`, "aria-labelledby": block.title ? id : null,
    "aria-label": !block.title && block.kind === "headline" ? "Headline numbers" : null };
  if (!block.folded) return h("section", properties, heading, inside());
  // What is folded is made when it is opened: of many models these are most of the page.
  const folded = h("details", null, h("summary", null, heading));
  folded.addEventListener("toggle", () => { if (folded.open && folded.children.length === 1) fill(folded, null, inside()); });
  return h("section", properties, folded);
}

// A text with a title opens a chapter: what follows it is one level deeper.
function build() {
  const main = document.getElementById("main");
  const entries = [];
  let chapter = null;
  for (const block of report.blocks) {
    const opens = block.kind === "text" && block.title;
    const node = section(block, chapter && !opens ? 3 : 2);
    if (opens) chapter = node.classList.add("chapter") ?? node;
    main.append(node);
    const heading = node.querySelector("h2, h3");
    if (!heading || block.folded) continue;
    const link = h("a", { href: `#${heading.id}` }, textNodes(block.title));
    if (heading.tagName === "H3") entries.at(-1).parts.push(h("li", null, link));
    else entries.push({ link, parts: [] });
  }
  const contents = document.getElementById("contents");
  if (entries.length + entries.flatMap((entry) => entry.parts).length < 2) {
    contents.hidden = true;
    return;
  }
  // Of several chapters the parts are folded: a list of a hundred links is no overview.
  const many = entries.filter((entry) => entry.parts.length).length > 1;
  const inside = ({ link, parts }) => {
    const list = parts.length > 0 && h("ol", { class: "deeper" }, parts);
    return many && list ? h("details", { class: "parts" }, h("summary", null, `${parts.length} part${parts.length > 1 ? "s" : ""}`,
      h("span", { class: "visually-hidden" }, ` of ${link.textContent}`)), list) : list;
  };
  const folded = h("details", null, h("summary", null, "Contents"), h("ol", null, entries.map((entry) => h("li", null, entry.link, inside(entry)))));
  const wide = matchMedia("(min-width: 1100px)");
  const adapt = () => { folded.open = wide.matches; };
  wide.addEventListener("change", adapt);
  adapt();
  folded.addEventListener("click", (event) => { if (event.target.closest("a") && !wide.matches) folded.open = false; });
  contents.append(folded);
}

function recolour() {
  for (const draw of recoloured) draw();
}

// Automatic, light or dark; remembered where the browser lets a file remember.
function theming() {
  const names = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  let theme = "auto";
  try {
    theme = localStorage.getItem("treeward-theme") || "auto";
  } catch {
    theme = "auto";
  }
  if (!names.includes(theme)) theme = "auto";
  const apply = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    recolour();
  };
  button.addEventListener("click", () => {
    theme = names[(names.indexOf(theme) + 1) % names.length];
    try {
      localStorage.setItem("treeward-theme", theme);
    } catch {
      button.title = "this browser does not remember the theme of a file";
    }
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  button.hidden = false;
  apply();
}

// Paper is white, has no scroll bars, and shows the first examples whole.
function printable() {
  const set = (on) => {
    if (on === document.documentElement.hasAttribute("data-printing")) return;
    document.documentElement.toggleAttribute("data-printing", on);
    for (const prepare of printing) prepare(on);
    recolour();
  };
  const media = matchMedia("print");
  media.addEventListener("change", () => set(media.matches));
  addEventListener("beforeprint", () => set(true));
  addEventListener("afterprint", () => set(false));
}

// The link leads to the JSON beside the page; a page that travelled alone gives the same numbers out of itself.
function jsonLink() {
  const link = document.getElementById("json");
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const url = URL.createObjectURL(new Blob([document.getElementById("report-data").textContent, "\n"], { type: "application/json" }));
    h("a", { href: url, download: link.download }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  });
}

document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
addEventListener("scroll", placeTip, { passive: true });
theming();
printable();
jsonLink();
build();
