// What the server does now: the batch, the queue, KV blocks, tokens a second, and waits against their targets.

import { download, get } from "../lib/api.js";
import { chart, GAP_S, History } from "../lib/charts.js";
import { h, show } from "../lib/dom.js";
import { decimal, duration, percent, whole } from "../lib/format.js";
import { badge, button, card, empty, failure, head, isInUse, poll, table, tile, toast } from "../lib/ui.js";
import { objectivesView } from "../lib/objectives.js";
import { tiersView } from "../lib/tiers.js";
import { cacheView } from "../lib/tree.js";

const EVERY_MS = 1000;
const SHOWN_S = 300;
const SHORTEST_S = 30;
const IDLE_S = 3;
const SLOW_EVERY = 3;
const SECONDS = (value) => `${decimal(value)} s`;

function mount(root, { signal }) {
  const problem = h("div", { role: "alert" });
  const tiles = Object.fromEntries(Object.entries({
    running: "Running", waiting: "Waiting", kv: "KV held", output: "Output", prompt: "Prompt", ttft: "TTFT p50", tpot: "TPOT p50", slo: "Met targets",
  }).map(([name, label]) => [name, tile(label)]));
  const charts = {
    requests: chart("Requests", [{ label: "running" }, { label: "waiting" }], { format: decimal, signal, least: 4 }),
    kv: chart("KV blocks", [{ label: "held" }, { label: "held or cached" }], { format: (value) => percent(value), signal, least: 0.1 }),
    tokens: chart("Tokens a second", [{ label: "output" }, { label: "prompt, computed" }, { label: "prompt, cached", dash: true }], { format: decimal, signal, least: 10 }),
    steps: chart("Last step", [{ label: "duration" }], { format: duration, signal, least: 0.001 }),
    ttft: chart("Time to first token", [{ label: "p50" }, { label: "p90" }, { label: "tightest target", dash: true }], { format: duration, signal, least: 0.01 }),
    tpot: chart("Time per output token", [{ label: "p50" }, { label: "p90" }, { label: "tightest target", dash: true }], { format: duration, signal, least: 0.001 }),
  };
  const history = Object.fromEntries(Object.entries({ requests: 2, kv: 2, tokens: 3, ttft: 3, steps: 1, tpot: 3 }).map(([name, num]) => [name, new History(num, SHOWN_S)]));
  const classes = h("div");
  const tree = h("div");
  const objectives = h("div");
  let isPaused = false, numTurns = 0, lastMs = -Infinity, lastTime = 0;
  const pause = button("Pause", () => {
    isPaused = !isPaused;
    pause.textContent = isPaused ? "Go on" : "Pause";
  });
  show(root, head("Load", null, button("Download steps", flight, { title: "The engine's last steps, for ui.perfetto.dev" }), pause), problem,
    h("dl", { class: "tiles" }, Object.values(tiles).map((each) => each.element)),
    h("div", { class: "charts" }, Object.values(charts).map((each) => h("div", { class: "card" }, each.element))),
    classes, tree, objectives);

  function draw(load) {
    tiles.running.set(whole(load.running), h("small", null, `of at most ${whole(load.max_num_seqs)}`));
    tiles.waiting.set(whole(load.waiting), h("small", null, `wait ${duration(load.predicted_wait_s)}`));
    tiles.kv.set(percent(load.kv.usage), h("small", null, `of ${whole(load.kv.blocks)} blocks`));
    tiles.output.set(decimal(load.tokens_per_s.output), h("small", null, "tokens/s"));
    tiles.prompt.set(decimal(load.tokens_per_s.prompt_computed + load.tokens_per_s.prompt_cached), h("small", null, "tokens/s"));
    tiles.ttft.set(...pair(load.ttft_s));
    tiles.tpot.set(...pair(load.tpot_s));
    const judged = load.slo.attained + load.slo.missed;
    tiles.slo.set(judged ? percent(load.slo.attained / judged, 1) : "–", judged ? h("small", null, `of ${whole(judged)}`) : null);
    const blocks = Math.max(1, load.kv.blocks);
    put("requests", load, load.running, load.waiting);
    put("kv", load, load.kv.held / blocks, (load.kv.held + load.kv.cached) / blocks);
    put("tokens", load, load.tokens_per_s.output, load.tokens_per_s.prompt_computed, load.tokens_per_s.prompt_cached);
    put("steps", load, load.running ? load.last_step.duration_s : NaN);
    put("ttft", load, load.ttft_s.p50 ?? NaN, load.ttft_s.p90 ?? NaN, tightest(load, "ttft_target_s"));
    put("tpot", load, load.tpot_s.p50 ?? NaN, load.tpot_s.p90 ?? NaN, tightest(load, "tpot_target_s"));
    keep(classes, () => groups(load));
  }

  function put(name, load, ...values) {
    history[name].add(load.time, ...values);
    // All over one time, so that what happens at once is below each other.
    const from = Math.min(...Object.values(history).map(({ xs }) => xs[0] ?? load.time));
    charts[name].set(history[name].xs, history[name].ys, [Math.min(from, load.time - SHORTEST_S), load.time]);
  }

  poll(async () => {
    if (isPaused) return;
    try {
      // Also after a pause, or a while in which the page was not seen.
      const missed = Math.min(SHOWN_S, Math.floor((performance.now() - lastMs) / 1000));
      const load = await get(`/admin/load?history_s=${missed > GAP_S ? missed : 0}`, signal);
      if (signal.aborted) return;
      before(load, history, lastTime);
      [lastMs, lastTime] = [performance.now(), load.time];
      draw(load);
      if (numTurns++ % SLOW_EVERY === 0) {
        const [kv, slo] = await Promise.all([get("/admin/kv", signal), get("/admin/slo", signal)]);
        keep(tree, () => [tiersView(kv.tiers), cacheView(kv.data)]);
        keep(objectives, () => objectivesView(slo));
      }
      show(problem, !load.ready && h("p", { class: "notice warn" }, "No engine is ready. Requests wait until one is."));
    } catch (error) {
      if (error.name !== "AbortError") show(problem, failure(error));
    }
  }, EVERY_MS, signal);
}

