// The page: a person writes, and what they wrote is scored, shared and kept in the tab.
import { asBody, completionOf, empty, example, fromFragment, fromText, isEmpty, toFragment } from "./conversation.js";
import { Trouble, ask, byId, colourOf, formatNumber, h, isNumber, nameOf, plural } from "./elements.js";
import { showScores } from "./results.js";
import { cutsOf, showTraces, wordsOf } from "./trace.js";

const MOST_POINTS = 64; // of a trace
const ROLES = ["system", "user", "assistant", "tool", "developer"];
const state = example();
let served = [];
let scored = null; // the last scores: {body, data}
let running = null;

const say = (text) => (byId("status").textContent = text);
const written = () => JSON.stringify(asBody(state));
const chosen = () => served.find((model) => model.id === (state.model ?? served[0]?.id));

function load(found) {
  Object.assign(state, found);
  draw();
  changed();
}

function changed() {
  sessionStorage.setItem("treeward-draft", written());
  if (location.hash) history.replaceState(null, "", location.pathname + location.search); // a link says what is there
  byId("stale").hidden = scored === null || written() === JSON.stringify(scored.body);
}

function draw() {
  for (const list of ["context", "completions"]) {
    byId(list).replaceChildren(...state[list].map((message, index) => field(message, list, index)));
  }
}

// A turn of the conversation, or a completion. What a pasted message has beside its text goes to the chat template.
function field(message, list, index) {
  const isTurn = list === "context";
  const name = `${isTurn ? "turn" : "completion"} ${index + 1}`;
  const edit = (key) => (event) => {
    message[key] = event.target.value;
    changed();
  };
  const remove = () => {
    state[list].splice(index, 1);
    draw();
    changed();
    (byId(list).querySelectorAll("textarea")[index] ?? byId(`add-${list}`)).focus();
  };
  const roles = [...new Set([...ROLES, message.role])].map((role) => h("option", { selected: role === message.role }, role));
  const role = h("select", { "aria-label": `Role of ${name}`, onchange: edit("role") }, roles);
  const more = Object.keys(message).filter((key) => key !== "role" && key !== "content");
  const text = h("textarea", { "aria-label": `Text of ${name}`, rows: 2, dir: "auto", oninput: edit("content") });
  text.value = message.content;
  return h("li", { class: isTurn ? "turn" : `completion ${colourOf(index)}` },
    h("div", { class: "turn-head" }, isTurn ? role : h("h3", {}, nameOf(index)),
      more.length > 0 && h("span", { class: "faint" }, `with ${more.join(", ")}`),
      h("button", { type: "button", class: "remove", "aria-label": `Remove ${name}`, onclick: remove }, "\u00d7")),
    text);
}

function add(list, message) {
  state[list].push(message);
  draw();
  changed();
  byId(list).lastElementChild.querySelector("textarea").focus();
}

function complain(error) {
  if (error.name === "AbortError") return;
  byId("trouble").textContent = error.message;
  byId("trouble").scrollIntoView({ block: "nearest" });
  if (error.status !== 401) return;
  byId("gate").hidden = false;
  byId("token").focus();
}

async function loadModels() {
  try {
    served = (await ask("v1/models")).data;
  } catch (error) {
    complain(error);
    return;
  }
  byId("gate").hidden = true;
  showModels();
}

// A model that a link names and this server does not have stays named: scoring says that it is not here.
function showModels() {
  const names = [...new Set([...served.map((model) => model.id), ...(state.model ? [state.model] : [])])];
  byId("model").replaceChildren(...names.map((name) => h("option", { selected: name === state.model }, name)));
  const model = chosen();
  byId("model-facts").textContent = [
    model?.max_model_len && `at most ${plural(model.max_model_len, "token")}`,
    model?.members.length > 1 && plural(model.members.length, "member"),
    isNumber(model?.temperature) && `temperature ${formatNumber(model.temperature)}`,
    model?.shaped && "rewards are shaped",
    model?.contract && `contract ${model.contract.slice(0, 8)}`,
  ].filter(Boolean).join(" \u00b7 ");
}

