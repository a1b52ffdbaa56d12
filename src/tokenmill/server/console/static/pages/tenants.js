// Tenants with what they are granted, and their keys. A new key is shown once and then forgotten.

import { ApiError, get, hasKey, send } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { decimal, moment, orNone, percent, whole } from "../lib/format.js";
import { badge, button, card, confirmation, copy, dialog, empty, failure, field, head, loading, select, table, toast } from "../lib/ui.js";
import { usageCard } from "../lib/usage.js";

const STATES = { live: "ok", revoked: "", expired: "warn" };
const PROFILES = ["", "chat", "code", "rag", "agent", "batch", "content", "edge"];
const OVERLAPS = [["0", "At once"], ["3600", "In an hour"], ["86400", "In a day"], ["604800", "In a week"]];
const LIFETIMES = [["0", "Never"], ["30", "In 30 days"], ["90", "In 90 days"], ["365", "In a year"]];
const CLASSES = [["0", "P0, served first"], ["1", "P1"], ["2", "P2, served last"]];
// name, label, hint; those with a list of choices are a select.
const SETTINGS = [
  ["name", "Name"],
  ["priority_class", "Class", "", CLASSES],
  ["weight", "Weight", "Its share of the service in its class, against other tenants'."],
  ["requests_per_minute", "Requests a minute", "Empty: no limit."],
  ["tokens_per_minute", "Tokens a minute", "Empty: no limit."],
  ["max_concurrent", "Requests at once", "Empty: no limit."],
  ["kv_share", "Share of KV blocks", "Above 0, at most 1."],
  ["profile", "Profile", "", PROFILES.map((name) => [name, name || "none"])],
  ["ttft_ms", "TTFT target, ms", "Empty: the profile's."],
  ["tpot_ms", "TPOT target, ms", "Empty: the profile's."],
  ["queue_s", "Longest wait, s", "Empty: the server's."],
  ["timeout_s", "Longest request, s", "Empty: the server's."],
  ["cache_group", "Cache group", "Tenants of one group share cached KV. Empty: nobody shares."],
];
const TEXTS = new Set(["name", "profile", "cache_group"]);

