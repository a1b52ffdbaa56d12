// Draws one result of a benchmark: loads with charts, anything else as its figures. docs/operate/benchmarking.md says what is in it.

import { chart } from "../lib/charts.js";
import { h } from "../lib/dom.js";
import { decimal, duration, orNone, percent, whole } from "../lib/format.js";
import { badge, card, empty, facts, table, tile } from "../lib/ui.js";
import { drawCompare } from "./compare.js";

const LATENCIES = [["ttft_s", "Time to first token"], ["tpot_s", "Time per output token"], ["itl_s", "Between tokens"], ["e2el_s", "Whole answer"]];
const POINTS = ["mean", "p50", "p90", "p99", "max"];
const MOST_ROWS = 200;

export function drawReport(report, signal) {
  const draw = { run: drawRun, repeats: drawRun, sweep: drawSweep, goodput: drawGoodput, compare: drawCompare }[report.kind] ?? drawOther;
  return [warnings(report), draw(report, signal), asWritten(report)];
}

function drawRun(run, signal) {
  return [
    tiles([
      ["Requests", `${whole(run.num_ok)} of ${whole(run.num_requests)}`],
      ["Requests/s", decimal(run.requests_per_s)],
      ["Output tokens/s", decimal(run.output_tokens_per_s)],
      ["TTFT p50", duration(run.ttft_s?.p50)],
      ["TTFT p99", duration(run.ttft_s?.p99)],
      ["TPOT p50", duration(run.tpot_s?.p50)],
      ["Met its objectives", percent(run.slo?.attainment, 1)],
    ]),
    timeline(run, signal),
    card("Latencies", table("Latencies", [
      ["Quantity", ([, label]) => label],
      ...POINTS.map((point) => [point, ([name]) => duration(run[name]?.[point]), "right"]),
    ], LATENCIES.filter(([name]) => run[name]?.num))),
    run.errors?.length > 0 && card("Errors", table("Errors", [["Kind", (each) => each.kind], ["Requests", (each) => whole(each.num), "right"], ["Example", (each) => each.example, "name"]], run.errors)),
  ];
}

function timeline(run, signal) {
  const buckets = run.timeline ?? [];
  if (buckets.length < 2) return null;
  const xs = buckets.map((bucket) => bucket.t_s);
  const made = (title, series, format, ys) => {
    const drawn = chart(title, series, { format, signal, isTime: false, xFormat: (x) => `${x} s` });
    drawn.set(xs, ys);
    return h("div", { class: "card" }, drawn.element);
  };
  const of = (name) => buckets.map((bucket) => bucket[name]);
  const perS = (name) => buckets.map((bucket) => bucket[name] / run.timeline_bucket_s);
  return h("div", { class: "charts" },
    made("Requests", [{ label: "due/s" }, { label: "answered/s" }, { label: "in flight" }], decimal, [perS("num_due"), perS("num_ok"), of("in_flight")]),
    made("Output tokens/s", [{ label: "tokens/s" }], decimal, [perS("output_tokens")]),
    made("Latency, median", [{ label: "first token" }, { label: "between tokens" }], duration, [of("ttft_p50_s"), of("itl_p50_s")]));
}

function drawSweep(sweep, signal) {
  return byPoint(sweep.points, sweep.runs, sweep.by === "concurrency" ? "concurrent requests" : "requests/s", signal);
}

function drawGoodput(result, signal) {
  const probes = [...result.probes].sort((a, b) => a.request_rate - b.request_rate);
  return [
    tiles([
      ["Goodput", `${decimal(result.request_rate)} requests/s`],
      ["Target", percent(result.target_attainment)],
      ["Output tokens/s", decimal(result.output_tokens_per_s)],
      ...Object.entries(result.slo).map(([name, limit]) => [`${name.replace("_s", "").toUpperCase()} at most`, duration(limit)]),
    ]),
    byPoint(probes.map((probe) => probe.request_rate), probes.map((probe) => probe.run), "requests/s", signal),
    card("Probes", table("Probes", [
      ["Requests/s", (each) => decimal(each.request_rate), "right"],
      ["Met its objectives", (each) => `${percent(each.attainment, 1)} (${percent(each.attainment_low, 1)} to ${percent(each.attainment_high, 1)})`, "right"],
      ["Stable", (each) => (each.stable ? "yes" : "no")],
      ["Passed", (each) => badge(each.passed ? "passed" : "failed", each.passed ? "ok" : "bad")],
    ], probes)),
  ];
}