async function score() {
  running?.abort();
  const turn = (running = new AbortController());
  byId("trouble").textContent = "";
  try {
    if (state.completions.every(isEmpty)) throw new Trouble("There is no completion to score: write one.");
    byId("score").setAttribute("aria-busy", "true");
    say("Scoring.");
    const body = JSON.parse(written());
    const blank = state.completions.map(isEmpty);
    const model = chosen();
    const { data } = await ask("v1/rewards", { ...body, on_error: "mask" }, turn.signal);
    scored = { body, data };
    for (const [id, isHidden] of [["results", false], ["stale", true], ["trace", true]]) byId(id).hidden = isHidden;
    byId("before-shaping").hidden = !model?.shaped;
    say(showScores(data, model, blank));
    if (byId("with-trace").checked) await traceAll(body, turn);
  } catch (error) {
    if (turn !== running) return; // a later request has begun, and the page is its
    say("");
    complain(error);
  } finally {
    if (turn === running) byId("score").removeAttribute("aria-busy");
  }
}

// A trace: the scores of a completion that stops after each of its words. Without a score or a text it has none.
async function traceAll({ completions, ...shared }, turn) {
  const textIn = (completion) => (typeof completion === "string" ? completion : completion[0].content);
  const wanted = [...completions.keys()].filter((index) => isNumber(scored.data[index].score) && textIn(completions[index]));
  const traces = await Promise.all(wanted.map(async (index) => {
    const whole = completions[index];
    const words = wordsOf(textIn(whole));
    const cuts = cutsOf(words, MOST_POINTS);
    const texts = cuts.map((count) => words.slice(0, count).join(""));
    const cut = texts.map((text) => (typeof whole === "string" ? text : [{ ...whole[0], content: text }]));
    const { data } = await ask("v1/rewards", { ...shared, completions: cut, shaped: false, on_error: "mask" }, turn.signal);
    const points = cuts.map((count, at) => ({ words: count, score: data[at].score }));
    return { index, words, points: points.filter((point) => isNumber(point.score)) };
  }));
  if (turn !== running) return;
  byId("trace").hidden = !wanted.length;
  showTraces(traces);
}

// Browsers let pages without TLS copy nothing: the text is shown then.
async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    say(done);
  } catch {
    prompt("The browser does not let this page copy: here is the text.", text);
  }
}

function openLink() {
  try {
    const found = fromFragment(location.hash);
    if (found) load(found);
    return found !== null;
  } catch (error) {
    complain(error);
    return false;
  }
}

// A conversation as JSON, pasted anywhere, is read; any other text is pasted as usual.
function paste(event) {
  try {
    const { context, completions, model } = fromText(event.clipboardData.getData("text"));
    load({ model: model ?? state.model, context, completions: completions.length ? completions : state.completions });
    event.preventDefault();
    showModels();
    say(`${plural(context.length, "turn")} and ${plural(completions.length, "completion")} were read.`);
  } catch { /* another text */ }
}

function listen() {
  const on = (id, act, kind = "click") => byId(id).addEventListener(kind, act);
  on("add-context", () => add("context", { role: state.context.at(-1)?.role === "user" ? "assistant" : "user", content: "" }));
  on("add-completions", () => add("completions", completionOf("")));
  on("score", score);
  on("copy-link", () => {
    history.replaceState(null, "", location.pathname + location.search + toFragment(state));
    copy(location.href, "The link is copied. Whoever opens it, and reaches this server, sees the same text.");
  });
  on("copy-json", () => copy(JSON.stringify(asBody(state), null, 2), "Copied as JSON; it is a body for POST /v1/rewards."));
  on("clear", () => confirm("Clear the conversation and its completions?") && load({ ...empty(), model: state.model }));
  on("model", (event) => {
    state.model = event.target.value;
    showModels();
    changed();
  }, "change");
  on("gate", (event) => {
    event.preventDefault();
    sessionStorage.setItem("treeward-token", byId("token").value.trim());
    byId("token").value = byId("trouble").textContent = "";
    loadModels();
  }, "submit");
  addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) score();
  });
  addEventListener("paste", paste);
  addEventListener("hashchange", () => openLink() && score());
}

async function start() {
  listen();
  const draft = sessionStorage.getItem("treeward-draft");
  const isShared = openLink();
  if (!isShared) load(draft ? fromText(draft) : {});
  await loadModels();
  if (isShared && served.length) await score();
  document.documentElement.dataset.ready = "";
}

start();
