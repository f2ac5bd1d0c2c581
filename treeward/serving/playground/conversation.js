// A conversation and its answers: as a request's body, as a link, and from what people paste.
//
// {model, context: [message], answers: [message]}; a message is {role, content} and whatever else it came with.
export const ROLES = ["system", "user", "assistant", "tool", "developer"];
const MOST_CHARACTERS = 8_000_000;
const SPEAKER = /^\s*(system|developer|user|human|assistant|ai|bot|tool)\s*:[ \t]?/i;
const ROLE_OF = { human: "user", ai: "assistant", bot: "assistant", gpt: "assistant" };

export class Unreadable extends Error {}

export const isEmpty = ({ content, ...more }) => !content?.length && Object.keys(more).every((key) => key === "role");
export const answerOf = (content) => ({ role: "assistant", content });
export const empty = () => ({ model: null, context: [{ role: "user", content: "" }], answers: [answerOf(""), answerOf("")] });

// The body of POST /v1/rewards; an answer that is only text is written as text.
export function asBody({ model, context, answers }) {
  const isPlain = (message) => Object.keys(message).every((key) => key === "role" || key === "content");
  return { ...(model && { model }), context, completions: answers.map((answer) => (isPlain(answer) ? answer.content : [answer])) };
}

// Of JSON that holds a conversation in any form that is common; raises Unreadable with the reason.
export function fromJson(value) {
  const messages = Array.isArray(value) ? value : value?.messages;
  if (Array.isArray(messages)) {
    const all = readMessages(messages, "messages");
    const isAnswered = all.at(-1)?.role === "assistant";
    return { model: null, context: isAnswered ? all.slice(0, -1) : all, answers: isAnswered ? [all.at(-1)] : [] };
  }
  if (value === null || typeof value !== "object") throw new Unreadable("This is neither a list of messages nor an object that holds one.");
  const model = typeof value.model === "string" ? value.model : null;
  if (Array.isArray(value.conversations)) {
    const whole = value.conversations.map((one, index) => readMessages(one, `conversations[${index}]`));
    if (!whole.length) throw new Unreadable("There is no conversation in conversations.");
    return { model, ...split(whole) };
  }
  const context = readPrompt(value.context ?? value.prompt ?? []);
  const ends = value.completions ?? value.responses ?? (value.chosen === undefined ? [] : [value.chosen, ...several(value.rejected)]);
  if (!Array.isArray(ends)) throw new Unreadable("completions must be a list of texts or messages.");
  if (!ends.length && !context.length) throw new Unreadable("There are no messages: it needs messages, or context with completions, or prompt with chosen and rejected.");
  const whole = ends.map((end, index) => [...context, ...readEnd(end, `completions[${index}]`, context)]);
  return { model, ...(whole.length ? split(whole) : { context, answers: [] }) };
}

// JSON, or a transcript whose turns begin with "User:" and the like.
export function fromText(text) {
  if (!text.trim()) throw new Unreadable("There is no text.");
  if (/^\s*[[{]/.test(text)) {
    let value;
    try {
      value = JSON.parse(text);
    } catch (error) {
      throw new Unreadable(`This begins like JSON and is none: ${error.message}.`);
    }
    return fromJson(value);
  }
  const messages = [];
  for (const line of text.split(/\r?\n/)) {
    const speaker = SPEAKER.exec(line);
    if (speaker) {
      const name = speaker[1].toLowerCase();
      messages.push({ role: ROLE_OF[name] || name, content: line.slice(speaker[0].length) });
    } else if (messages.length) messages.at(-1).content += `\n${line}`;
    else if (line.trim()) throw new Unreadable("The first line says nobody's role: begin the turns with User: and Assistant:, or paste JSON.");
  }
  return fromJson(messages.map((message) => ({ ...message, content: message.content.trim() })));
}

function readPrompt(prompt) {
  if (typeof prompt === "string") return [{ role: "user", content: prompt }];
  return readMessages(prompt, "context");
}

// One rejected answer, as a text or as messages, or a list of them.
function several(rejected) {
  if (rejected === undefined) return [];
  return Array.isArray(rejected) && rejected.every((one) => typeof one === "string" || Array.isArray(one)) ? rejected : [rejected];
}

function readEnd(end, where, context) {
  if (end !== null && typeof end === "object" && !Array.isArray(end) && "completion" in end) return readEnd(end.completion, where, context);
  if (typeof end === "string") return [answerOf(end)];
  const messages = readMessages(Array.isArray(end) ? end : [end], where);
  const repeats = messages.length > context.length && context.every((message, index) => same(message, messages[index]));
  return context.length && repeats ? messages.slice(context.length) : messages;
}

function readMessages(value, where) {
  if (!Array.isArray(value)) throw new Unreadable(`${where} must be a list of messages, as {"role": "user", "content": "..."}.`);
  return value.map((message, index) => {
    const place = `${where}[${index}]`;
    if (message === null || typeof message !== "object" || Array.isArray(message)) throw new Unreadable(`${place} is no message.`);
    if (message.role === undefined && typeof message.from === "string") {
      return { role: ROLE_OF[message.from] || message.from, content: readContent(message.value, place) };
    }
    if (typeof message.role !== "string" || !message.role) throw new Unreadable(`${place} has no role.`);
    return { ...message, content: readContent(message.content, place) };
  });
}

function readContent(content, place) {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  const texts = Array.isArray(content) ? content.map((part) => (typeof part === "string" ? part : part?.text)) : [null];
  if (texts.every((text) => typeof text === "string")) return texts.join("");
  throw new Unreadable(`${place} has content that is no text; this page shows text only.`);
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// Conversations that differ in their last message, which is the answer.
function split(whole) {
  const context = whole[0].slice(0, -1);
  for (const [index, messages] of whole.entries()) {
    if (messages.at(-1)?.role !== "assistant") throw new Unreadable(`Answer ${index + 1} does not end with a message of the assistant.`);
    if (!same(messages.slice(0, -1), context)) throw new Unreadable("The answers differ in more than their last message; this page compares last messages.");
  }
  return { context, answers: whole.map((messages) => messages.at(-1)) };
}

// The fragment of a link: z + base64url of deflated JSON, or j + base64url of plain JSON where nothing deflates.
export async function toFragment(state) {
  const bytes = new TextEncoder().encode(JSON.stringify(asBody(state)));
  if (typeof CompressionStream === "undefined") return `#j${encode64(bytes)}`;
  return `#z${encode64(await through(bytes, new CompressionStream("deflate-raw")))}`;
}

export async function fromFragment(fragment) {
  const kind = fragment[1];
  if (kind !== "z" && kind !== "j") return null;
  try {
    let bytes = decode64(fragment.slice(2));
    if (kind === "z") bytes = await through(bytes, new DecompressionStream("deflate-raw"));
    return fromJson(JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes)));
  } catch (error) {
    throw new Unreadable(`The link is damaged or was cut${error instanceof Unreadable ? `: ${error.message}` : "."}`);
  }
}

async function through(bytes, stream) {
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  const chunks = [];
  let size = 0;
  for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
    size += chunk.value.length;
    if (size > MOST_CHARACTERS) throw new Unreadable("it holds too much text."); // a few bytes may become gigabytes
    chunks.push(chunk.value);
  }
  return new Uint8Array(await new Blob(chunks).arrayBuffer());
}

function encode64(bytes) {
  let binary = "";
  for (let start = 0; start < bytes.length; start += 0x8000) binary += String.fromCharCode(...bytes.subarray(start, start + 0x8000));
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

function decode64(text) {
  return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (character) => character.charCodeAt(0));
}