function byPoint(points, runs, label, signal) {
  const order = points.map((_, index) => index).sort((a, b) => points[a] - points[b]);
  const xs = order.map((index) => points[index]);
  const of = (read) => order.map((index) => read(runs[index]) ?? null);
  const made = (title, series, format, ys) => {
    const drawn = chart(title, series, { format, signal, isTime: false, xLabel: label, xFormat: decimal });
    drawn.set(xs, ys);
    return h("div", { class: "card" }, drawn.element);
  };
  return [
    h("div", { class: "charts" },
      made("Output tokens/s", [{ label: "tokens/s" }], decimal, [of((run) => run.output_tokens_per_s)]),
      made("Time to first token", [{ label: "p50" }, { label: "p99" }], duration, [of((run) => run.ttft_s.p50), of((run) => run.ttft_s.p99)]),
      made("Time per output token", [{ label: "p50" }, { label: "p99" }], duration, [of((run) => run.tpot_s.p50), of((run) => run.tpot_s.p99)])),
    card("Runs", table("Runs", [
      [label, (index) => decimal(points[index]), "right"],
      ["Answered", (index) => `${whole(runs[index].num_ok)} of ${whole(runs[index].num_requests)}`, "right"],
      ["Output tokens/s", (index) => decimal(runs[index].output_tokens_per_s), "right"],
      ["TTFT p50", (index) => duration(runs[index].ttft_s.p50), "right"],
      ["TTFT p99", (index) => duration(runs[index].ttft_s.p99), "right"],
      ["TPOT p50", (index) => duration(runs[index].tpot_s.p50), "right"],
      ["Met its objectives", (index) => percent(runs[index].slo?.attainment, 1), "right"],
    ], order)),
  ];
}

// What has no drawing of its own: single values as facts, arrays of records as tables.
function drawOther(report) {
  const entries = Object.entries(report);
  const single = entries.filter(([, value]) => typeof value !== "object" || value === null);
  const records = entries.filter(([, value]) => Array.isArray(value) && value.length && value.every((each) => typeof each === "object" && each !== null && !Array.isArray(each)));
  return [
    card(null, single.length ? facts(single.map(([name, value]) => [words(name), shown(value)])) : empty("No single figures", "All it says is in its lists.")),
    records.map(([name, rows]) => {
      const columns = [...new Set(rows.slice(0, MOST_ROWS).flatMap((row) => Object.keys(row).filter((key) => typeof row[key] !== "object")))].slice(0, 12);
      return columns.length > 0 && card(words(name), table(name, columns.map((key) => [words(key), (row) => shown(row[key]), typeof rows[0][key] === "number" ? "right" : ""]), rows.slice(0, MOST_ROWS)));
    }),
  ];
}

function asWritten(report) {
  const place = h("pre", { tabindex: "0" });
  return h("details", { class: "card", ontoggle: () => { place.textContent ||= JSON.stringify({ ...report, requests: undefined }, null, 2).slice(0, 200_000); } }, h("summary", null, "As JSON"), place);
}

function tiles(pairs) {
  return h("dl", { class: "tiles" }, pairs.map(([label, value]) => {
    const made = tile(label);
    made.set(value);
    return made.element;
  }));
}

function warnings(report) {
  return Array.isArray(report.warnings) && report.warnings.map((text) => h("p", { class: "notice warn" }, text));
}

function words(name) {
  return name.replaceAll("_", " ");
}

function shown(value) {
  return typeof value === "number" ? decimal(value) : orNone(value).slice(0, 300);
}
