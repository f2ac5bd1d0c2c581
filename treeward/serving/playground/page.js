// The page: what is written is scored, shared and kept.
import { Unreadable, asBody, empty, fromFragment, fromText, isEmpty, toFragment } from "./conversation.js";
import { Editor } from "./editor.js";
import { byId, formatNumber, h, isNumber, kept, namesOf, plural } from "./elements.js";
import { showScores } from "./results.js";
import { ServerError, models, rewards, token, trace } from "./server.js";
import { showTraces } from "./trace.js";

const DRAFT = "treeward-draft";
const THEMES = ["system", "light", "dark"];
const state = empty();
let served = [];
let scored = null; // what was scored last: {body, rows, model, traces}
let running = null;
let cleared = null; // what Clear has taken away

const editor = new Editor(state, changed);

function changed() {
  kept.set(DRAFT, JSON.stringify(asBody(state)));
  forgetCleared();
  if (location.hash.length > 1) history.replaceState(null, "", location.pathname + location.search); // no link says what is not there
  byId("link-field").hidden = true;
  byId("stale").hidden = scored === null || JSON.stringify(asBody(state)) === JSON.stringify(scored.body);
}

function say(text) {
  byId("status").textContent = text;
}

function complain(error) {
  if (error?.name === "AbortError") return;
  const known = error instanceof ServerError || error instanceof Unreadable;
  if (!known) console.error(error);
  if (error.status === 401) {
    byId("gate").hidden = false;
    byId("gate-words").textContent = token.get()
      ? "The server does not accept this token. Another one is kept in this tab until it is closed, and sent to this server only."
      : "This server asks for a bearer token. It is kept in this tab until it is closed, and sent to this server only.";
    byId("token").focus();
    if (!token.get()) return;
  }
  byId("trouble").textContent = known ? error.message : `Something went wrong in this page: ${error.message}`;
  byId("trouble").scrollIntoView({ block: "nearest" });
}

const settle = () => {
  byId("trouble").textContent = "";
};

async function loadModels() {
  try {
    served = (await models()).data;
  } catch (error) {
    byId("model").replaceChildren(h("option", { value: "" }, "unknown"));
    complain(error);
    return false;
  }
  byId("gate").hidden = true;
  showModels();
  return true;
}

// A model that a link names and this server does not have stays named: scoring says that it is not here.
function showModels() {
  const names = served.map((model) => model.id);
  if (state.model && !names.includes(state.model)) names.push(state.model);
  byId("model").replaceChildren(...names.map((name) => h("option", { value: name, selected: name === (state.model ?? names[0]) }, served.some((model) => model.id === name) ? name : `${name} (not here)`)));
  const model = chosen();
  const facts = model && [
    model.max_model_len && `at most ${plural(model.max_model_len, "token")}`,
    model.members?.length > 1 && plural(model.members.length, "member"),
    isNumber(model.temperature) && `temperature ${formatNumber(model.temperature)}`,
    model.shaped && "rewards are shaped",
    model.contract && `contract ${model.contract.slice(0, 8)}`,
  ].filter(Boolean);
  byId("model-facts").textContent = facts?.join(" \u00b7 ") || "";
}

const chosen = () => served.find((model) => model.id === (state.model ?? served[0]?.id));

async function score() {
  running?.abort();
  const turn = (running = new AbortController());
  settle();
  if (!state.answers.length) return complain(new Unreadable("There is no answer to score: add one."));
  if (state.answers.every(isEmpty)) return complain(new Unreadable(state.answers.length === 1 ? "The answer is empty: write it first." : "The answers are empty: write at least one."));
  if (!served.length && !(await loadModels())) return undefined;
  const body = structuredClone(asBody(state));
  const blank = state.answers.map(isEmpty);
  const model = chosen();
  say("Scoring.");
  byId("score").setAttribute("aria-busy", "true");
  try {
    const answer = await rewards(body, turn.signal);
    if (turn !== running) return undefined;
    scored = { body, model: answer.model, contract: answer.contract, rows: answer.data, blank, traces: [] };
    byId("results").hidden = false;
    byId("stale").hidden = true;
    byId("trace").hidden = true;
    byId("before-shaping").hidden = !model?.shaped;
    showTraces([]);
    say(showScores(answer.data, model, blank));
    if (byId("with-trace").checked) await traceAll(body, turn);
  } catch (error) {
    if (turn === running) {
      say("");
      complain(error);
    }
  } finally {
    if (turn === running) byId("score").removeAttribute("aria-busy");
  }
  return undefined;
}

