// A conversation and its completions: as a request's body, as a link, and from the JSON that people paste.
//
// {model, context: [message], completions: [message]}; a message is {role, content} and whatever else it came with.
import { Trouble } from "./elements.js";

export const completionOf = (content) => ({ role: "assistant", content });
export const empty = () => ({ model: null, context: [{ role: "user", content: "" }], completions: [completionOf(""), completionOf("")] });
const isPlain = (message) => Object.keys(message).every((key) => key === "role" || key === "content");
export const isEmpty = (message) => !message.content && isPlain(message);

// The body of POST /v1/rewards; a completion that is only text is written as text.
export function asBody({ model, context, completions }) {
  return { ...(model && { model }), context, completions: completions.map((one) => (isPlain(one) ? one.content : [one])) };
}

// Of JSON that holds messages, a context or prompt with completions, or a prompt with chosen and rejected; throws for any
// other text.
export function fromText(text) {
  const value = JSON.parse(text);
  const messages = Array.isArray(value) ? value : value.messages;
  const given = value.context ?? value.prompt ?? [];
  const context = readMessages(typeof given === "string" ? [{ role: "user", content: given }] : given);
  const ends = messages ? [messages] : value.completions ?? [value.chosen, value.rejected].filter((end) => end !== undefined);
  if (!ends.length && !context.length) throw new Trouble("There is no conversation in it.");
  const whole = ends.map((end) => [...context, ...readMessages(typeof end === "string" ? [completionOf(end)] : end.completion ?? end)]);
  return { model: value.model ?? null, ...(whole.length ? split(whole) : { context, completions: [] }) };
}

function readMessages(messages) {
  return messages.map((message) => {
    const parts = Array.isArray(message.content) ? message.content.map((part) => part.text) : [message.content ?? ""];
    const isText = typeof message.role === "string" && parts.every((part) => typeof part === "string");
    if (!isText) throw new Trouble("A message has no role, or content that is no text.");
    return { ...message, content: parts.join("") };
  });
}

// Conversations that differ in their last message, the completion. One without a completion is context alone.
function split(whole) {
  if (whole.length === 1 && whole[0].at(-1)?.role !== "assistant") return { context: whole[0], completions: [] };
  const contexts = new Set(whole.map((messages) => JSON.stringify(messages.slice(0, -1))));
  if (contexts.size > 1) throw new Trouble("The completions differ in more than their last message.");
  return { context: whole[0].slice(0, -1), completions: whole.map((messages) => messages.at(-1)) };
}

// The fragment of a link.
export const toFragment = (state) => `#j${encodeURIComponent(JSON.stringify(asBody(state)))}`;

export function fromFragment(fragment) {
  if (!fragment.startsWith("#j")) return null;
  try {
    return fromText(decodeURIComponent(fragment.slice(2)));
  } catch {
    throw new Trouble("The link is damaged or was cut.");
  }
}
