// What tenants have used: sums over a while, and how they came about.

import { ApiError, get } from "./api.js";
import { chart } from "./charts.js";
import { h, show } from "./dom.js";
import { decimal, whole } from "./format.js";
import { card, empty, failure, loading, select, table } from "./ui.js";

const SPANS = { day: ["1h", 24, "Last 24 hours"], week: ["1d", 7, "Last 7 days"], month: ["1d", 30, "Last 30 days"] };
const COUNTS = ["num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens"];

export function usageCard(signal) {
  const body = h("div", null, loading());
  const span = select(Object.entries(SPANS).map(([name, [, , label]]) => [name, label]), "day", refresh);
  span.setAttribute("aria-label", "Time");
  let drawing = new AbortController();
  signal.addEventListener("abort", () => drawing.abort());

  async function refresh() {
    const [width, limit] = SPANS[span.value];
    try {
      const { data } = await get(`/admin/usage?bucket_width=${width}&limit=${limit}&group_by=tenant_id&group_by=model`, signal);
      drawing.abort();
      drawing = new AbortController();
      show(body, draw(data, drawing.signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      show(body, error instanceof ApiError && error.status === 404 ? empty("Usage is not counted", "The server was started with --usage-dir off.") : failure(error));
    }
  }

  refresh();
  return card(null, h("div", { class: "card-head" }, h("h2", null, "Usage"), h("span", { class: "grow" }), span), body);
}

function draw(buckets, signal) {
  const sums = new Map();
  for (const result of buckets.flatMap((bucket) => bucket.results)) {
    const name = JSON.stringify([result.tenant_id, result.model]);
    const sum = sums.get(name) ?? { tenant: result.tenant_id, model: result.model, ...Object.fromEntries(COUNTS.map((count) => [count, 0])) };
    for (const count of COUNTS) sum[count] += result[count] ?? 0;
    sums.set(name, sum);
  }
  if (!sums.size) return empty("Nothing used in this time", "What is handed to clients is counted by tenant, key and model.");
  const made = chart("Tokens", [{ label: "output", steps: true }, { label: "input", steps: true }], { format: decimal, signal, least: 10 });
  const of = (name) => buckets.map((bucket) => bucket.results.reduce((sum, result) => sum + (result[name] ?? 0), 0));
  // The last bucket's step ends where the bucket does.
  made.set([...buckets.map((bucket) => bucket.start_time), buckets.at(-1).end_time], [of("output_tokens"), of("input_tokens")].map((sums) => [...sums, sums.at(-1)]));
  const rows = [...sums.values()].sort((a, b) => b.input_tokens + b.output_tokens - a.input_tokens - a.output_tokens);
  return h("div", { class: "stack" }, made.element, table("Usage", [
    ["Tenant", (each) => each.tenant || "without a tenant", "name"],
    ["Model", (each) => each.model, "name"],
    ["Calls", (each) => whole(each.num_model_requests), "right"],
    ["Input tokens", (each) => whole(each.input_tokens), "right"],
    ["of them cached", (each) => whole(each.input_cached_tokens), "right"],
    ["Output tokens", (each) => whole(each.output_tokens), "right"],
  ], rows));
}
