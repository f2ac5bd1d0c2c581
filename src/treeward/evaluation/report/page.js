// The page: charts, tables, examples, the theme. Everything else is HTML already.
"use strict";

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const readJson = (node) => JSON.parse(node.textContent);

// Charts are drawn where they are in sight; those in a closed fold when it opens.
async function draw(holder) {
  const data = holder.querySelector("script");
  if (!data || !holder.checkVisibility()) return;
  const spec = { ...readJson(data), description: holder.getAttribute("aria-label") };
  if (!holder.closest(".kind-bars")) spec.height = Math.min(spec.height, Math.max(240, 0.75 * holder.clientWidth));
  const options = { mode: "vega-lite", renderer: "svg", ast: true, actions: false, logLevel: 1, config: readJson(document.getElementById("theme-of-charts")) };
  await vegaEmbed(holder, spec, options);
  holder.querySelector("svg").setAttribute("aria-hidden", "true"); // the figure has a description
}

async function drawAll() {
  for (const holder of all(".plot")) await draw(holder);
  document.documentElement.dataset.drawn = "";
}

// A row of the examples opens below itself, with its completions side by side.
const COLUMNS = { outcome: 0, margin: 1, subset: 2, model: 3, id: 4, prompt: 5, detail: 6 };

function toggle(row, open = !row.child.isShown()) {
  if (open) row.child(row.data()[COLUMNS.detail].shown, "detail").show();
  else row.child.hide();
  row.node().querySelector(".open").setAttribute("aria-expanded", open);
}

function examplesTable(element) {
  const { outcome, margin, model, prompt, detail } = COLUMNS;
  const filters = element.previousElementSibling;
  const unknownLast = (sign) => (a, b) => (a === "") - (b === "") || sign * (a - b);
  DataTable.type("known", "order", { asc: unknownLast(1), desc: unknownLast(-1) });
  // The rows come in a template: they are no part of the page until they are on the page that is shown.
  const data = all("tr", element.nextElementSibling.content).map((row) => [...row.cells].map((cell) =>
    ({ shown: cell.innerHTML, order: cell.dataset.order ?? cell.textContent, search: cell.dataset.search ?? cell.innerHTML })));
  const table = new DataTable(element, {
    data, deferRender: true, columns: Object.entries(COLUMNS).map(([className, at]) =>
      ({ data: at, className, render: { _: "shown", sort: "order", type: "order", filter: "search" } })),
    autoWidth: false, pageLength: 25, order: [[margin, "asc"]],
    columnDefs: [{ targets: detail, visible: false }, { targets: margin, type: "known" }, { targets: outcome, type: "string" }, { targets: prompt, orderable: false },
      { targets: model, visible: filters.querySelector("[data-key=model]") !== null }],
    layout: { topStart: () => filters, topEnd: "search", bottomStart: "info", bottomEnd: "paging" },
    language: { search: "Search", searchPlaceholder: 'words, or "a phrase"', zeroRecords: "No example matches. Fewer words or filters find more." },
  });
  for (const select of all("select", filters)) {
    select.addEventListener("change", () => {
      const wanted = select.value;
      table.column(COLUMNS[select.dataset.key]).search.fixed("filter", wanted ? (text) => text === wanted : null);
      table.draw();
    });
  }
  table.on("click", "tbody td", (event) => {
    const node = event.target.closest("tr");
    if (node.querySelector(".open") && !String(getSelection())) toggle(table.row(node));
  });
}

// Automatic, light or dark; remembered where the browser lets a file remember.
function theming() {
  const names = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const memory = { get: () => { try { return localStorage.getItem("treeward-theme"); } catch { return null; } },
    set: (name) => { try { localStorage.setItem("treeward-theme", name); } catch { button.title = "not remembered by this browser"; } } };
  const apply = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
  };
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
    memory.set(next);
    apply(next);
  });
  button.hidden = false;
  apply(names.includes(memory.get()) ? memory.get() : "auto");
}

theming();
all("table.examples").forEach(examplesTable);
// `toggle` does not bubble: it is caught on its way down.
addEventListener("toggle", (event) => all(".plot", event.target).forEach(draw), true);
const contents = document.querySelector(".contents > details");
if (contents && !matchMedia("(min-width: 1100px)").matches) contents.open = false;
drawAll();
