// Servers under equal loads: each figure beside the baseline's, the ratio with its interval, and whether that decides.

import { h } from "../lib/dom.js";
import { decimal, duration, percent } from "../lib/format.js";
import { badge, card, table } from "../lib/ui.js";

const VERDICTS = { better: "ok", worse: "bad" };

export function drawCompare(report) {
  const pairs = new Map();
  for (const ratio of report.ratios) {
    const name = JSON.stringify([ratio.candidate, ratio.baseline, ratio.phase]);
    pairs.set(name, [...(pairs.get(name) ?? []), ratio]);
  }
  return [...pairs.values()].map((ratios) => {
    const [{ candidate, baseline, phase, confidence }] = ratios;
    const decider = ratios.find((ratio) => ratio.is_primary);
    return card(null,
      h("div", { class: "card-head" }, h("h2", null, `${candidate} against ${baseline}, ${phase}`), decider && badge(decider.verdict, VERDICTS[decider.verdict])),
      h("p", { class: "muted small" }, `Ratios are of ${candidate} to ${baseline}, with intervals of ${percent(confidence)}. The first line decides.`),
      table(`${candidate} against ${baseline}, ${phase}`, [
        ["Quantity", (ratio) => [words(ratio.metric), h("div", { class: "small muted" }, ratio.higher_is_better ? "more is better" : "less is better")], "name"],
        [baseline, (ratio) => shown(ratio.metric, ratio.baseline_value), "right"],
        [candidate, (ratio) => shown(ratio.metric, ratio.candidate_value), "right"],
        ["Ratio", (ratio) => ratio.ratio.toFixed(3), "right"],
        ["Interval", (ratio) => `${bound(ratio.low)} to ${bound(ratio.high)}`, "right"],
        ["Verdict", (ratio) => badge(ratio.verdict, VERDICTS[ratio.verdict])],
      ], ratios));
  });
}

function words(metric) {
  const [name, point] = metric.split(".");
  const plain = name.replace(/_per_s$/, "/s").replace(/_s$/, "").replaceAll("_", " ").replace(/^(ttft|tpot|itl|e2el)/, (short) => short.toUpperCase());
  return point ? `${plain} ${point}` : plain;
}

function shown(metric, value) {
  return /_s(\.|$)/.test(metric) && !metric.includes("_per_s") ? duration(value) : decimal(value);
}

// Of few repeats an interval may span all there is.
function bound(ratio) {
  return ratio >= 100 ? "100 and above" : ratio < 0.01 ? "0" : ratio.toFixed(3);
}
