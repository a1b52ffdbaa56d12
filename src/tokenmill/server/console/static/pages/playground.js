// A conversation with the model, or with two side by side. It lasts as long as the page does, also while other pages are
// shown, and can be kept as a file.

import { get, saveAs } from "../lib/api.js";
import { h, show } from "../lib/dom.js";
import { bytes } from "../lib/format.js";
import { button, chooseFile, explain, head } from "../lib/ui.js";
import { bodiesOf, fileOf, saidIn } from "../chat/file.js";
import { BadField, Settings } from "../chat/settings.js";
import { Thread } from "../chat/thread.js";

const MOST_BYTES = 32 << 20;

class Conversation {
  constructor() {
    this.settings = new Settings(() => this.compare());
    this.threads = [this.thread(this.settings.model)];
    this.logs = h("div", { class: "logs", role: "group", "aria-label": "Conversation" }, this.threads[0].log);
    this.input = h("textarea", { rows: "3", "aria-label": "Message", placeholder: "Write a message. Enter sends, Shift+Enter begins a new line.", onkeydown: (event) => this.key(event) });
    this.sendButton = button("Send", () => this.ask(), { kind: "primary" });
    this.stopButton = button("Stop", () => this.threads.forEach((each) => each.answer?.stop()), { kind: "danger", disabled: true });
    this.problem = h("div", { role: "alert" });
  }

  thread(model) {
    return new Thread((messages) => this.bodyOf(messages, model), () => this.tellBusy());
  }

  // As many threads as models are chosen. The second goes on from what was said so far.
  compare() {
    const { other } = this.settings;
    if (other.control.value && this.threads.length === 1) {
      this.threads.push(this.thread(other));
      this.threads[1].recall(this.threads[0].messages);
    } else if (!other.control.value && this.threads.length === 2) this.threads.pop().answer?.stop();
    const isTwo = this.threads.length === 2;
    this.logs.classList.toggle("two", isTwo);
    // Two columns may have to be scrolled, also by keyboard.
    this.logs.tabIndex = isTwo ? 0 : -1;
    show(this.logs, this.threads.map((each) => each.log));
    this.tellBusy();
  }

  clear() {
    for (const each of this.threads) each.recall([]);
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.ask();
    }
  }

  ask() {
    const text = this.input.value;
    if (!text.trim() || this.isBusy) return;
    if (this.threads.every((each) => each.ask(text))) this.input.value = "";
  }

  bodyOf(messages, model) {
    show(this.problem);
    try {
      return this.settings.body(messages, model);
    } catch (error) {
      if (!(error instanceof BadField)) throw error;
      this.tell(`A setting is wrong. ${error.message}`);
      return null;
    }
  }

  tell(problem) {
    show(this.problem, h("p", { class: "notice bad" }, problem));
  }

  get isBusy() {
    return this.threads.some((each) => each.answer);
  }

  tellBusy() {
    this.stopButton.disabled = !this.isBusy;
    this.sendButton.disabled = this.isBusy;
  }

  save() {
    const bodies = this.threads.map((each, index) => this.bodyOf(each.messages, index ? this.settings.other : this.settings.model));
    if (bodies.every((each) => each)) saveAs(new Blob([fileOf(bodies)], { type: "application/json" }), "conversation.json");
  }

  async open() {
    const file = await chooseFile(".json,application/json");
    if (!file) return;
    try {
      if (file.size > MOST_BYTES) throw new Error(`It has ${bytes(file.size)}, more than ${bytes(MOST_BYTES)}.`);
      const bodies = bodiesOf(await file.text());
      show(this.problem);
      const missing = this.settings.take(bodies);
      this.compare();
      this.threads.forEach((each, index) => each.recall(saidIn(bodies[index] ?? bodies[0])));
      if (missing.length) this.tell(`Not served here: ${missing.join(", ")}. What is said next goes to the model that is chosen.`);
    } catch (error) {
      this.tell(`${file.name} cannot be opened. ${error.message}`);
    }
  }

  async loadModels() {
    try {
      this.settings.setModels((await get("/v1/models")).data);
      this.compare();
    } catch (error) {
      this.settings.model.error(explain(error));
    }
  }
}

let conversation = null;

function mount(root) {
  conversation ??= new Conversation();
  const one = conversation;
  const settings = h("details", { class: "card panel", open: matchMedia("(min-width: 1000px)").matches }, h("summary", null, "Settings"), one.settings.element);
  show(root, head("Playground", null, button("Open", () => one.open(), { title: "A conversation that was saved" }), button("Save", () => one.save(), { title: "The conversation as a file" }), button("Clear", () => one.clear())),
    h("div", { class: "playground" },
      h("div", { class: "talk" }, one.logs, one.problem,
        h("div", { class: "composer card" }, one.input, h("div", { class: "row" }, h("span", { class: "grow" }), one.stopButton, one.sendButton))),
      settings));
  one.loadModels();
}

export default { title: "Playground", mount };
