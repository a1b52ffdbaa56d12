// The audit log: whether it is written, and its signed head, which is worth most when it is kept elsewhere.

import { ApiError, get } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { moment, orNone, whole } from "../lib/format.js";
import { badge, button, card, copy, empty, facts, failure, head as top, isInUse, loading, poll } from "../lib/ui.js";

function mount(root, { signal }) {
  const body = h("div", null, loading());
  show(root, top("Audit log", "Who did what: a chain of entries whose head is signed."), body);
  let last = "";

  async function refresh() {
    try {
      const status = await get("/admin/audit", signal);
      const seen = JSON.stringify(status);
      if (seen === last || isInUse(body)) return;
      show(body, draw(status));
      last = seen;
    } catch (error) {
      if (error.name === "AbortError") return;
      last = "";
      show(body, error instanceof ApiError && error.status === 404
        ? card(null, empty("No audit log is kept", "It is a file that the server is started with, and a key that signs it.", "tokenmill serve MODEL --audit-log FILE --audit-key KEY"))
        : failure(error));
    }
  }

  poll(refresh, 2000, signal);
}

function draw(status) {
  return [
    status.failure && h("p", { class: "notice bad", role: "alert" }, `The log cannot be written: ${status.failure}. Calls are refused until it can.`),
    card(null, h("div", { class: "card-head" }, h("h2", null, "Entries"), badge(status.failure ? "not written" : "written", status.failure ? "bad" : "ok")), facts([
      ["File", h("span", { class: "mono" }, status.file)],
      ["Newest entry", whole(status.seq)],
      ["Not yet written", whole(status.pending)],
      ["Syslog", syslog(status.syslog)],
    ])),
    status.head ? signed(status) : card("Signed head", empty("No head yet", "The newest entry is signed every 100 entries or 10 seconds.")),
  ];
}

function signed({ file, head, key }) {
  const name = `${head.seq}:${head.hash}`;
  return card("Signed head",
    h("div", { class: "stack" },
      facts([
        ["Entry", whole(head.seq)],
        ["Hash", h("span", { class: "mono" }, head.hash)],
        ["Signed", moment(Date.parse(head.time) / 1000)],
        ["Key", h("span", { class: "mono" }, orNone(key))],
      ]),
      h("p", { class: "muted" }, "Keep it on another machine: a log that was cut off or written anew since then does not have it."),
      h("pre", { tabindex: "0" }, `tokenmill audit verify ${file} --public-key KEY.pub --head ${name}`),
      h("div", { class: "row" }, button("Copy head", () => copy(name, "Head")))));
}

function syslog(status) {
  if (!status) return "heads are not sent there";
  return [`${status.address}: ${whole(status.sent)} heads sent `, status.lost > 0 && badge(`${whole(status.lost)} lost`, "bad")];
}

export default { title: "Audit log", mount };
