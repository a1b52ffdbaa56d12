// A conversation with the model. It lasts as long as the page does, also while other pages are shown.

import { get } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { button, empty, explain, head } from "../lib/ui.js";
import { Answer } from "../chat/answer.js";
import { BadField, Settings } from "../chat/settings.js";
import { AnswerView, question } from "../chat/turn.js";

const PATH = "/v1/chat/completions";
const FOLLOW_PX = 120;

class Conversation {
  constructor() {
    this.settings = new Settings();
    this.messages = [];
    this.answer = null;
    this.unanswered = [];
    this.log = h("div", { class: "turns" });
    this.input = h("textarea", { rows: "3", "aria-label": "Message", placeholder: "Write a message. Enter sends, Shift+Enter begins a new line.", onkeydown: (event) => this.key(event) });
    this.sendButton = button("Send", () => this.ask(), { kind: "primary" });
    this.stopButton = button("Stop", () => this.answer?.stop(), { kind: "danger", disabled: true });
    this.problem = h("div", { role: "alert" });
    this.clear();
  }

  clear() {
    this.answer?.stop();
    this.messages = [];
    show(this.log, empty("Nothing said yet", "The conversation stays in this page and is gone when the page is closed."));
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.ask();
    }
  }

  ask() {
    const text = this.input.value;
    if (!text.trim() || this.answer) return;
    // A question that got no answer is no part of what is said.
    const before = this.messages.at(-1)?.role === "user" ? this.messages.slice(0, -1) : this.messages;
    if (this.begin([...before, { role: "user", content: text }], [question("user", text)], before !== this.messages)) this.input.value = "";
  }

  // Sends the conversation as it would be with `messages`; false where a setting is wrong.
  begin(messages, shown, isInstead = false) {
    let body;
    show(this.problem);
    try {
      body = this.settings.body(messages);
    } catch (error) {
      if (!(error instanceof BadField)) throw error;
      show(this.problem, h("p", { class: "notice bad" }, `A setting is wrong. ${error.message}`));
      return false;
    }
    if (!this.messages.length) show(this.log);
    if (isInstead) this.unanswered.forEach((element) => element.remove());
    for (const each of this.log.querySelectorAll(".again")) each.remove();
    this.messages = messages;
    this.log.append(...shown);
    if (shown.length) this.unanswered = shown;
    this.run(body);
    return true;
  }

  async run(body) {
    const answer = new Answer(body);
    const before = this.messages;
    const view = new AnswerView(answer, PATH, {
      follow,
      again: () => {
        if (!this.answer && this.begin(before, [])) view.element.remove();
      },
      results: (results) => this.begin([...this.messages, ...results], results.map((each) => question("tool", each.content))),
    });
    this.answer = answer;
    this.unanswered = [...this.unanswered, view.element];
    this.log.append(view.element);
    this.setBusy(true);
    view.element.scrollIntoView({ block: "nearest" });
    await answer.run(PATH, (added) => follow(() => view.add(added)));
    if (this.answer === answer) this.answer = null;
    if (this.messages === before && (answer.content || answer.calls.length)) {
      this.messages = [...before, answer.message()];
      this.unanswered = [];
    }
    view.end();
    this.setBusy(false);
  }

  setBusy(isBusy) {
    this.stopButton.disabled = !isBusy;
    this.sendButton.disabled = isBusy;
  }

  async loadModels() {
    const { control } = this.settings.model;
    try {
      const { data } = await get("/v1/models");
      const chosen = control.value;
      show(control, data.map((model) => h("option", { value: model.id, selected: model.id === chosen, "data-owner": model.owned_by }, model.id)));
      this.settings.model.error("");
    } catch (error) {
      this.settings.model.error(explain(error));
    }
  }
}

// Draws; who looks at the end of the page stays there.
function follow(draw) {
  const isAtEnd = innerHeight + scrollY > document.documentElement.scrollHeight - FOLLOW_PX;
  draw();
  if (isAtEnd) scrollTo(0, document.documentElement.scrollHeight);
}

let conversation = null;

function mount(root) {
  conversation ??= new Conversation();
  const one = conversation;
  const settings = h("details", { class: "card panel", open: matchMedia("(min-width: 1000px)").matches }, h("summary", null, "Settings"), one.settings.element);
  show(root, head("Playground", null, button("Clear", () => one.clear())),
    h("div", { class: "playground" },
      h("div", { class: "talk" }, one.log, one.problem,
        h("div", { class: "composer card" }, one.input, h("div", { class: "row" }, h("span", { class: "grow" }), one.stopButton, one.sendButton))),
      settings));
  one.loadModels();
}

export default { title: "Playground", mount };
