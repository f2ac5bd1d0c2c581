// Requests to the server that gave the page, and what is wrong with them in words.
import { kept } from "./elements.js";


export class ServerError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// Kept in the tab, and here where the tab keeps nothing.
let bearer = kept.get("treeward-token");
export const token = {
  get: () => bearer,
  set(value) {
    bearer = value;
    if (value) kept.set("treeward-token", value);
    else kept.forget("treeward-token");
  },
};

export const models = (signal) => ask("v1/models", { signal });
export const rewards = (body, signal) => ask("v1/rewards", { body: { ...body, on_error: "mask" }, signal });
export const trace = (body, signal) => ask("v1/rewards/trace", { body, signal });

// Paths are relative, so that the page works below a prefix of a proxy.
async function ask(path, { body, signal }) {
  const headers = body === undefined ? {} : { "content-type": "application/json" };
  // What a header cannot hold is no token of any server.
  if (token.get()) headers.authorization = `Bearer ${token.get().replace(/[^\x21-\x7e]/g, "?")}`;
  let response, text;
  try {
    response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body: JSON.stringify(body), signal, cache: "no-store" });
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. It may have been stopped, or the network is away.");
  }
  let answer = null;
  try {
    answer = JSON.parse(text);
  } catch {
    answer = null;
  }
  if (response.ok && answer !== null) return answer;
  throw new ServerError(words(response, answer?.error), response.status, answer?.error?.code ?? null);
}

function words(response, error) {
  const said = typeof error?.message === "string" ? error.message.replace(/\.$/, "") : `HTTP ${response.status}, without a reason that can be read`;
  const seconds = response.headers.get("retry-after");
  const later = seconds ? ` Try again in ${seconds} s.` : "";
  const id = response.status >= 500 && error?.request_id ? ` (request ${error.request_id})` : "";
  const opening = {
    401: "The server asks for another token",
    404: "The server does not have that",
    408: "The text took too long to send",
    413: "That is more than the server takes",
    422: "That cannot be scored",
    429: "The server has too much to do",
    500: "The server failed",
    503: "The server takes nothing at the moment",
    504: "The server did not answer in time",
  }[response.status] || "The server refused";
  return `${opening}: ${said}.${later}${id}`;
}
