// The story of one request as a bar: what it did when, on one scale, with what happened on the way; and as a table.

import { h, svg } from "./dom.js";
import { duration, orNone } from "./format.js";
import { table } from "./ui.js";

const NAMES = { queue: "Waiting", prefill: "Prefill", decode: "Decode", held: "Held back" };
const HEIGHT = 76, TOP = 8, BAR = 32;
const NUM_TICKS = 5;
const MOST_EVENTS = 400;

// spans: of /admin/requests/ID, in seconds since the arrival. A span or event that goes on ends at `now`.
export function timeline(spans, now) {
  const end = Math.max(now, ...spans.map((span) => span.end_s ?? now), 1e-6);
  const at = (seconds) => `${(100 * seconds) / end}%`;
  const events = spans.flatMap((span) => (span.events ?? []).map((event) => ({ ...event, span: span.name }))).slice(0, MOST_EVENTS);
  const kinds = [...new Set(spans.map((span) => span.name))];
  const drawing = svg("svg", { class: "timeline", width: "100%", height: HEIGHT, role: "img", "aria-label": `Timeline of ${duration(end)}: ${spans.map(told).join(", ")}` },
    svg("rect", { x: 0, y: TOP, width: "100%", height: BAR, class: "ground" }),
    spans.map((span) => svg("rect", { x: at(span.start_s), y: TOP, width: at(Math.max(0, (span.end_s ?? now) - span.start_s)), height: BAR, class: `span-${span.name}` }, svg("title", null, told(span)))),
    events.map((event) => mark(event, at, now)),
    Array.from({ length: NUM_TICKS }, (_, index) => tick(index / (NUM_TICKS - 1), end)));
  return h("div", { class: "stack" },
    h("div", { class: "legend" }, kinds.map((kind) => h("span", null, h("span", { class: `swatch span-${kind}`, "aria-hidden": "true" }), NAMES[kind] ?? kind)),
      events.length > 0 && h("span", null, h("span", { class: "swatch mark", "aria-hidden": "true" }), "Step or event")),
    drawing,
    table("Timeline", [
      ["What", (row) => (row.span ? h("span", { class: "event" }, words(row)) : NAMES[row.name] ?? row.name)],
      ["From", (row) => duration(row.start_s ?? row.at_s), "right"],
      ["Lasted", (row) => lasted(row), "right"],
      ["Engine", (row) => orNone(row.engine), "right"],
    ], spans.flatMap((span) => [span, ...events.filter((event) => span.events?.some((each) => each.name === event.name && each.at_s === event.at_s))])));

  function told(span) {
    return `${NAMES[span.name] ?? span.name} ${duration((span.end_s ?? now) - span.start_s)}`;
  }
  function lasted(row) {
    if (row.span) return row.duration_s === undefined ? "" : duration(row.duration_s);
    return row.end_s === null ? `${duration(now - row.start_s)} so far` : duration(row.end_s - row.start_s);
  }
}

function mark(event, at) {
  const title = svg("title", null, `${words(event)} at ${duration(event.at_s)}`);
  const kind = `mark mark-${event.name}`;
  if (event.duration_s > 0) return svg("rect", { x: at(event.at_s), y: TOP + BAR - 8, width: at(event.duration_s), height: 8, class: kind }, title);
  return svg("line", { x1: at(event.at_s), x2: at(event.at_s), y1: TOP - 4, y2: TOP + BAR + 4, class: kind }, title);
}

function tick(share, end) {
  const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
  const x = `${100 * share}%`;
  return [
    svg("line", { x1: x, x2: x, y1: TOP + BAR, y2: TOP + BAR + 6, class: "tick" }),
    svg("text", { x, y: TOP + BAR + 22, "text-anchor": anchor, class: "tick-label" }, duration(share * end)),
  ];
}

// An event with what it tells beside its time.
function words(event) {
  const more = Object.entries(event).filter(([name, value]) => !["name", "at_s", "span", "duration_s", "engine"].includes(name) && value !== null);
  return [event.name.replaceAll("_", " "), ...more.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`)].join(", ");
}