function mount(root, { signal }) {
  const body = h("div", null, loading());
  show(root, head("Tenants and keys", null, hasKey() && [
    button("New tenant", () => editTenant(null, refresh)),
    button("New key", () => createKey(tenants, refresh), { kind: "primary" }),
  ]), body);
  let tenants = [];

  async function refresh() {
    try {
      const [one, two] = await Promise.all([get("/admin/tenants", signal), get("/admin/keys", signal)]);
      tenants = one.data;
      show(body, !hasKey() && howTo(two.data), tenantCard(tenants, two.data, refresh), keyCard(two.data, refresh), usageCard(signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error instanceof ApiError && error.status === 404) show(body, card(null, empty("This server keeps no tenants", "Tenants and keys are kept in a file that the server is started with.", "tokenmill serve MODEL --tenants FILE")));
      else show(body, error instanceof ApiError && error.status === 401 ? [failure(error), commands()] : failure(error));
    }
  }

  refresh();
}

// Without keys nobody may change anything over HTTP: whoever has the machine does.
function howTo(keys) {
  const text = keys.some((key) => key.state === "live")
    ? "To change tenants and keys here, give a key of scope admin with the button “API key”. The command line needs none:"
    : "No keys are given out, so everybody who reaches this server may use it. The first key closes it:";
  return card(null, h("p", null, text), commands());
}

function commands() {
  return h("pre", { tabindex: "0" }, "tokenmill keys create NAME --admin\ntokenmill keys create NAME --tenant TENANT\ntokenmill keys list\ntokenmill keys rotate KEY\ntokenmill keys revoke KEY");
}

function tenantCard(tenants, keys, refresh) {
  if (!tenants.length) return card("Tenants", empty("No tenants yet", "A tenant is made with its first key, or by itself."));
  const live = (tenant) => keys.filter((key) => key.tenant === tenant.id && key.state === "live").length;
  return card("Tenants", table("Tenants", [
    ["Tenant", (each) => [each.name, each.name !== each.id && h("div", { class: "small muted mono" }, each.id)], "name"],
    ["Class", (each) => `P${each.priority_class}`],
    ["Weight", (each) => decimal(each.weight), "right"],
    ["Limits", limits],
    ["KV share", (each) => percent(each.kv_share), "right"],
    ["Targets", targets],
    ["Keys", (each) => whole(live(each)), "right"],
    ["", (each) => hasKey() && h("div", { class: "row" },
      button("Edit", () => editTenant(each, refresh), { kind: "small", "aria-label": `Edit ${each.id}` }),
      button("Delete", () => remove(each, live(each), refresh), { kind: "small", "aria-label": `Delete ${each.id}` })), "right"],
  ], tenants));
}

function limits(tenant) {
  const parts = [
    tenant.requests_per_minute && `${whole(tenant.requests_per_minute)} requests/min`,
    tenant.tokens_per_minute && `${whole(tenant.tokens_per_minute)} tokens/min`,
    tenant.max_concurrent && `${whole(tenant.max_concurrent)} at once`,
  ].filter(Boolean);
  return parts.length ? parts.map((part) => h("div", { class: "nowrap" }, part)) : "none";
}

function targets(tenant) {
  const parts = [tenant.profile, tenant.ttft_ms && `TTFT ${decimal(tenant.ttft_ms)} ms`, tenant.tpot_ms && `TPOT ${decimal(tenant.tpot_ms)} ms`].filter(Boolean);
  return parts.length ? parts.map((part) => h("div", { class: "nowrap" }, part)) : "none";
}

function keyCard(keys, refresh) {
  if (!keys.length) return null;
  return card("Keys", table("Keys", [
    ["Key", (each) => [each.name, h("div", { class: "small muted mono" }, `${each.id} ${each.hint}`)], "name"],
    ["Tenant", (each) => each.tenant, "name"],
    ["Scope", (each) => each.scopes.map((scope) => badge(scope, "warn"))],
    ["State", (each) => [badge(each.state, STATES[each.state]), each.replaced_by && h("div", { class: "small muted" }, `replaced by ${each.replaced_by}`)]],
    ["Created", (each) => moment(each.created_at)],
    ["Last used", (each) => moment(each.last_used_at ?? NaN)],
    ["Ends", (each) => (each.expires_at ? moment(each.expires_at) : "never")],
    ["", (each) => hasKey() && each.state === "live" && h("div", { class: "row" },
      button("Rotate", () => rotate(each, refresh), { kind: "small", "aria-label": `Rotate ${each.name}` }),
      button("Revoke", () => revoke(each, refresh), { kind: "small", "aria-label": `Revoke ${each.name}` })), "right"],
  ], keys));
}

async function editTenant(tenant, refresh) {
  const id = field("Id", h("input", { required: true, autocomplete: "off", class: "mono" }), "Letters, digits, . _ and -. It cannot be changed later.");
  const made = SETTINGS.map(([name, label, hint, choices]) => {
    const now = String(tenant?.[name] ?? "");
    const control = choices ? select(choices, now || choices[name === "priority_class" ? 1 : 0][0]) : h("input", { autocomplete: "off", value: now, inputmode: TEXTS.has(name) ? "text" : "decimal" });
    return { name, now, ...field(label, control, hint) };
  });
  const submit = async () => {
    const given = {};
    for (const each of made) {
      const text = each.control.value.trim();
      if (text === each.now || (!tenant && text === "")) continue;
      given[each.name] = TEXTS.has(each.name) ? text : text === "" ? null : numberOf(text, each);
    }
    return tenant ? send("PATCH", `/admin/tenants/${encodeURIComponent(tenant.id)}`, given) : send("POST", "/admin/tenants", { id: id.control.value.trim(), ...given });
  };
  const done = await dialog(tenant ? `Tenant ${tenant.id}` : "New tenant", [!tenant && id.element, h("div", { class: "fields" }, made.map((each) => each.element))], { label: tenant ? "Save" : "Create", submit });
  if (done) {
    toast(tenant ? "Saved." : "The tenant is made.");
    refresh();
  }
}

function numberOf(text, each) {
  const value = Number(text);
  each.error(Number.isFinite(value) ? "" : "Must be a number.");
  if (!Number.isFinite(value)) throw new Error(`${each.name} must be a number.`);
  return value;
}

async function remove(tenant, numKeys, refresh) {
  const done = await confirmation("Delete tenant", `${tenant.name} and its ${numKeys === 1 ? "key" : `${numKeys} keys`} stop working at once. What is kept for it is not shown to others.`, "Delete",
    () => send("DELETE", `/admin/tenants/${encodeURIComponent(tenant.id)}`));
  if (done) refresh();
}

async function createKey(tenants, refresh) {
  const name = field("Name", h("input", { required: true, autocomplete: "off" }), "To know it by.");
  const tenant = field("Tenant", h("input", { autocomplete: "off", list: "tenant-ids" }), "Empty: a tenant of the same name. A new one is made.");
  const known = h("datalist", { id: "tenant-ids" }, tenants.map((each) => h("option", { value: each.id })));
  const ends = field("Ends", select(LIFETIMES, "0"));
  const scope = field("Scope", select([["", "Generate only"], ["admin", "Admin: also tenants, keys and the server"]], ""));
  const made = await dialog("New key", [name.element, tenant.element, known, scope.element, ends.element], { label: "Create", submit: () => {
    const days = Number(ends.control.value);
    return send("POST", "/admin/keys", {
      name: name.control.value.trim(),
      ...(tenant.control.value.trim() ? { tenant: tenant.control.value.trim() } : {}),
      ...(scope.control.value ? { scopes: ["admin"] } : {}),
      ...(days ? { expires_at: Math.floor(Date.now() / 1000) + 86400 * days } : {}),
    });
  } });
  if (made) await tellOnce(made, refresh);
}

async function rotate(key, refresh) {
  const overlap = field("The old key stops working", select(OVERLAPS, "0"));
  const made = await dialog(`Rotate ${key.name}`, [h("p", null, "A new key with the same tenant and scope takes its place."), overlap.element], { label: "Rotate",
    submit: () => send("POST", `/admin/keys/${encodeURIComponent(key.id)}/rotate`, { overlap_s: Number(overlap.control.value) }) });
  if (made) await tellOnce(made, refresh);
}

async function tellOnce(made, refresh) {
  const shown = h("input", { readonly: true, class: "mono", value: made.key, onfocus: (event) => event.target.select() });
  await dialog("The new key", [field(`Key ${made.name}`, shown, "Shown only now: the server keeps a digest of it.").element, button("Copy", () => copy(made.key, "Key"))], { label: "Close" });
  shown.value = "";
  refresh();
}

async function revoke(key, refresh) {
  const done = await confirmation("Revoke key", `${key.name} (${key.hint}, tenant ${orNone(key.tenant)}) stops working at once and for good.`, "Revoke", () => send("DELETE", `/admin/keys/${encodeURIComponent(key.id)}`));
  if (done) refresh();
}

export default { title: "Tenants and keys", mount };
