// What an engine's prefix cache holds: an icicle whose widths are blocks, and the same as a table.

import { h, svg } from "./dom.js";
import { whole } from "./format.js";
import { card, empty, table } from "./ui.js";

const ROW = 22, MOST_ROWS = 8, LEAST_SHARE = 0.004;

export function cacheView(engines) {
  return engines.map((engine) => card(engines.length > 1 ? `Prefix cache of engine ${engine.engine}` : "Prefix cache", content(engine)));
}

function content(engine) {
  if (!engine.runs.length) return empty("Nothing is cached", "Blocks of prompts and answers are kept and shared by their common beginnings. They show up here.");
  const cached = engine.num_published;
  return h("div", { class: "stack" },
    h("p", { class: "muted small" }, `${whole(cached)} blocks of ${whole(engine.block_size)} tokens can be shared; ${whole(engine.free)} of ${whole(engine.blocks)} blocks are free. `,
      engine.num_seen < cached && `The oldest ${whole(engine.num_seen)} are drawn. `,
      "A row is a shared beginning, what goes on from it is below it. Dark: in use now."),
    icicle(engine.runs),
    h("details", null, h("summary", null, "As a table"), table("Prefix cache", [
      ["Prefix", (run) => h("span", { class: `depth-${Math.min(6, run.level)}` }, `${run.num_children ? "shared beginning" : "end"} ${run.id}`)],
      ["First token", (run) => whole(run.start * engine.block_size), "right"],
      ["Blocks", (run) => whole(run.num_blocks), "right"],
      ["With all below", (run) => whole(run.total_blocks), "right"],
      ["In use", (run) => whole(run.num_held), "right"],
      ["Sequences served", (run) => whole(run.num_uses), "right"],
    ], levels(engine.runs))));
}

// Runs come with parents before children. Each gets its level and, as a share of the whole, its place.
function levels(runs) {
  const known = new Map();
  const total = runs.filter((run) => run.parent === null).reduce((sum, run) => sum + run.total_blocks, 0) || 1;
  let next = 0;
  for (const run of runs) {
    const parent = run.parent === null ? null : known.get(run.parent);
    const width = run.total_blocks / total;
    const left = parent ? parent.next : next;
    if (parent) parent.next += width;
    else next += width;
    known.set(run.id, { ...run, level: parent ? parent.level + 1 : 0, left, width, next: left });
  }
  return [...known.values()];
}

function icicle(runs) {
  const placed = levels(runs).filter((run) => run.level < MOST_ROWS && run.width >= LEAST_SHARE);
  const height = ROW * (1 + Math.max(...placed.map((run) => run.level), 0));
  return svg("svg", { class: "icicle", width: "100%", height, role: "img", "aria-label": `Prefix tree: ${whole(runs.length)} prefixes` },
    placed.map((run) => {
      const x = `${100 * run.left}%`, width = `${100 * run.width}%`, y = run.level * ROW;
      const share = run.num_blocks ? run.num_held / run.num_blocks : 0;
      return svg("g", null,
        svg("title", null, `${whole(run.num_blocks)} blocks, ${whole(run.num_held)} in use, served ${whole(run.num_uses)} sequences; ${whole(run.total_blocks)} with all below`),
        svg("rect", { x, y, width, height: ROW - 2, class: "cached" }),
        share > 0 && svg("rect", { x, y, width: `${100 * run.width * share}%`, height: ROW - 2, class: "held" }),
        svg("rect", { x, y, width, height: ROW - 2, class: "edge" }),
        run.width > 0.06 && svg("text", { x: `${100 * run.left + 0.6}%`, y: y + 14 }, whole(run.num_blocks)));
    }));
}
