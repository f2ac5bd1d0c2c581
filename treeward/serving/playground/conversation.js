// A conversation and its completions: as a request's body, as a link, and from the JSON or text that people paste.
//
// {model, context: [message], completions: [message]}; a message is {role, content} and whatever else it came with.
import { Trouble } from "./elements.js";

const SPEAKER = /^\s*(system|developer|user|human|assistant|ai|bot|tool)\s*:[ \t]?/i;
const ROLE_OF = { human: "user", ai: "assistant", bot: "assistant", gpt: "assistant" };

export const completionOf = (content) => ({ role: "assistant", content });
export const empty = () => ({ model: null, context: [{ role: "user", content: "" }], completions: [completionOf(""), completionOf("")] });
const isPlain = (message) => Object.keys(message).every((key) => key === "role" || key === "content");
export const isEmpty = (message) => !message.content && isPlain(message);

// The body of POST /v1/rewards; a completion that is only text is written as text.
export function asBody({ model, context, completions }) {
  return { ...(model && { model }), context, completions: completions.map((one) => (isPlain(one) ? one.content : [one])) };
}

// JSON, or a transcript whose turns begin with "User:" and the like. Throws Trouble with the reason.
export function fromText(text) {
  if (!/^\s*[[{]/.test(text)) return fromJson(transcript(text));
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Trouble(`This begins like JSON and is none: ${error.message}.`);
  }
  return fromJson(value);
}

// Of JSON that holds a conversation in any common form.
export function fromJson(value) {
  const { model = null, conversations } = value;
  const messages = Array.isArray(value) ? value : value.messages;
  if (messages) return { model, ...split([readMessages(messages, "messages")]) };
  if (conversations) return { model, ...split(conversations.map((one, i) => readMessages(one, `conversations[${i}]`))) };
  const prompt = value.context ?? value.prompt ?? [];
  const context = typeof prompt === "string" ? [{ role: "user", content: prompt }] : readMessages(prompt, "context");
  const ends = value.completions ?? value.responses ?? [value.chosen, ...several(value.rejected)].filter((end) => end !== undefined);
  if (!Array.isArray(ends)) throw new Trouble("completions must be a list of texts or messages.");
  if (!ends.length && !context.length) throw new Trouble("It needs messages, or context with completions, or prompt with chosen and rejected.");
  const whole = ends.map((end, i) => [...context, ...readEnd(end, `completions[${i}]`, context)]);
  return { model, ...(whole.length ? split(whole) : { context, completions: [] }) };
}

function transcript(text) {
  const messages = [];
  for (const line of text.trim().split(/\r?\n/)) {
    const speaker = SPEAKER.exec(line);
    if (speaker) {
      const name = speaker[1].toLowerCase();
      messages.push({ role: ROLE_OF[name] ?? name, content: line.slice(speaker[0].length) });
    } else if (messages.length) messages.at(-1).content += `\n${line}`;
    else throw new Trouble("The first line says nobody's role: begin the turns with User: and Assistant:, or paste JSON.");
  }
  return messages.map((message) => ({ ...message, content: message.content.trim() }));
}

// One rejected completion, as a text or as messages, or a list of them.
const several = (rejected) => (Array.isArray(rejected) && !rejected[0]?.role ? rejected : [rejected]);

// Some data repeats the context in each completion.
function readEnd(end, where, context) {
  if (end?.completion) return readEnd(end.completion, where, context);
  if (typeof end === "string") return [completionOf(end)];
  const messages = readMessages(Array.isArray(end) ? end : [end], where);
  const repeats = messages.length > context.length && same(messages.slice(0, context.length), context);
  return repeats ? messages.slice(context.length) : messages;
}

function readMessages(value, where) {
  if (!Array.isArray(value)) throw new Trouble(`${where} must be a list of messages, as {"role": "user", "content": "..."}.`);
  return value.map((message, index) => {
    const role = message?.role ?? ROLE_OF[message?.from] ?? message?.from;
    if (typeof role !== "string") throw new Trouble(`${where}[${index}] has no role.`);
    if (message.from) return { role, content: readContent(message.value, `${where}[${index}]`) };
    return { ...message, content: readContent(message.content ?? "", `${where}[${index}]`) };
  });
}

function readContent(content, place) {
  const texts = Array.isArray(content) ? content.map((part) => part?.text) : [content];
  if (texts.every((text) => typeof text === "string")) return texts.join("");
  throw new Trouble(`${place} has content that is no text; this page shows text only.`);
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// Conversations that differ in their last message, the completion. One without a completion is context alone.
function split(whole) {
  const isContext = whole.length === 1 && whole[0].at(-1)?.role !== "assistant";
  if (isContext) return { context: whole[0], completions: [] };
  const context = whole[0]?.slice(0, -1);
  for (const [index, messages] of whole.entries()) {
    if (messages.at(-1)?.role !== "assistant") throw new Trouble(`Completion ${index + 1} does not end with a message of the assistant.`);
    if (!same(messages.slice(0, -1), context)) throw new Trouble("The completions differ in more than their last message.");
  }
  return { context, completions: whole.map((messages) => messages.at(-1)) };
}

// The fragment of a link: base64url of JSON.
export function toFragment(state) {
  const bytes = new TextEncoder().encode(JSON.stringify(asBody(state)));
  const binary = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return `#j${btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "")}`;
}

export function fromFragment(fragment) {
  if (!fragment.startsWith("#j")) return null;
  try {
    const binary = atob(fragment.slice(2).replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
    return fromJson(JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes)));
  } catch {
    throw new Trouble("The link is damaged or was cut.");
  }
}
