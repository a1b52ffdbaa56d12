// Calls of this server's HTTP API. The key is kept in this module's memory alone and goes out as a header.

let key = "";
// What was refused with this key: it is not asked for again and again, since each refusal is noted by the server.
const refused = new Map();
const listeners = new Set();
const base = new URL("..", location.href);

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(given) {
  key = given.trim();
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

// A Response with a good status. Raises ApiError with the server's own words.
export async function open(path, { method = "GET", body, form, signal, accept } = {}) {
  const call = `${method} ${path}`;
  if (refused.has(call)) throw refused.get(call);
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
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
    const error = new ApiError(response.status, messageOf(await response.text(), response.status));
    if (error.status === 401 && method === "GET") refused.set(call, error);
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
  const blob = await (await open(path)).blob();
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
