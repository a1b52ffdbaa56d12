// Batches: a file of calls, answered with what others leave of the engine.

import { download, get, open, send } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { bytes, moment, whole } from "../lib/format.js";
import { badge, button, card, confirmation, dialog, empty, failure, field, head, isInUse, loading, poll, table, toast } from "../lib/ui.js";

const KINDS = { completed: "ok", failed: "bad", expired: "bad", cancelled: "warn", cancelling: "warn", in_progress: "live", validating: "live", finalizing: "live" };
const OPEN = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
const EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}]}}';

function mount(root, { signal }) {
  const body = h("div", null, loading());
  show(root, head("Batches", "A batch is a file with one call a line. Its calls get what other requests leave.",
    button("New batch", () => create(refresh), { kind: "primary" })), body);
  let last = "";

  async function refresh() {
    try {
      const [batches, files] = await Promise.all([get("/v1/batches?limit=100", signal), get("/v1/files", signal)]);
      const seen = JSON.stringify([batches, files]);
      if (seen === last || isInUse(body)) return;
      show(body, draw(batches.data, files.data, refresh));
      last = seen;
    } catch (error) {
      if (error.name !== "AbortError") show(body, failure(error));
      last = "";
    }
  }

  poll(refresh, 2000, signal);
}

function draw(batches, files, refresh) {
  const names = new Map(files.map((file) => [file.id, file.filename]));
  return [
    card("Batches", batches.length ? table("Batches", [
      ["Input", (each) => [names.get(each.input_file_id) ?? each.input_file_id, h("div", { class: "small muted mono" }, each.id)], "name"],
      ["State", (each) => [badge(each.status.replace("_", " "), KINDS[each.status]), problems(each)]],
      ["Progress", progress],
      ["Created", (each) => moment(each.created_at)],
      ["", (each) => actions(each, names, refresh), "right"],
    ], batches) : empty("No batches yet", "Make a file like this, one line for each call, and start a batch with it.", EXAMPLE)),
    files.length > 0 && card("Files", table("Files", [
      ["Name", (each) => [each.filename, h("div", { class: "small muted mono" }, each.id)], "name"],
      ["Size", (each) => bytes(each.bytes), "right"],
      ["Kept until", (each) => moment(each.expires_at)],
      ["", (each) => h("div", { class: "row" },
        button("Download", () => attempt(() => download(`/v1/files/${each.id}/content`, each.filename)), { kind: "small", "aria-label": `Download ${each.filename}` }),
        button("Delete", () => remove(each, refresh), { kind: "small", "aria-label": `Delete ${each.filename}` })), "right"],
    ], files)),
  ];
}

function progress(batch) {
  const { total, completed, failed } = batch.request_counts;
  return [
    h("progress", { max: Math.max(1, total), value: completed + failed, "aria-label": `${completed + failed} of ${total} calls` }),
    h("div", { class: "small muted" }, `${whole(completed + failed)} of ${whole(total)}${failed ? `, ${whole(failed)} failed` : ""}`),
  ];
}

function problems(batch) {
  return (batch.errors?.data ?? []).slice(0, 3).map((each) => h("div", { class: "small" }, `${each.line ? `Line ${each.line}: ` : ""}${each.message}`));
}

function actions(batch, names, refresh) {
  const stem = (names.get(batch.input_file_id) ?? batch.id).replace(/\.jsonl?$/, "");
  const get = (id, name) => button(name, () => attempt(() => download(`/v1/files/${id}/content`, `${stem}-${name.toLowerCase()}.jsonl`)), { kind: "small", "aria-label": `${name} of ${stem}` });
  return h("div", { class: "row" },
    batch.output_file_id && get(batch.output_file_id, "Answers"),
    batch.error_file_id && get(batch.error_file_id, "Errors"),
    OPEN.has(batch.status) && batch.status !== "cancelling" && button("Cancel", async () => {
      const done = await confirmation("Cancel batch", `No more calls of ${batch.id} are answered. What is answered is kept.`, "Cancel batch", () => send("POST", `/v1/batches/${batch.id}/cancel`));
      if (done) refresh();
    }, { kind: "small" }));
}

async function create(refresh) {
  const file = field("File", h("input", { type: "file", accept: ".jsonl,.json,application/jsonl", required: true }), "JSON lines, each with custom_id, method, url and body.");
  const done = await dialog("New batch", file.element, { label: "Upload and start", submit: async () => {
    const [chosen] = file.control.files;
    const endpoint = await endpointOf(chosen);
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", chosen);
    const uploaded = await (await open("/v1/files", { method: "POST", form })).json();
    return send("POST", "/v1/batches", { input_file_id: uploaded.id, endpoint, completion_window: "24h" });
  } });
  if (done) {
    toast("The batch is started.");
    refresh();
  }
}

// What the first line asks for: a batch is of one endpoint.
async function endpointOf(file) {
  const [line] = (await file.slice(0, 1 << 20).text()).split("\n");
  let url;
  try {
    ({ url } = JSON.parse(line));
  } catch {
    throw new Error("The first line of the file is not JSON.");
  }
  if (typeof url !== "string") throw new Error("The first line has no url, such as /v1/chat/completions.");
  return url;
}

async function remove(file, refresh) {
  const done = await confirmation("Delete file", `${file.filename} is deleted from the server.`, "Delete", () => send("DELETE", `/v1/files/${file.id}`));
  if (done) refresh();
}

async function attempt(work) {
  try {
    await work();
  } catch (error) {
    toast(error.message);
  }
}

export default { title: "Batches", mount };
