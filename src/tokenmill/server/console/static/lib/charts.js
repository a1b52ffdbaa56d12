// Charts over time or over a swept quantity: uPlot in the colours of the theme, with a legend that tells values.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { h, show } from "./dom.js";

// Between ticks of time, in seconds.
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000];
const MOST_MARKED = 40;
const COLOURS = ["--series-1", "--series-2", "--series-3"];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// series: [{label, dash, steps}]; format: of values. `set(xs, [ys, ...], [from, to])` draws, by default all there is.
// Ends with `signal`.
export function chart(title, series, { format, signal, isTime = true, xLabel = "", xFormat = String, least = 1e-9, height = 168 }) {
  const values = series.map(() => h("span", { class: "num" }, "–"));
  const legend = h("div", { class: "legend" }, series.map((each, index) => h("span", null,
    h("span", { class: `key k${index}${each.dash ? " dashed" : ""}`, "aria-hidden": "true" }), `${each.label} `, values[index])));
  const place = h("div", { class: "plot", role: "img", "aria-label": `Chart: ${title}` });
  const element = h("figure", { class: "chart" }, h("figcaption", null, h("h2", null, title), legend), place);
  const axis = { stroke: () => colour("--muted"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  let data = [[], ...series.map(() => [])];
  let reach = null;

  function tell(index) {
    const at = index ?? data[0].length - 1;
    series.forEach((_, number) => show(values[number], format(data[number + 1][at] ?? NaN)));
  }

  const plot = new uPlot({
    width: 320,
    height,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time: isTime, range: (_, low, high) => reach ?? [low, high] }, y: { range: (_, low, high) => [0, Math.max(least, (high ?? 0) * 1.1)] } },
    axes: [
      { ...axis, space: 80, size: 28, ...(isTime ? { incrs: STEPS } : {}), label: xLabel || undefined, labelSize: 18, labelFont: "11px system-ui, sans-serif", values: (_, splits) => ticks(splits, isTime ? null : xFormat) },
      { ...axis, size: 56, space: 32, values: (_, splits) => splits.map((value) => format(value)) },
    ],
    series: [{}, ...series.map((each, index) => ({
      label: each.label, width: 1.5, stroke: () => colour(COLOURS[index]), dash: each.dash ? [4, 4] : undefined, spanGaps: false,
      points: { show: (self) => !isTime && self.data[0].length <= MOST_MARKED, size: 6, filter: lonely },
      paths: each.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }))],
    hooks: { setCursor: [(self) => tell(self.cursor.idx)] },
  }, data, place);

  const observer = new ResizeObserver(([entry]) => plot.setSize({ width: Math.max(120, Math.floor(entry.contentRect.width)), height }));
  observer.observe(place);
  const recolour = () => plot.redraw(false);
  document.addEventListener("themechange", recolour);
  signal.addEventListener("abort", () => {
    observer.disconnect();
    document.removeEventListener("themechange", recolour);
    plot.destroy();
  });

  return {
    element,
    set(xs, ys, ends = null) {
      data = [xs, ...ys];
      reach = ends;
      plot.setData(data);
      tell(plot.cursor.idx);
    },
  };
}

// The values that have a gap on both sides, so that no line shows them.
function lonely(plot, number) {
  const ys = plot.data[number];
  const isGap = (index) => ys[index] === null || ys[index] === undefined;
  const found = [...ys.keys()].filter((index) => !isGap(index) && isGap(index - 1) && isGap(index + 1));
  return found.length ? found : null;
}

// Times of day, to the second where they are less than a minute apart, or dates; or what `format` says.
function ticks(splits, format) {
  if (format) return splits.map((value) => format(value));
  const step = splits.length > 1 ? splits[1] - splits[0] : 60;
  const how = step >= 86_400 ? { month: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined, hour12: false };
  return splits.map((value) => new Date(1000 * value).toLocaleString([], how));
}

// So long without a point is a gap.
export const GAP_S = 3;

// Points of the last `seconds`, for charts that are fed while they are looked at. null is a gap; so is a while without a point.
export class History {
  constructor(num, seconds) {
    this.seconds = seconds;
    this.xs = [];
    this.ys = Array.from({ length: num }, () => []);
  }

  add(x, ...values) {
    const last = this.xs.at(-1);
    if (x - last > GAP_S) this.append((last + x) / 2, []);
    this.append(x, values);
    while (this.xs[0] < x - this.seconds) {
      this.xs.shift();
      for (const column of this.ys) column.shift();
    }
  }

  append(x, values) {
    this.xs.push(x);
    this.ys.forEach((column, index) => column.push(Number.isFinite(values[index]) ? values[index] : null));
  }
}
