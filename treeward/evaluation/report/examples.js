// The examples: a list of thousands of which only what is in sight exists, and a reader with the answers side by side.
"use strict";

const OUTCOMES = {
  wrong: { sign: "✗", name: "wrong" },
  tie: { sign: "=", name: "tie" },
  right: { sign: "✓", name: "right" },
  failed: { sign: "!", name: "failed" },
  none: { sign: "·", name: "no order" },
};
const DISAGREE = "disagree";
const outcomeOf = (row) => (row.outcome in OUTCOMES ? row.outcome : "none");
const OVERSCAN = 8;
const PRINTED = 10;

const ORDERS = {
  margin: { name: "Most confident mistakes first", key: (row) => row.margin },
  "-margin": { name: "Most confident right answers first", key: (row) => row.margin, descending: true },
  closest: { name: "Closest calls first", key: (row) => (isNumber(row.margin) ? Math.abs(row.margin) : null) },
  "-length": { name: "Better answer longest first", key: lengthDifference, descending: true },
  length: { name: "Better answer shortest first", key: lengthDifference },
  outcome: { name: "By outcome", key: (row) => Object.keys(OUTCOMES).indexOf(outcomeOf(row)) },
  subset: { name: "By subset", key: (row) => row.subset },
  "-subset": { name: "By subset, backwards", key: (row) => row.subset, descending: true },
  id: { name: "By id", key: (row) => row.id },
  "-id": { name: "By id, backwards", key: (row) => row.id, descending: true },
  file: { name: "As in the file", key: null },
};

// Characters that the best-ranked answers have more than the others, on average.
function lengthDifference(row) {
  const [ranks, lengths] = [row.ranks || [], row.lengths || []];
  const best = Math.min(...ranks);
  const mean = (kept) => kept.reduce((sum, value) => sum + value, 0) / kept.length;
  const [better, worse] = [lengths.filter((_, index) => ranks[index] === best), lengths.filter((_, index) => ranks[index] !== best)];
  return better.length && worse.length ? mean(better) - mean(worse) : null;
}

const contentText = (content) => {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (Array.isArray(content)) return content.map((part) => (typeof part === "string" ? part : part?.text ?? JSON.stringify(part))).join("\n");
  return JSON.stringify(content);
};
const messagesOf = (value) => (Array.isArray(value) ? value : value ? [value] : [])
  .map((message) => (typeof message === "string" ? { role: "", content: message } : message));
const allText = (row) => [row.id, row.subset, ...messagesOf(row.context).map((message) => contentText(message.content)),
  ...(row.completions || []).flatMap((completion) => messagesOf(completion).map((message) => contentText(message.content)))].join("\n");
const promptOf = (row) => contentText((messagesOf(row.context).filter((message) => message.role === "user").at(-1) ?? messagesOf(row.context).at(-1))?.content);

// Words, or "several words" in quotes: all of them must occur.
function searchTerms(text) {
  return [...text.toLowerCase().matchAll(/"([^"]+)"|[^\s"]+/g)].map((match) => match[1] ?? match[0]);
}