async function traceAll(body, turn) {
  const { rows, blank } = scored;
  byId("trace").hidden = false;
  byId("trace-status").textContent = "Scoring the beginnings of the answers.";
  const problems = new Map(); // what went wrong, and with which answers
  const asked = body.completions.map(async (completion, index) => {
    if (!isNumber(rows[index].score) || blank[index]) return null; // without text there are no tokens to go over
    try {
      return { index, ...(await trace({ ...(body.model && { model: body.model }), context: body.context, completion, max_points: 128 }, turn.signal)) };
    } catch (error) {
      if (error.name === "AbortError" || error.status === 401) throw error;
      if (!(error instanceof ServerError)) throw error;
      problems.set(error.message, [...(problems.get(error.message) ?? []), index].sort((a, b) => a - b));
      return null;
    }
  });
  const traces = (await Promise.all(asked)).filter(Boolean);
  if (turn !== running) return;
  scored.traces = traces.map(({ index, points, tokens, text, end }) => ({ index, text, end, tokens, points }));
  byId("trace-status").textContent = [...problems].map(([message, places]) => `${namesOf(places)}: ${message}`).join(" ");
  if (!traces.length && !problems.size) byId("trace").hidden = true;
  byId("numbers").hidden = !traces.length;
  showTraces(traces);
}

async function makeLink() {
  history.replaceState(null, "", location.pathname + location.search + (await toFragment(state)));
  return location.href;
}

// Browsers let pages without TLS copy nothing; the text is shown then.
async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    say(done);
  } catch {
    return false;
  }
  return true;
}

async function copyLink() {
  const link = await makeLink();
  if (await copy(link, "The link is copied. Whoever opens it, and reaches this server, sees the same text.")) return;
  say("The link is in the address bar, and in the field here.");
  byId("link-field").hidden = false;
  byId("link").value = link;
  byId("link").focus();
  byId("link").select();
}

const asJson = () => JSON.stringify(asBody(state), null, 2);

function download() {
  const isCurrent = scored !== null && JSON.stringify(scored.body) === JSON.stringify(asBody(state));
  const results = isCurrent ? { results: { model: scored.model, contract: scored.contract, data: scored.rows, traces: scored.traces } } : {};
  const url = URL.createObjectURL(new Blob([JSON.stringify({ ...asBody(state), ...results }, null, 2)], { type: "application/json" }));
  h("a", { href: url, download: "playground.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  say(isCurrent ? "The text and its scores are downloaded as playground.json." : "The text is downloaded as playground.json; it has no scores of this version.");
}

async function openLink() {
  let found = null;
  try {
    found = await fromFragment(location.hash);
  } catch (error) {
    complain(error);
  }
  if (found === null) return false;
  const kept = location.hash;
  editor.load({ ...found, answers: found.answers.length ? found.answers : empty().answers });
  history.replaceState(null, "", kept);
  if (served.length) showModels();
  return true;
}

function restoreDraft() {
  try {
    editor.load(fromText(kept.get(DRAFT)));
  } catch {
    // there is none, or one of another version of the page
  }
}

function openPaste() {
  byId("paste-text").value = "";
  byId("paste-trouble").textContent = "";
  byId("paste-dialog").showModal();
  byId("paste-text").focus();
}

function usePasted() {
  try {
    const { context, answers, model } = fromText(byId("paste-text").value);
    editor.load({ model: model ?? state.model, context, answers: answers.length ? answers : state.answers });
    if (served.length) showModels();
    byId("paste-dialog").close();
    say(`${plural(context.length, "turn")} and ${plural(answers.length, "answer")} were read.`);
    byId("score").focus();
  } catch (error) {
    if (!(error instanceof Unreadable)) throw error;
    byId("paste-trouble").textContent = error.message;
    byId("paste-text").focus();
  }
}

// The second press takes the first back, until something else is written.
function clear() {
  const before = cleared === null ? { context: state.context, answers: state.answers } : null;
  editor.load(cleared ?? { context: empty().context, answers: empty().answers });
  cleared = before;
  byId("clear").textContent = cleared ? "Undo clearing" : "Clear";
  say(cleared ? "Cleared." : "The text is back.");
}

function forgetCleared() {
  cleared = null;
  byId("clear").textContent = "Clear";
}

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = `Theme: ${name}`;
  kept.set("treeward-theme", name);
}

function listen() {
  const on = (id, kind, act) => byId(id).addEventListener(kind, act);
  on("score", "click", score);
  on("copy-link", "click", copyLink);
  on("copy-json", "click", async () => (await copy(asJson(), "Copied as JSON; it is a body for POST /v1/rewards.")) || say("The browser does not let this page copy; Download has the same."));
  on("download", "click", download);
  on("clear", "click", clear);
  on("paste", "click", openPaste);
  on("paste-cancel", "click", () => byId("paste-dialog").close());
  on("paste-form", "submit", (event) => {
    event.preventDefault();
    usePasted();
  });
  on("model", "change", () => {
    state.model = byId("model").value;
    showModels();
    changed();
  });
  on("gate", "submit", async (event) => {
    event.preventDefault();
    token.set(byId("token").value.trim());
    byId("token").value = "";
    settle();
    if (await loadModels()) byId("score").focus();
  });
  on("theme", "click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length]));
  addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.isComposing) return;
    event.preventDefault();
    if (byId("paste-dialog").open) usePasted();
    else score();
  });
  addEventListener("hashchange", async () => (await openLink()) && score());
}

async function start() {
  setTheme(THEMES.find((name) => name === kept.get("treeward-theme")) ?? "system");
  listen();
  const isShared = await openLink();
  if (!isShared) restoreDraft();
  if ((await loadModels()) && isShared) await score();
  document.documentElement.dataset.ready = "";
}

start();
