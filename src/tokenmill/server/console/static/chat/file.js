// A conversation as a file: the body of the call to /v1/chat/completions that would continue it, of two models an array of two. So
// a file also does for curl, and the body of a call for a file.

import { pretty } from "./settings.js";

const ROLES = ["system", "user", "assistant", "tool"];

export function fileOf(bodies) {
  const kept = bodies.map(({ stream, stream_options, ...body }) => body);
  return `${pretty(kept.length === 1 ? kept[0] : kept)}\n`;
}

// The bodies in a file, one or two. Raises Error.
export function bodiesOf(text) {
  const bodies = [JSON.parse(text)].flat();
  if (bodies.length < 1 || bodies.length > 2) throw new Error("It has to have one conversation, or two.");
  for (const body of bodies) {
    if (!Array.isArray(body?.messages)) throw new Error("It has no list of messages.");
    body.messages.forEach((message, index) => {
      if (!ROLES.includes(message?.role)) throw new Error(`Message ${index + 1} is of none of the roles ${ROLES.join(", ")}.`);
      if (!isContent(message.content ?? "") || !isCalls(message.tool_calls ?? [])) throw new Error(`Message ${index + 1} is none of a chat.`);
    });
  }
  return bodies;
}

// All but the system message at the beginning, which is a setting.
export function saidIn({ messages }) {
  return messages[0]?.role === "system" ? messages.slice(1) : messages;
}

function isContent(content) {
  return typeof content === "string" || (Array.isArray(content) && content.every((part) => typeof part?.type === "string"));
}

function isCalls(calls) {
  return Array.isArray(calls) && calls.every((call) => typeof call?.function?.name === "string" && typeof call.function.arguments === "string");
}
