// The frame around the pages: which page is shown, the theme, the key, and whether the server answers.

import { hasKey, onKey, open, retry, setKey } from "./lib/api.js";
import { h, show } from "./lib/dom.js";
import { dialog, empty, failure, field, head, poll } from "./lib/ui.js";
import audit from "./pages/audit.js";
import batches from "./pages/batches.js";
import load from "./pages/load.js";
import workers from "./pages/workers.js";
import models from "./pages/models.js";
import playground from "./pages/playground.js";
import reports from "./pages/reports.js";
import requests from "./pages/requests.js";
import tenants from "./pages/tenants.js";

const PAGES = { playground, load, workers, requests, tenants, models, batches, reports, audit };
const FIRST = "playground";
const MISSING = { title: "404: no such page", mount: (root) => show(root, head(MISSING.title), empty(`The console has no page “${location.hash.slice(0, 100)}”`, h("a", { href: `#/${FIRST}` }, "Playground"))) };

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const menu = document.getElementById("menu");
const keyButton = document.getElementById("key");
const theme = document.getElementById("theme");
let leaving = new AbortController();

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return [name || FIRST, rest.map(decoded).join("/")];
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function enter() {
  leaving.abort();
  retry();
  leaving = new AbortController();
  const [name, argument] = route();
  const page = Object.hasOwn(PAGES, name) ? PAGES[name] : MISSING;
  document.title = `${page.title} – tokenmill`;
  for (const link of nav.children) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  openMenu(false);
  const root = h("div");
  show(main, root);
  try {
    page.mount(root, { signal: leaving.signal, argument, again: enter });
  } catch (error) {
    show(root, failure(error));
  }
}

function openMenu(isOpen) {
  nav.classList.toggle("open", isOpen);
  menu.setAttribute("aria-expanded", String(isOpen));
}

async function askKey() {
  const input = h("input", { type: "password", autocomplete: "off", spellcheck: "false" });
  const given = field("API key", input, "Kept for this tab until it is closed. Leave empty to forget it.");
  await dialog("API key", given.element, { label: "Use this key", submit: () => setKey(input.value) });
}

function tellKey() {
  keyButton.textContent = hasKey() ? "API key set" : "API key";
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  document.dispatchEvent(new Event("themechange"));
}

const health = document.getElementById("health");

async function check() {
  try {
    await open("/health");
    tell("Ready");
  } catch (error) {
    tell(error.status === 0 ? "No connection" : "Not ready");
  }
}

function tell(state) {
  if (health.textContent !== state) health.textContent = state;
  health.dataset.state = state === "Ready" ? "ok" : "bad";
}

for (const [name, page] of Object.entries(PAGES)) nav.append(h("a", { href: `#/${name}`, "data-page": name }, page.title));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
nav.addEventListener("click", () => openMenu(false));
menu.addEventListener("click", () => openMenu(!nav.classList.contains("open")));
keyButton.addEventListener("click", askKey);
onKey(() => {
  tellKey();
  enter();
});
tellKey();
theme.value = localStorage.getItem("theme") ?? "";
theme.addEventListener("change", () => {
  if (theme.value) localStorage.setItem("theme", theme.value);
  else localStorage.removeItem("theme");
  setTheme(theme.value);
});
setTheme(theme.value);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
addEventListener("hashchange", () => {
  enter();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
enter();
poll(check, 5000, new AbortController().signal);
