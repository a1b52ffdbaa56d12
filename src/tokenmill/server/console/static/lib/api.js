// Calls of this server's HTTP API. The key is kept for this tab alone, in its session storage, and goes out as a header.

const KEPT = "tokenmill-api-key";
let key = sessionStorage.getItem(KEPT) ?? "";
// What was refused with this key: it is not asked for again and again, since each refusal is noted by the server.
const refused = new Map();
const listeners = new Set();
const base = new URL("..", location.href);

const NO_KEY = "This server asks for an API key. Give one with the button “API key”.";
const UNKNOWN_KEY = "The server does not know this API key: it is mistyped, revoked or has expired. Give another with the button “API key”.";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Takes a key that the server knows, or forgets the one there is. Raises ApiError, and changes nothing, where the server
// does not know it.
export async function setKey(given) {
  const wanted = given.trim();
  if (wanted) await open("/v1/models", { asKey: wanted });
  key = wanted;
  if (key) sessionStorage.setItem(KEPT, key);
  else sessionStorage.removeItem(KEPT);
  refused.clear();
  for (const listener of listeners) listener();
}

// To be asked again with the same key.
export function retry() {
  refused.clear();
}

export function hasKey() {
  return key !== "";
}

// Called when the key has changed. Returns what takes the listener back.
export function onKey(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function urlOf(path) {
  return new URL(path.replace(/^\//, ""), base).href;
}

// A Response with a good status. Raises ApiError with the server's own words. asKey: another key than the one that is set.
export async function open(path, { method = "GET", body, form, signal, accept, asKey = key } = {}) {
  const call = `${method} ${path}`;
  if (asKey === key && refused.has(call)) throw refused.get(call);
  const headers = {};
  if (asKey) headers.Authorization = `Bearer ${asKey}`;
  if (accept) headers.Accept = accept;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(urlOf(path), {
      method,
      headers,
      signal,
      body: form ?? (body === undefined ? undefined : typeof body === "string" ? body : JSON.stringify(body)),
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) {
    const text = await response.text();
    const error = new ApiError(response.status, response.status === 401 ? (asKey ? UNKNOWN_KEY : NO_KEY) : messageOf(text, response.status));
    if (error.status === 401 && method === "GET" && asKey === key) refused.set(call, error);
    throw error;
  }
  return response;
}

export async function get(path, signal) {
  return (await open(path, { signal })).json();
}

export async function send(method, path, body) {
  const text = await (await open(path, { method, body })).text();
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

// The data of each server-sent event, as text. `heard` gets all text as it comes.
export async function* events(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard(value);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

// Saves an answer as a file. A link alone would not carry the key.
export async function download(path, name) {
  saveAs(await (await open(path)).blob(), name);
}

export function saveAs(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function messageOf(text, status) {
  try {
    const error = JSON.parse(text).error;
    return (typeof error === "string" ? error : error.message) || `Status ${status}.`;
  } catch {
    return text.slice(0, 300) || `Status ${status}.`;
  }
}