function searchPattern(text) {
  const terms = searchTerms(text).map((term) => term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return terms.length ? new RegExp(terms.join("|"), "giu") : null;
}

const byId = new Map();
function findExample(id, source, model) {
  if (id === null || id === undefined) return null;
  if (!byId.size) {
    for (const [name, rows] of Object.entries(report.examples)) {
      for (const row of rows) {
        const key = String(row.id);
        if (!byId.has(key)) byId.set(key, []);
        byId.get(key).push({ name, row });
      }
    }
  }
  const found = (byId.get(String(id)) || []).filter((one) => !source || one.name === source);
  return (found.find((one) => one.row.model === model) || found[0])?.row ?? null;
}

function badge(row) {
  const outcome = outcomeOf(row);
  return h("span", { class: `badge ${outcome}` }, h("span", { "aria-hidden": "true" }, OUTCOMES[outcome].sign), " ", OUTCOMES[outcome].name);
}

function examplesTable(block) {
  const rows = report.examples[block.source];
  const haystacks = new Map();
  const haystack = (row) => {
    if (!haystacks.has(row)) haystacks.set(row, allText(row).toLowerCase());
    return haystacks.get(row);
  };
  const values = (name) => [...new Set(rows.map((row) => (name === "outcome" ? outcomeOf(row) : row[name])).filter((value) => value !== null && value !== undefined))];
  const models = values("model");
  // Examples that one model has right and another has not, though both have scored them; all rows of each.
  const rightOf = new Map();
  for (const row of rows.filter((each) => !["failed", "none"].includes(outcomeOf(each)))) {
    rightOf.set(String(row.id), (rightOf.get(String(row.id)) || new Set()).add(outcomeOf(row) === "right"));
  }
  const isDisputed = (row) => rightOf.get(String(row.id))?.size > 1;
  const disputed = models.length > 1 ? new Set(rows.filter(isDisputed).map((row) => String(row.id))).size : 0;
  const hasOutcome = (row) => !state.outcome || (state.outcome === DISAGREE ? isDisputed(row) : outcomeOf(row) === state.outcome);
  const widest = Math.max(1e-9, ...rows.map((row) => Math.abs(row.margin ?? 0)).sort((a, b) => b - a).slice(0, 1));
  const state = { search: "", subset: "", outcome: "", model: "", order: "margin", ...(block.filter || {}) };
  let shown = [];

  const selectors = {};
  const select = (name, label, options) => {
    const id = newId("select");
    selectors[name] = h("select", { id, "data-filter": name, onchange: () => {
      state[name] = selectors[name].value;
      if (state.outcome === DISAGREE && name === "outcome") selectors.order.value = state.order = "id"; // one below the other
      update();
    } },
      options.map(([value, text]) => h("option", { value }, text)));
    selectors[name].value = state[name];
    return h("div", { class: "field" }, h("label", { for: id }, label), selectors[name]);
  };
  const filter = (name, label) => {
    const present = values(name);
    if (present.length < 2) return null;
    const order = name === "outcome" ? Object.keys(OUTCOMES).filter((outcome) => present.includes(outcome)) : present.sort((a, b) => compareCells(a, b));
    const count = (value) => rows.filter((row) => (name === "outcome" ? outcomeOf(row) : row[name]) === value).length;
    const disagreement = name === "outcome" && disputed > 0
      ? [[DISAGREE, `models disagree (${formatNumber(disputed, "integer")} examples)`]] : [];
    return select(name, label, [["", "all"], ...disagreement, ...order.map((value) =>
      [value, `${name === "outcome" ? OUTCOMES[value].name : value} (${formatNumber(count(value), "integer")})`])]);
  };

  const searchId = newId("search");
  let waiting = 0;
  const search = h("input", { id: searchId, type: "search", "data-filter": "search", placeholder: "words, or \"a phrase\"", autocomplete: "off", spellcheck: "false",
    oninput: () => { clearTimeout(waiting); waiting = setTimeout(() => { state.search = search.value; update(); }, 120); } });
  const found = h("p", { class: "found", role: "status" });
  const clear = h("button", { type: "button", class: "quiet", onclick: () => {
    Object.assign(state, { search: "", subset: "", outcome: "", model: "" });
    search.value = "";
    for (const name of ["subset", "outcome", "model"]) if (selectors[name]) selectors[name].value = "";
    update();
    search.focus();
  } }, "Clear filters");

  const columns = [["outcome", "Outcome", ["outcome"]], ["margin", "Margin", ["margin", "-margin"]], ["subset", "Subset", ["subset", "-subset"]],
    ...(models.length > 1 ? [["model", "Model", null]] : []), ["id", "Id", ["id", "-id"]], ["prompt", "Prompt", null], ["length", "Length gap", ["-length", "length"]]];
  const headings = columns.map(([name, label, orders]) => {
    const turn = () => {
      state.order = orders[(orders.indexOf(state.order) + 1) % orders.length];
      selectors.order.value = state.order;
      update();
    };
    return h("div", { role: "columnheader", class: `column ${name}`, title: name === "length" ? "characters of the better answer less those of the worse" : null },
      orders ? h("button", { type: "button", class: "sort", onclick: turn }, label) : label);
  });
  const body = h("div", { class: "rows", role: "rowgroup" });
  const list = h("div", { class: "list", tabindex: "-1" }, body);
  const nothing = h("p", { class: "nothing", hidden: true }, "No example matches. Fewer words or filters find more.");
  const grid = h("div", { class: `examples${models.length > 1 ? " with-model" : ""}`, role: "table", "aria-label": block.title },
    h("div", { role: "rowgroup", class: "list-head" }, h("div", { role: "row", class: "row", "aria-rowindex": "1" }, headings)), list);
  const printed = h("div", { class: "print-only" });

  const makeRow = (index) => {
    const row = shown[index];
    const bar = h("span", { class: `lean ${isNumber(row.margin) && row.margin < 0 ? "down" : "up"}`, "aria-hidden": "true" });
    bar.style.setProperty("--size", isNumber(row.margin) ? `${Math.min(Math.abs(row.margin) / widest, 1) * 50}%` : "0%");
    const cells = {
      outcome: badge(row),
      margin: [h("span", { class: "figure-text" }, formatNumber(row.margin, "signed")), bar],
      subset: row.subset ?? ABSENT,
      model: row.model ?? ABSENT,
      id: textNodes(String(row.id ?? ABSENT)),
      prompt: h("button", { type: "button", class: "open", dir: "auto" }, excerpt(promptOf(row), 220) || "(no prompt)"),
      length: formatNumber(lengthDifference(row) === null ? null : Math.round(lengthDifference(row)), "signed").replace(/\.0+$/, ""),
    };
    const node = h("div", { role: "row", class: "row", "aria-rowindex": index + 2, "data-index": index },
      columns.map(([name, label]) => h("div", { role: "cell", class: `column ${name}`, "data-label": label }, cells[name])));
    return node;
  };

  const alive = new Map();
  const rowHeight = () => parseFloat(getComputedStyle(grid).getPropertyValue("--row")) || 44;
  const render = () => {
    const height = rowHeight();
    const first = Math.max(0, Math.floor(list.scrollTop / height) - OVERSCAN);
    const last = Math.min(shown.length, Math.ceil((list.scrollTop + (list.clientHeight || 600)) / height) + OVERSCAN);
    for (const [index, node] of alive) {
      if ((index < first || index >= last) && !node.contains(document.activeElement)) {
        node.remove();
        alive.delete(index);
      }
    }
    for (let index = first; index < last; index++) if (!alive.has(index)) alive.set(index, makeRow(index));
    let cursor = body.firstChild;
    for (const index of [...alive.keys()].sort((a, b) => a - b)) {
      const node = alive.get(index);
      node.style.transform = `translateY(${index * height}px)`;
      if (node === cursor) cursor = cursor.nextSibling;
      else body.insertBefore(node, cursor);
    }
    body.style.height = `${shown.length * height}px`;
  };

  const update = () => {
    const terms = searchTerms(state.search);
    shown = rows.filter((row) => (!state.subset || row.subset === state.subset) && (!state.model || row.model === state.model)
      && hasOutcome(row) && terms.every((term) => haystack(row).includes(term)));
    const order = ORDERS[state.order];
    if (order.key) {
      const keyed = shown.map((row) => [order.key(row), row]);
      keyed.sort((a, b) => compareCells(a[0], b[0], order.descending));
      shown = keyed.map((pair) => pair[1]);
    }
    headings.forEach((heading, index) => {
      const orders = columns[index][2];
      if (!orders || !orders.includes(state.order)) heading.removeAttribute("aria-sort");
      else heading.setAttribute("aria-sort", state.order.startsWith("-") ? "descending" : "ascending");
    });
    found.textContent = `${formatNumber(shown.length, "integer")} of ${formatNumber(rows.length, "integer")} ${models.length > 1 ? "rows" : "examples"}`;
    clear.hidden = !(state.search || state.subset || state.outcome || state.model);
    nothing.hidden = shown.length > 0;
    list.hidden = shown.length === 0;
    grid.setAttribute("aria-rowcount", shown.length + 1);
    alive.clear();
    body.replaceChildren();
    list.scrollTop = 0;
    render();
  };

  const focusRow = (index) => {
    if (index < 0 || index >= shown.length) return;
    const height = rowHeight();
    if (index * height < list.scrollTop) list.scrollTop = index * height;
    if ((index + 1) * height > list.scrollTop + list.clientHeight) list.scrollTop = (index + 1) * height - list.clientHeight;
    render();
    alive.get(index)?.querySelector("button").focus({ preventScroll: true });
  };
  list.addEventListener("scroll", () => requestAnimationFrame(render), { passive: true });
  list.addEventListener("click", (event) => {
    const node = event.target.closest(".row");
    if (node && !String(getSelection())) openReader(shown, +node.dataset.index, { search: searchPattern(state.search), onclose: focusRow });
  });
  list.addEventListener("keydown", (event) => {
    const node = event.target.closest(".row");
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    const aim = event.key === "Home" ? 0 : event.key === "End" ? shown.length - 1 : node && step ? clamp(+node.dataset.index + step, 0, shown.length - 1) : null;
    if (aim === null) return;
    event.preventDefault();
    focusRow(aim);
  });
  new ResizeObserver(render).observe(list);
  printing.push((on) => {
    printed.replaceChildren(...(on ? [h("p", null, `The first ${Math.min(PRINTED, shown.length)} of ${found.textContent}. ${ORDERS[state.order].name}.`),
      ...shown.slice(0, PRINTED).map((row) => h("section", { class: "printed" }, h("p", { class: "facts" }, badge(row), ` ${[row.model, row.subset, row.id].filter(Boolean).join(" · ")} · margin ${formatNumber(row.margin, "signed")}`),
        exampleBody(row, null)))] : []));
    for (const folded of printed.querySelectorAll("details")) folded.open = true;
  });

  const node = h("div", { class: "browser" },
    h("div", { class: "toolbar", role: "search" },
      h("div", { class: "field wide" }, h("label", { for: searchId }, "Search"), search),
      filter("outcome", "Outcome"), filter("subset", "Subset"), models.length > 1 && filter("model", "Model"),
      select("order", "Order", Object.entries(ORDERS).map(([value, { name }]) => [value, name]))),
    h("div", { class: "status" }, found, clear), grid, nothing, printed);
  update();
  return node;
}

// A conversation's messages; the turns before the last are folded away when there are many.
function messageList(messages, search, alone) {
  return messages.map((message) => h("div", { class: "message" },
    alone ? null : h("div", { class: "role" }, message.role || "text"),
    h("div", { class: "words", dir: "auto" }, textNodes(contentText(message.content), search))));
}

function exampleBody(row, search) {
  const context = messagesOf(row.context);
  const ranks = row.ranks || [];
  const scores = row.scores || [];
  const distinct = [...new Set(ranks)].sort((a, b) => a - b);
  const highest = Math.max(...scores.filter(isNumber));
  const rankName = (rank) => {
    if (distinct.length < 2) return ranks.length > 1 ? "Tied" : "Answer";
    if (distinct.length === 2) return rank === distinct[0] ? "Better answer" : "Worse answer";
    return `Rank ${distinct.indexOf(rank) + 1} of ${distinct.length}`;
  };
  const order = (row.completions || []).map((_, index) => index).sort((a, b) => (ranks[a] ?? 0) - (ranks[b] ?? 0) || a - b);
  return h("div", { class: "example" },
    h("div", { class: "question" },
      context.length > 2 && h("details", null, h("summary", null, `${context.length - 1} earlier turns`), messageList(context.slice(0, -1), search)),
      messageList(context.length > 2 ? context.slice(-1) : context, search)),
    h("div", { class: `answers of-${Math.min(order.length, 4)}` }, order.map((index) => {
      const completion = messagesOf(row.completions[index]);
      const preferred = isNumber(scores[index]) && scores[index] === highest && scores.length > 1;
      return h("article", { class: `answer${ranks[index] === distinct[0] && distinct.length > 1 ? " better" : ""}` },
        h("h4", null, rankName(ranks[index]), preferred && h("span", { class: "preferred" }, "the model's choice")),
        h("p", { class: "facts" }, h("strong", null, `score ${formatNumber(scores[index], "signed")}`),
          isNumber(row.lengths?.[index]) && ` · ${formatNumber(row.lengths[index], "integer")} characters`,
          isNumber(row.num_tokens?.[index]) && ` · ${formatNumber(row.num_tokens[index], "integer")} tokens`),
        row.errors?.[index] && h("p", { class: "trouble" }, row.errors[index]),
        messageList(completion, search, completion.length === 1));
    })));
}

// The reader shows rows[index]; left and right go through `rows`.
function openReader(rows, index, { search = null, onclose = null } = {}) {
  const reader = document.getElementById("reader");
  const before = document.activeElement;
  let at = index;
  const button = (label, action, properties) => h("button", { type: "button", onclick: action, ...properties }, label);
  const previous = button("← Previous", () => go(-1), { class: "previous" });
  const next = button("Next →", () => go(1), { class: "next" });
  const title = h("h2", { id: "reader-title" });
  const place = h("span", { class: "place", role: "status" });
  const content = h("div", { class: "content", tabindex: "0", role: "region", "aria-label": "Prompt and answers" });
  const go = (step) => {
    if (at + step < 0 || at + step >= rows.length) return;
    at += step;
    draw();
  };
  const draw = () => {
    const row = rows[at];
    title.replaceChildren(badge(row), h("span", null, ` ${row.subset ?? ""}`), h("span", { class: "faint" }, ` ${row.id ?? ""}`));
    place.textContent = rows.length > 1 ? `${formatNumber(at + 1, "integer")} of ${formatNumber(rows.length, "integer")}` : "";
    [previous.disabled, next.disabled] = [at === 0, at === rows.length - 1];
    content.replaceChildren(h("p", { class: "facts" }, row.model && h("strong", { dir: "auto" }, row.model), row.model && " · ",
      `margin ${formatNumber(row.margin, "signed")}`), exampleBody(row, search));
    content.scrollTop = 0;
  };
  reader.replaceChildren(h("div", { class: "reader-head" }, title,
    h("div", { class: "reader-actions" }, place, rows.length > 1 && [previous, next], button("Close", () => reader.close(), { class: "close" }))), content);
  reader.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    go(step);
  };
  reader.onclick = (event) => event.target === reader && reader.close();
  reader.onclose = () => (onclose ? onclose(at) : before?.focus?.());
  hideTip();
  draw();
  reader.showModal();
  content.focus();
}
