// Parts that pages share: tables, states, fields, dialogs, polling.

import { ApiError } from "./api.js";
import { h, show } from "./dom.js";

export function head(title, about, ...actions) {
  return h("div", { class: "page-head" }, h("h1", null, title), h("span", { class: "grow" }), actions, about && h("p", null, about));
}

export function card(title, ...children) {
  return h("section", { class: "card" }, title && h("h2", null, title), children);
}

export function button(label, onclick, { kind = "", ...props } = {}) {
  return h("button", { type: "button", class: kind, onclick, ...props }, label);
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

export function tile(label) {
  const value = h("dd", null, "–");
  return { element: h("div", { class: "tile" }, h("dt", null, label), value), set: (...content) => show(value, ...content) };
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

// columns: [title, cell(row), class]. The caption is for those who do not see the page.
export function table(caption, columns, rows) {
  return h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": caption },
    h("table", null,
      h("caption", { class: "sr" }, caption),
      h("thead", null, h("tr", null, columns.map(([title, , kind]) => h("th", { scope: "col", class: kind }, title || h("span", { class: "sr" }, "Actions"))))),
      h("tbody", null, rows.map((row) => h("tr", null, columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row))))))));
}

export function empty(title, about, command) {
  return h("div", { class: "empty" }, h("strong", null, title), about, command && h("div", null, h("code", null, command)));
}

export function loading() {
  return h("div", { class: "empty", role: "status" }, "Loading…");
}

export function failure(error) {
  return h("p", { class: "notice bad", role: "alert" }, explain(error));
}

export function explain(error) {
  if (error instanceof ApiError && error.status === 403) return `Not allowed with this key. ${error.message}`;
  return error.message || String(error);
}

export function toast(text) {
  const element = h("div", { class: "toast" }, text);
  document.getElementById("toasts").append(element);
  setTimeout(() => element.remove(), 5000);
}

let numFields = 0;

// A control with its label. `control` gets an id; `error(text)` marks it as wrong, "" takes that back.
export function field(label, control, hint) {
  const id = `field-${++numFields}`;
  const message = h("span", { class: "error", id: `${id}-error` });
  control.id = id;
  const element = h("div", { class: "field" }, h("label", { class: "label", for: id }, label), control, message, hint && h("span", { class: "hint", id: `${id}-hint` }, hint));
  if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
  return {
    element,
    control,
    error(text) {
      show(message, text);
      if (text) {
        control.setAttribute("aria-invalid", "true");
        control.setAttribute("aria-describedby", `${id}-error`);
      } else {
        control.removeAttribute("aria-invalid");
        if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
        else control.removeAttribute("aria-describedby");
      }
    },
  };
}

export function checkbox(label, checked, onchange) {
  const control = h("input", { type: "checkbox", checked, onchange });
  return { element: h("label", { class: "check" }, control, label), control };
}

export function select(options, value, onchange) {
  return h("select", { onchange }, options.map(([name, label]) => h("option", { value: name, selected: name === value }, label ?? name)));
}

// A dialog over the page. `submit` may be async; what it raises is shown and the dialog stays. Resolves when closed.
export function dialog(title, content, { label = "OK", kind = "primary", submit } = {}) {
  return new Promise((resolve) => {
    const message = h("div", { role: "alert" });
    const confirm = h("button", { type: "submit", class: kind }, label);
    const form = h("form", { onsubmit }, h("h2", { id: "dialog-title" }, title), h("div", { class: "stack" }, content, message),
      h("div", { class: "actions" }, submit && button("Cancel", () => box.close()), confirm));
    const box = h("dialog", { "aria-labelledby": "dialog-title", onclose }, form);
    let result = null;
    async function onsubmit(event) {
      event.preventDefault();
      confirm.disabled = true;
      try {
        result = submit ? await submit() : true;
        if (result !== false) box.close();
      } catch (error) {
        show(message, failure(error));
      } finally {
        confirm.disabled = false;
      }
    }
    function onclose() {
      box.remove();
      resolve(result);
    }
    document.body.append(box);
    box.showModal();
  });
}

export function confirmation(title, text, label, submit) {
  return dialog(title, h("p", null, text), { label, kind: "danger", submit });
}

// A file of the reader's disk; null where none is chosen. accept: as of an input.
export function chooseFile(accept) {
  return new Promise((resolve) => {
    const input = h("input", { type: "file", accept, onchange: () => resolve(input.files[0] ?? null), oncancel: () => resolve(null) });
    input.click();
  });
}

// Calls `work` now and again `ms` after each end, not while the page is hidden, until `signal` aborts.
export function poll(work, ms, signal) {
  let timer = 0;
  const turn = async () => {
    if (!document.hidden) await work();
    if (!signal.aborted) timer = setTimeout(turn, ms);
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  turn();
}

// Whether the reader is in it: what has the focus of the keyboard, is selected or was opened is not drawn anew.
export function isInUse(place) {
  const selection = getSelection();
  const isSelected = !selection.isCollapsed && place.contains(selection.anchorNode);
  return isSelected || place.querySelector(":focus-visible, details[open]") !== null;
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied.`);
  } catch {
    await dialog(`Copy ${what.toLowerCase()}`, h("textarea", { class: "code", rows: "8", readonly: true, "aria-label": what, value: text }), { label: "Close" });
  }
}
