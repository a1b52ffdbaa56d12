// How one message of the conversation is shown: a question, or an answer while it comes and after.

import { h, show } from "../lib/dom.js";
import { decimal, duration, whole } from "../lib/format.js";
import { Markdown } from "../lib/markdown.js";
import { badge, button, copy, explain, field } from "../lib/ui.js";
import { curl } from "./curl.js";
import { pretty, textOf } from "./settings.js";
import { tokenView } from "./tokens.js";

const MOST_RAW = 200_000;

export function question(role, text) {
  return h("article", { class: `turn ${role}` }, h("h2", null, role === "tool" ? "Tool result" : "You"), h("div", { class: "said" }, text));
}

// A message of a conversation that was kept.
export function recalled(message) {
  if (message.role !== "assistant") return question(message.role, textOf(message.content));
  const text = new Markdown();
  text.end(textOf(message.content));
  return h("article", { class: "turn assistant" }, h("h2", null, "Answer"), text.element,
    (message.tool_calls ?? []).map((call) => h("div", { class: "call" }, callHead(call.function), h("pre", { tabindex: "0" }, legible(call.function.arguments)))));
}

function callHead(call) {
  return h("h3", null, "Call ", h("code", null, call.name));
}

export class AnswerView {
  constructor(answer, path, actions) {
    this.answer = answer;
    this.path = path;
    this.actions = actions;
    this.text = new Markdown({ isPlain: "response_format" in answer.body });
    this.thought = document.createTextNode("");
    this.thinking = h("details", { class: "thinking", hidden: true }, h("summary", null, "Reasoning"), h("div", { class: "said muted" }, this.thought));
    this.calls = h("div", { class: "stack" });
    this.foot = h("div", { class: "foot" });
    this.extra = h("div");
    this.state = h("span", { class: "busy", role: "status" }, "Waiting for the first token");
    this.element = h("article", { class: "turn assistant", "aria-busy": "true" },
      h("h2", null, answer.body.model), this.thinking, this.text.element, this.calls, h("div", { class: "row small muted" }, this.state), this.foot, this.extra);
  }

  add({ content, reasoning }) {
    if (content) this.text.grow(this.answer.content, this.actions.follow);
    if (reasoning) {
      this.thinking.hidden = false;
      this.thinking.open = !this.answer.content;
      this.thought.appendData(reasoning);
    }
    if (this.answer.calls.length) this.drawCalls(false);
    if (this.answer.firstMs && this.state.textContent !== "Answering") this.state.textContent = "Answering";
  }

  end() {
    const { answer } = this;
    this.text.end(answer.content);
    this.element.setAttribute("aria-busy", "false");
    this.state.classList.remove("busy");
    show(this.state, this.summary());
    if (answer.error) this.element.insertBefore(h("p", { class: "notice bad", role: "alert" }, explain(answer.error)), this.foot);
    if (answer.calls.length) this.drawCalls(answer.finish === "tool_calls");
    const views = [];
    if (answer.content) views.push(["As written", () => h("pre", { tabindex: "0" }, answer.content)]);
    if (answer.tokens.length) views.push(["Probabilities", () => tokenView(answer.tokens)]);
    views.push(["Request and response", () => this.raw()]);
    const toggles = views.map(([label, view]) => button(label, () => this.toggle(toggles, label, view), { kind: "small", "aria-expanded": "false" }));
    show(this.foot, h("div", { class: "row" }, toggles,
      button("Copy as curl", () => copy(curl(this.path, answer.body), "Command"), { kind: "small" }),
      answer.content && button("Copy text", () => copy(answer.content, "Text"), { kind: "small" }),
      button("Answer again", this.actions.again, { kind: "small again" })));
  }

  summary() {
    const { answer } = this;
    const parts = [];
    const count = answer.usage?.completion_tokens;
    if (answer.finish) parts.push(badge(FINISH[answer.finish] ?? answer.finish, answer.finish === "stop" || answer.finish === "tool_calls" ? "ok" : "warn"));
    if (answer.firstMs) parts.push(`first token ${duration((answer.firstMs - answer.startMs) / 1000)}`);
    if (count) {
      const seconds = (answer.lastMs - answer.firstMs) / 1000;
      parts.push(`${whole(count)} tokens`);
      if (count > 1 && seconds > 0) parts.push(`${decimal((count - 1) / seconds)} tokens/s`);
    }
    const cached = answer.usage?.prompt_tokens_details?.cached_tokens;
    if (answer.usage) parts.push(`prompt ${whole(answer.usage.prompt_tokens)}${cached ? `, ${whole(cached)} cached` : ""}`);
    return h("span", { class: "row num" }, parts.map((part) => h("span", null, part)));
  }

  toggle(toggles, label, view) {
    const pressed = toggles.find((each) => each.textContent === label);
    const isOpen = pressed.getAttribute("aria-expanded") === "true";
    for (const each of toggles) each.setAttribute("aria-expanded", "false");
    pressed.setAttribute("aria-expanded", String(!isOpen));
    show(this.extra, isOpen ? [] : view());
  }

  raw() {
    const text = this.answer.raw.join("");
    const cut = text.length > MOST_RAW ? `${text.slice(0, MOST_RAW)}\n… ${whole(text.length - MOST_RAW)} more characters` : text;
    return h("div", { class: "stack raw" },
      h("h3", null, `Request: POST ${this.path}`), h("pre", { tabindex: "0" }, pretty(this.answer.body)),
      h("h3", null, "Response"), h("pre", { tabindex: "0" }, cut || "No bytes came."));
  }

  // Each call with its arguments; where the answer waits for results, with a box for each.
  drawCalls(isAnswerable) {
    const { calls } = this.answer;
    const label = (call, index) => `Result of ${call.name}${calls.some((other) => other !== call && other.name === call.name) ? `, call ${index + 1}` : ""}`;
    const boxes = isAnswerable ? calls.map((call, index) => field(label(call, index), h("textarea", { rows: "2", class: "code" }))) : [];
    const send = () => {
      const results = this.answer.calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: boxes[index].control.value }));
      if (this.actions.results(results)) this.calls.querySelectorAll("textarea, button").forEach((each) => { each.disabled = true; });
    };
    show(this.calls, this.answer.calls.map((call, index) => h("div", { class: "call" },
      callHead(call), h("pre", { tabindex: "0" }, legible(call.arguments)), boxes[index]?.element)),
    isAnswerable && button("Send results", send, { kind: "primary" }));
  }
}

const FINISH = { stop: "complete", length: "cut at max tokens", tool_calls: "calls tools", stopped: "stopped", content_filter: "filtered", abort: "stopped" };

function legible(text) {
  try {
    return pretty(JSON.parse(text));
  } catch {
    return text;
  }
}
