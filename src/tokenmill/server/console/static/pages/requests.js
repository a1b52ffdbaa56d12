// Requests that are open and the last that ended, and the timeline of one.

import { get } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { duration, moment, orNone, whole } from "../lib/format.js";
import { badge, card, empty, facts, failure, head, isInUse, loading, poll, select, table } from "../lib/ui.js";
import { timeline } from "../lib/timeline.js";

const STATES = [["all", "All"], ["open", "Open"], ["ended", "Ended"]];
const KINDS = { waiting: "warn", prefill: "live", decode: "live", held: "warn", ended: "" };
const REASONS = { stop: "ok", length: "ok", error: "bad", abort: "warn" };

function mount(root, { signal, argument }) {
  if (argument) mountOne(root, signal, argument);
  else mountList(root, signal);
}

function mountList(root, signal) {
  const body = h("div", null, loading());
  const state = select(STATES, "all", () => refresh());
  show(root, head("Requests", "Those that are open and the last that ended, the newest first.",
    h("label", { class: "row" }, "Show", state)), body);
  let last = "";

  async function refresh() {
    try {
      const { data, has_more } = await get(`/admin/requests?state=${state.value}&limit=100`, signal);
      const seen = JSON.stringify(data.map((each) => [each.id, each.state, each.output_tokens]));
      if (seen !== last && !isInUse(body)) {
        show(body, list(data), has_more && h("p", { class: "muted" }, "The newest 100 are shown."));
        last = seen;
      }
    } catch (error) {
      if (error.name !== "AbortError") show(body, failure(error));
      last = "";
    }
  }

  poll(refresh, 1000, signal);
}

function list(requests) {
  if (!requests.length) return card(null, empty("No requests", "What is asked of this server shows up here."));
  return card(null, table("Requests", [
    ["Request", (each) => h("a", { href: `#/requests/${encodeURIComponent(each.id)}`, class: "mono nowrap", title: each.id }, short(each.id))],
    ["State", state],
    ["Tenant or client", (each) => each.tenant || orNone(each.client), "name"],
    ["Class", (each) => `P${each.priority_class}${each.profile ? ` ${each.profile}` : ""}`],
    ["Prompt", (each) => whole(each.prompt_tokens), "right"],
    ["Cached", (each) => (each.cached_tokens === null ? "–" : whole(each.cached_tokens)), "right"],
    ["Output", (each) => whole(each.output_tokens), "right"],
    ["TTFT", (each) => duration(each.ttft_s ?? NaN), "right"],
    ["TPOT", (each) => duration(each.tpot_s ?? NaN), "right"],
    ["Total", (each) => duration(each.age_s), "right"],
  ], requests));
}

// The beginning and the end of an id, which tell it from others.
function short(id) {
  return id.length <= 24 ? id : `${id.slice(0, 16)}…${id.slice(-6)}`;
}

function state(request) {
  if (request.state !== "ended") return badge(request.state, KINDS[request.state]);
  return [badge(request.finish_reason, REASONS[request.finish_reason]), request.attained === false && badge("missed its target", "warn")];
}

function mountOne(root, signal, id) {
  const body = h("div", null, loading());
  show(root, head("Request", null, h("a", { class: "button", href: "#/requests" }, "All requests")), body);
  const done = new AbortController();
  signal.addEventListener("abort", () => done.abort());

  async function refresh() {
    try {
      const request = await get(`/admin/requests/${encodeURIComponent(id)}`, signal);
      if (signal.aborted) return;
      if (!isInUse(body) || request.state === "ended") show(body, one(request));
      if (request.state === "ended") done.abort();
    } catch (error) {
      if (error.name !== "AbortError") show(body, failure(error));
      done.abort();
    }
  }

  poll(refresh, 1000, done.signal);
}

function one(request) {
  return [
    card(null, h("div", { class: "card-head" }, h("h2", { class: "mono" }, request.id), state(request)),
      request.error && h("p", { class: "notice bad" }, request.error),
      timeline(request.timeline, request.age_s)),
    card("Figures", facts([
      ["Arrived", moment(request.arrived)],
      ["Waited", duration(request.queue_s ?? NaN)],
      ["Time to first token", against(request.ttft_s, request.ttft_target_s)],
      ["Time per output token", against(request.tpot_s, request.tpot_target_s)],
      ["Total", duration(request.age_s)],
      ["Prompt", `${whole(request.prompt_tokens)} tokens${request.cached_tokens > 0 ? `, ${whole(request.cached_tokens)} of them cached` : ""}`],
      ["Output", `${whole(request.output_tokens)} of at most ${whole(request.max_tokens)} tokens`],
      ["Tenant", orNone(request.tenant)],
      ["Client", orNone(request.client)],
      ["Class", `P${request.priority_class}${request.profile ? `, ${request.profile}` : ""}`],
      ["Adapter", orNone(request.adapter)],
      ["Engine", orNone(request.engine)],
      ["Preemptions", orNone(request.num_preemptions)],
      ["Resumptions", orNone(request.num_resumptions)],
      ["Moves", orNone(request.num_moves)],
    ])),
    request.choices?.length > 1 && card("Choices of the same call", h("ul", { class: "links" },
      request.choices.map((id) => h("li", null, id === request.id ? h("span", { class: "mono" }, id) : h("a", { class: "mono", href: `#/requests/${encodeURIComponent(id)}` }, id))))),
  ];
}

function against(seconds, target) {
  const shown = duration(seconds ?? NaN);
  if (!target) return shown;
  return [`${shown}, target ${duration(target)} `, Number.isFinite(seconds) && seconds !== null && badge(seconds <= target ? "met" : "missed", seconds <= target ? "ok" : "warn")];
}

export default { title: "Requests", mount };
