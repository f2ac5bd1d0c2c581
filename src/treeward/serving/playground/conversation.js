// A conversation and its completions: as a request's body, as a link, and from the JSON that people paste.
//
// {model, context: [message], completions: [message]}; a message is {role, content} and whatever else it came with.
import { Trouble } from "./elements.js";

export const completionOf = (content) => ({ role: "assistant", content });
export const empty = () => ({ model: null, context: [{ role: "user", content: "" }], completions: [completionOf(""), completionOf("")] });
export const example = () => ({ ...empty(), context: [{ role: "user", content: "What is 7 plus 5?" }],
  completions: ["7 plus 5 is 12.", "7 plus 5 is 13."].map(completionOf) });
const isPlain = (message) => Object.keys(message).every((key) => key === "role" || key === "content");
export const isEmpty = (message) => !message.content && isPlain(message);

// The body of POST /v1/rewards; a completion that is only text is written as text.
export function asBody({ model, context, completions }) {
  return { ...(model && { model }), context, completions: completions.map((one) => (isPlain(one) ? one.content : [one])) };
}

// Of JSON that holds a row of data (docs/data.md has the keys), or a list of messages; throws for any other text.
export function fromText(text) {
  const value = JSON.parse(text);
  const valuesOf = (...keys) => (keys.every((key) => value[key] != null) ? keys.map((key) => value[key]) : undefined);
  const context = readMessages(value.context ?? value.prompt ?? value.instruction ?? [], "user");
  const ends = (Array.isArray(value) ? [value] : value.completions ?? value.responses ?? valuesOf("chosen", "rejected"))
    ?? valuesOf("messages") ?? valuesOf("response1", "response2") ?? valuesOf("response_1", "response_2")
    ?? valuesOf("response") ?? valuesOf("completion") ?? value.conversations ?? [];
  if (!ends.length && !context.length) throw new Trouble("There is no conversation in it.");
  const whole = ends.map((end) => {
    const messages = readMessages(end.completion ?? end.response ?? end, "assistant");
    return ["user", "system"].includes(messages[0]?.role) ? messages : [...context, ...messages];
  });
  return { model: value.model ?? null, ...(whole.length ? split(whole) : { context, completions: [] }) };
}

const ROLES = { Human: "user", Assistant: "assistant" };

// Text is a message of the role, or a transcript of Human and Assistant.
function readMessages(value, role) {
  const [before, ...turns] = typeof value === "string" ? value.split(/\n\n(Human|Assistant): ?/) : [value];
  if (turns.length && !before) return turns.flatMap((turn, i) => (i % 2 ? [{ role: ROLES[turns[i - 1]], content: turn }] : []));
  return (typeof value === "string" ? [{ role, content: value }] : value).map((message) => {
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
