// The story of one request as a bar: what it did when, on one scale, with its chunks and preemptions; and as a table.

import { h, svg } from "./dom.js";
import { duration, orNone, whole } from "./format.js";
import { table } from "./ui.js";

const NAMES = { queue: "Waiting", prefill: "Prefill", decode: "Decode", held: "Held back", move: "Moving", chunk: "Chunk", preempted: "Preempted" };
const HEIGHT = 76, TOP = 8, BAR = 32, CHUNK = 10;
const NUM_TICKS = 5;
const MOST_EVENTS = 400;

// spans: of /admin/requests/ID, in seconds since the arrival. What has no end yet goes on until `now`.
export function timeline(spans, now) {
  const end = Math.max(now, ...spans.map((span) => span.end_s ?? now), 1e-6);
  const at = (seconds) => `${(100 * seconds) / end}%`;
  const events = spans.flatMap((span) => span.events).sort((a, b) => a.at_s - b.at_s);
  const shown = new Set(events.slice(0, MOST_EVENTS));
  // A step may be planned before the one ahead of it has ended: a chunk is drawn until the next begins.
  const chunks = [...shown].filter((event) => event.name === "chunk");
  const pauses = events.filter((event) => event.name === "preempted").map((event) => pause(event, events, now));
  const kinds = [...new Set([...spans.map((span) => span.name), ...[...shown].map((event) => event.name)])];
  const box = (from, to, y, height, kind, title) => svg("rect", { x: at(from), y, width: at(Math.max(0, to - from)), height, class: kind }, svg("title", null, title));
  const drawing = svg("svg", { class: "timeline", width: "100%", height: HEIGHT, role: "img", "aria-label": `Timeline of ${duration(end)}: ${spans.map((span) => told(span, now)).join(", ")}` },
    svg("rect", { x: 0, y: TOP, width: "100%", height: BAR, class: "ground" }),
    spans.map((span) => box(span.start_s, span.end_s ?? now, TOP, BAR, `span-${span.name}`, told(span, now))),
    pauses.map((each) => box(each.from, each.to, TOP, BAR, "mark-preempted", `Preempted for ${duration(each.to - each.from)}`)),
    chunks.map((event, index) => box(event.at_s, Math.min(event.end_s ?? now, chunks[index + 1]?.at_s ?? Infinity), TOP + BAR - CHUNK, CHUNK, "mark-chunk", words(event))),
    Array.from({ length: NUM_TICKS }, (_, index) => tick(index / (NUM_TICKS - 1), end, index % 2 ? "tick-label minor" : "tick-label")));
  return h("div", { class: "stack" },
    h("div", { class: "legend" }, kinds.map((kind) => h("span", null, h("span", { class: `swatch ${kind in { chunk: 1, preempted: 1 } ? "mark" : "span"}-${kind}`, "aria-hidden": "true" }), NAMES[kind] ?? kind))),
    drawing,
    table("Timeline", [
      ["What", (row) => (row.events ? NAMES[row.name] ?? row.name : h("span", { class: "event" }, words(row)))],
      ["From", (row) => duration(row.start_s ?? row.at_s), "right"],
      ["Lasted", (row) => lasted(row, now), "right"],
      ["Engine", (row) => (row.events ? orNone(row.engine) : ""), "right"],
    ], spans.flatMap((span) => [span, ...span.events.filter((event) => shown.has(event)).map((event) => ({ ...event, start_s: event.at_s }))])),
    events.length > MOST_EVENTS && h("p", { class: "muted small" }, `The first ${whole(MOST_EVENTS)} of ${whole(events.length)} events are shown.`));
}

function told(span, now) {
  return `${NAMES[span.name] ?? span.name} ${duration((span.end_s ?? now) - span.start_s)}`;
}

function lasted(row, now) {
  if (row.end_s === undefined) return "";
  return row.end_s === null ? `${duration(now - row.start_s)} so far` : duration(row.end_s - row.start_s);
}

// From a preemption until its tokens are computed again.
function pause(event, events, now) {
  const next = events.find((other) => other.name === "chunk" && other.at_s > event.at_s);
  return { from: event.at_s, to: next ? next.at_s : now };
}

function tick(share, end, kind) {
  const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
  const x = `${100 * share}%`;
  return [
    svg("line", { x1: x, x2: x, y1: TOP + BAR, y2: TOP + BAR + 6, class: "tick" }),
    svg("text", { x, y: TOP + BAR + 22, "text-anchor": anchor, class: kind }, duration(share * end)),
  ];
}

function words(event) {
  if (event.name === "chunk") return `${whole(event.tokens)} tokens from ${whole(event.start)}, step ${whole(event.step)}`;
  if (event.name === "preempted") return `Preempted, ${whole(event.lost_tokens)} tokens to compute again, step ${whole(event.step)}`;
  if (event.name === "moved") return `Moved here from engine ${whole(event.from)}: ${event.why}, KV of ${whole(event.copied_tokens)} tokens copied`;
  if (event.name === "routed") return `Given to engine ${whole(event.to)}: ${event.why}`;
  return event.name;
}
