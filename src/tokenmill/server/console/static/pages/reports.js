// Results of `tokenmill bench ... --json` from the server's --reports-dir.

import { get } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { bytes, moment } from "../lib/format.js";
import { badge, card, empty, failure, head, loading, table } from "../lib/ui.js";
import { drawReport } from "../reports/draw.js";

async function mount(root, { signal, argument }) {
  const body = h("div", null, loading());
  show(root, argument
    ? head(argument, null, h("a", { class: "button", href: "#/reports" }, "All reports"))
    : head("Benchmark reports", null), body);
  try {
    if (argument) show(body, drawReport(await get(`/admin/reports/${encodeURIComponent(argument)}`, signal), signal));
    else show(body, list((await get("/admin/reports", signal)).data));
  } catch (error) {
    if (error.name !== "AbortError") show(body, failure(error));
  }
}

function list(reports) {
  if (!reports.length) return card(null, empty("No reports", "Reports are read from a folder that the server is started with. Benchmarks write them with --json.", "tokenmill serve MODEL --reports-dir FOLDER"));
  return card(null, table("Reports", [
    ["Report", (each) => h("a", { href: `#/reports/${encodeURIComponent(each.id)}` }, each.id), "name"],
    ["Kind", (each) => badge(each.kind)],
    ["Name", (each) => each.name, "name"],
    ["Written", (each) => moment(each.modified_at)],
    ["Size", (each) => bytes(each.bytes), "right"],
  ], reports));
}

export default { title: "Benchmark reports", mount };
