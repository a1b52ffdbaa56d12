// An answer's tokens, shaded by probability, each with its alternatives beside it while it is pointed at or has the focus. One
// stop for the keyboard: arrows move, Escape hides the alternatives.

import { h, show } from "../lib/dom.js";
import { percent } from "../lib/format.js";

const GAP = 4;

export function tokenView(tokens) {
  const panel = h("div", { class: "alternatives", "aria-live": "polite", hidden: true });
  const buttons = tokens.map((token, index) => h("button", {
    type: "button", class: `token p${grade(token.logprob)}`, tabindex: index ? "-1" : "0", "data-index": index,
    "aria-label": `${spoken(token)}, ${percent(Math.exp(token.logprob), 1)}`,
  }, shown(token)));
  const list = h("div", { class: "tokens", role: "group", "aria-label": "Tokens", onkeydown: move, onclick: choose, onmouseover: choose, onfocusin: choose, onmouseleave: hide, onfocusout: hide }, buttons);
  let chosen = 0;

  function choose(event) {
    const element = event.target.closest("button");
    if (!element) return;
    buttons[chosen].tabIndex = -1;
    buttons[chosen].classList.remove("chosen");
    chosen = Number(element.dataset.index);
    buttons[chosen].tabIndex = 0;
    buttons[chosen].classList.add("chosen");
    show(panel, alternatives(tokens[chosen], chosen));
    panel.hidden = false;
    place();
  }

  // Below the token, or above it where the page ends.
  function place() {
    const all = view.getBoundingClientRect(), token = buttons[chosen].getClientRects()[0];
    const isBelow = token.bottom + panel.offsetHeight + GAP < innerHeight;
    panel.style.top = `${(isBelow ? token.bottom + GAP : token.top - GAP - panel.offsetHeight) - all.top}px`;
    panel.style.left = `${Math.max(0, Math.min(token.left - all.left, all.width - panel.offsetWidth))}px`;
  }

  function hide() {
    panel.hidden = true;
  }

  function move(event) {
    if (event.key === "Escape") hide();
    const to = { ArrowRight: chosen + 1, ArrowDown: chosen + 1, ArrowLeft: chosen - 1, ArrowUp: chosen - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (to === undefined || !buttons[to]) return;
    event.preventDefault();
    buttons[to].focus();
  }

  const view = h("div", { class: "token-view" }, h("p", { class: "muted small" }, "Point at a token to see what else was likely. Arrow keys move."), list, panel);
  return view;
}

function alternatives(token, index) {
  const others = (token.top_logprobs ?? []).filter((other) => other.token !== token.token);
  const rows = [{ ...token, isDrawn: true }, ...others].sort((a, b) => b.logprob - a.logprob);
  return [
    h("h3", null, `Token ${index + 1}`),
    h("table", null,
      h("caption", { class: "sr" }, "The token that was drawn and its alternatives"),
      h("thead", null, h("tr", null, ["Token", "Probability", "Log probability"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", null, rows.map((row) => h("tr", { class: row.isDrawn ? "drawn" : "" },
        h("td", { class: "mono name" }, spoken(row), row.isDrawn && h("span", { class: "badge" }, "drawn")),
        h("td", null, h("meter", { min: "0", max: "1", value: Math.exp(row.logprob), "aria-hidden": "true" }), ` ${percent(Math.exp(row.logprob), 1)}`),
        h("td", null, row.logprob.toFixed(3)))))),
  ];
}

// 0: all but certain, 4: a surprise.
function grade(logprob) {
  const share = Math.exp(logprob);
  return [0.9, 0.6, 0.3, 0.1].filter((least) => share < least).length;
}

function shown(token) {
  if (token.token === "" || token.token.includes("\ufffd")) return bytesOf(token);
  return token.token.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

function spoken(token) {
  if (token.token === "" || token.token.includes("\ufffd")) return bytesOf(token);
  return JSON.stringify(token.token);
}

function bytesOf(token) {
  return (token.bytes ?? []).map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("") || "(empty)";
}