function keep(place, draw) {
  if (!isInUse(place)) show(place, draw());
}

async function flight() {
  try {
    await download("/admin/flight", "tokenmill-steps.json");
  } catch (error) {
    toast(error.message);
  }
}

// What the server remembers of the time since the last look, or before the first. Targets it does not.
function before(load, history, lastTime) {
  const samples = load.history, blocks = Math.max(1, load.kv.blocks);
  samples.forEach((each, index) => {
    const x = load.time - each.age_s, last = samples[index - 1];
    if (x <= lastTime || each.age_s < 0.5) return;
    history.requests.add(x, each.running, each.waiting);
    history.kv.add(x, each.kv_held / blocks, (each.kv_held + each.kv_cached) / blocks);
    const seconds = last ? last.age_s - each.age_s : NaN;
    const perS = (name) => (seconds < IDLE_S ? (each[name] - last[name]) / seconds : NaN);
    history.tokens.add(x, perS("output_tokens"), perS("prompt_tokens_computed"), perS("prompt_tokens_cached"));
    history.steps.add(x, each.running ? each.last_step_s : NaN);
    history.ttft.add(x, each.ttft_p50_s ?? NaN, each.ttft_p90_s ?? NaN, NaN);
    history.tpot.add(x, each.tpot_p50_s ?? NaN, each.tpot_p90_s ?? NaN, NaN);
  });
}

function pair(spread) {
  return spread.count ? [duration(spread.p50), h("small", null, `p90 ${duration(spread.p90)}`)] : ["–"];
}

function tightest(load, name) {
  const targets = load.classes.map((each) => each[name]).filter((target) => target);
  return targets.length ? Math.min(...targets) : NaN;
}

function groups(load) {
  const columns = [
    ["Answered", (each) => whole(each.ttft_s.count), "right"],
    ["TTFT p50", (each) => duration(each.ttft_s.p50 ?? NaN), "right"],
    ["TTFT p90", (each) => duration(each.ttft_s.p90 ?? NaN), "right"],
    ["TPOT p50", (each) => duration(each.tpot_s.p50 ?? NaN), "right"],
    ["TPOT p90", (each) => duration(each.tpot_s.p90 ?? NaN), "right"],
    ["Targets", (each) => attainment(each.slo), "right"],
  ];
  const aims = (each) => [each.ttft_target_s && `TTFT ${duration(each.ttft_target_s)}`, each.tpot_target_s && `TPOT ${duration(each.tpot_target_s)}`].filter(Boolean).join(", ");
  const about = `Of the last ${SECONDS(load.window_s)}.`;
  return [
    card("Classes", load.classes.length
      ? [h("p", { class: "muted small" }, about), table("Classes", [["Class", (each) => `P${each.priority_class} ${each.profile}`], ["Target", (each) => aims(each) || "none", "nowrap"], ...columns], load.classes)]
      : empty("No requests in the last minute", "Classes and their waits show up here as requests are answered.")),
    load.tenants?.length > 0 && card("Tenants", h("p", { class: "muted small" }, about), table("Tenants", [
      ["Tenant", (each) => each.tenant || "without a tenant", "name"],
      ["Running", (each) => whole(each.in_engines), "right"],
      ["Waiting", (each) => whole(each.waiting), "right"],
      ["Prompt", (each) => whole(each.prompt_tokens), "right"],
      ["Output", (each) => whole(each.output_tokens), "right"],
      ...columns,
    ], load.tenants)),
  ];
}

function attainment({ attained, missed }) {
  if (!attained && !missed) return "–";
  return badge(`${whole(attained)} met, ${whole(missed)} missed`, missed ? "warn" : "ok");
}

export default { title: "Load", mount };
