// Who works for this server, and what was decided about workers and moves of late; workers are drained here.

import { get, send } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { duration, orNone, percent, whole } from "../lib/format.js";
import { badge, button, card, confirmation, empty, failure, head, isInUse, loading, poll, table, toast } from "../lib/ui.js";

const STATES = { starting: "warn", ready: "ok", draining: "warn", lost: "bad" };

function mount(root, { signal }) {
  const body = h("div", null, loading());
  show(root, head("Workers", "Engines that serve, here and on other machines, and what was decided about them of late."), body);

  async function refresh() {
    try {
      const [{ workers }, { data }] = await Promise.all([get("/admin/workers", signal), get("/admin/decisions?limit=50", signal)]);
      if (!isInUse(body)) show(body, draw(workers, data, refresh));
    } catch (error) {
      if (error.name !== "AbortError") show(body, failure(error));
    }
  }

  poll(refresh, 1000, signal);
}

function draw(workers, decisions, refresh) {
  return [
    card(null, workers.length ? table("Workers", [
      ["Worker", (each) => each.id, "name"],
      ["State", (each) => badge(each.state, STATES[each.state])],
      ["Pool", (each) => each.pool],
      ["From", (each) => each.address ?? "here", "mono"],
      ["Open", (each) => whole(each.num_open), "right"],
      ["Running", (each) => whole(each.num_running), "right"],
      ["Waiting", (each) => whole(each.num_waiting), "right"],
      ["KV", (each) => percent(each.kv_usage), "right"],
      ["Steps", (each) => whole(each.num_steps), "right"],
      ["", (each) => each.state === "ready" && button("Drain", () => drain(each, refresh), { kind: "small", "aria-label": `Drain ${each.id}` }), "right"],
    ], workers) : empty("No worker", "None has come yet.")),
    card("Decisions", decisions.length ? table("Decisions", [
      ["Ago", (each) => duration(Math.max(0, Date.now() / 1000 - each.time)), "right"],
      ["What", (each) => badge(each.kind.replaceAll("_", " "), STATES[each.kind] ?? "")],
      ["Worker", (each) => (each.to ? `${each.worker} → ${each.to}` : orNone(each.worker))],
      ["Why", (each) => each.error ?? each.why ?? orNone(each.pool)],
      ["Request", (each) => (each.request ? h("a", { class: "mono", href: `#/requests/${encodeURIComponent(each.request)}` }, each.request) : each.num_requests ? `${whole(each.num_requests)} requests` : "")],
      ["Pause", (each) => (each.pause_s ? duration(each.pause_s) : ""), "right"],
    ], decisions) : empty("Nothing was decided", "Workers that come and go, and requests that move between them, show up here.")),
  ];
}

async function drain(worker, refresh) {
  const restart = worker.is_local;
  const text = `It gets no more requests, finishes or moves those it has, and ends${restart ? "; then it is started again" : ""}.`;
  const done = await confirmation(`Drain ${worker.id}`, text, "Drain",
    () => send("POST", `/admin/workers/${encodeURIComponent(worker.id)}/drain?restart=${restart}`));
  if (done) {
    toast(`${worker.id} is being drained.`);
    refresh();
  }
}

export default { title: "Workers", mount };
