// The model, its names, the models beside it, and what can be loaded and unloaded while the server runs.

import { get, send } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { bytes, whole } from "../lib/format.js";
import { badge, button, card, confirmation, dialog, empty, explain, facts, failure, field, head, isInUse, loading, poll, table, toast } from "../lib/ui.js";

const STATES = { loaded: "ok", loading: "warn" };

function mount(root, { signal }) {
  const body = h("div", null, loading());
  show(root, head("Models and adapters", null, button("Load adapter", () => load(refresh), { kind: "primary" })), body);

  async function refresh(isLook = false) {
    try {
      const [{ data }, version] = await Promise.all([get("/v1/models", signal), get("/version", signal)]);
      if (!signal.aborted && !(isLook && isInUse(body))) show(body, draw(data, version.version, refresh));
    } catch (error) {
      if (error.name !== "AbortError") show(body, failure(error));
    }
  }

  poll(() => refresh(true), 2000, signal);
}

function draw(cards, version, refresh) {
  const names = cards.filter((each) => each.parent === null);
  const adapters = cards.filter((each) => each.parent);
  const others = cards.filter((each) => each.status || each.parent === undefined);
  const meta = names[0]?.meta ?? {};
  return [
    card(null, h("h2", null, names.map((each) => each.id).join(", ")), facts([
      ["Parameters", whole(meta.n_params)],
      ["Size of the weights", bytes(meta.size)],
      ["Context", `${whole(names[0]?.max_model_len)} tokens, trained with ${whole(meta.n_ctx_train)}`],
      ["Vocabulary", `${whole(meta.n_vocab)} tokens`],
      ["Width", whole(meta.n_embd)],
      ["tokenmill", version],
    ])),
    others.length > 0 && card("Models by name", table("Models by name", [
      ["Name", (each) => each.id, "name"],
      ["Served by", (each) => (each.owned_by === "tokenmill" ? "this server" : each.owned_by)],
      ["State", state],
      ["", (each) => each.status && switchOf(each, refresh), "right"],
    ], others)),
    card("Adapters", adapters.length
      ? table("LoRA adapters", [
        ["Name", (each) => each.id, "name"],
        ["Folder", (each) => each.root, "name mono"],
        ["", (each) => button("Unload", () => unload(each.id, refresh), { kind: "small", "aria-label": `Unload ${each.id}` }), "right"],
      ], adapters)
      : empty("No adapter is loaded", "Requests name an adapter as their model. Adapters can be loaded here when the server is started with a folder for them.", "tokenmill serve MODEL --lora-dir FOLDER")),
  ];
}

function state({ status }) {
  if (!status) return badge("loaded", "ok");
  return [badge(status.value, STATES[status.value]), status.failed && h("div", { class: "small muted" }, status.reason)];
}

// Loads a model of --models-dir ahead of the first call that names it, or unloads it.
function switchOf({ id, status }, refresh) {
  const isLoaded = status.value === "loaded";
  const label = isLoaded ? "Unload" : "Load";
  return button(label, async (event) => {
    event.target.disabled = true;
    try {
      await send("POST", `/models/${isLoaded ? "unload" : "load"}`, { model: id });
    } catch (error) {
      toast(explain(error));
    }
    await refresh();
    [...document.querySelectorAll("[data-model]")].find((each) => each.dataset.model === id)?.focus();
  }, { kind: "small", "data-model": id, "aria-label": `${label} ${id}`, disabled: status.value === "loading" });
}

async function load(refresh) {
  const name = field("Name", h("input", { required: true, autocomplete: "off" }), "What requests will call it.");
  const path = field("Folder", h("input", { required: true, autocomplete: "off", class: "mono" }), "Inside the server's --lora-dir.");
  const done = await dialog("Load adapter", [name.element, path.element], {
    label: "Load",
    submit: () => send("POST", "/v1/load_lora_adapter", { lora_name: name.control.value, lora_path: path.control.value }),
  });
  if (done) {
    toast(`${name.control.value} is loaded.`);
    refresh();
  }
}

async function unload(name, refresh) {
  const done = await confirmation("Unload adapter", `Requests that use ${name} run to their end; new ones are refused.`, "Unload",
    () => send("POST", "/v1/unload_lora_adapter", { lora_name: name }));
  if (done) {
    toast(`${name} is unloaded.`);
    refresh();
  }
}

export default { title: "Models and adapters", mount };
