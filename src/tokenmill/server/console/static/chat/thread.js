// One model's side of the conversation: what was said, how it is shown, and the answer that is on its way.

import { h, show } from "../lib/dom.js";
import { empty } from "../lib/ui.js";
import { Answer } from "./answer.js";
import { AnswerView, question, recalled } from "./turn.js";

const PATH = "/v1/chat/completions";
const FOLLOW_PX = 120;

export class Thread {
  // bodyOf(messages): the request that continues them; null where a setting is wrong, which it tells. changed(): an answer
  // began or ended.
  constructor(bodyOf, changed) {
    this.bodyOf = bodyOf;
    this.changed = changed;
    this.answer = null;
    this.log = h("div", { class: "turns" });
    this.recall([]);
  }

  // Takes a conversation's place by another.
  recall(messages) {
    this.answer?.stop();
    this.messages = messages;
    const turns = messages.filter((each) => each.role !== "system").map(recalled);
    this.unanswered = messages.at(-1)?.role === "user" ? turns.slice(-1) : [];
    show(this.log, turns.length ? turns : empty("Nothing said yet", "The conversation stays in this page and is gone when the page is closed. “Save” keeps it as a file."));
  }

  // False where a setting is wrong.
  ask(text) {
    // A question that got no answer is no part of what is said.
    const before = this.messages.at(-1)?.role === "user" ? this.messages.slice(0, -1) : this.messages;
    return this.begin([...before, { role: "user", content: text }], [question("user", text)], before !== this.messages);
  }

  begin(messages, shown, isInstead = false) {
    const body = this.bodyOf(messages);
    if (!body) return false;
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
    this.changed();
    scrollTo(0, document.documentElement.scrollHeight);
    await answer.run(PATH, (added) => follow(() => view.add(added)));
    if (this.answer === answer) this.answer = null;
    if (this.messages === before && (answer.content || answer.calls.length)) {
      this.messages = [...before, answer.message()];
      this.unanswered = [];
    }
    view.end();
    this.changed();
  }
}

// Draws; who looks at the end of the page stays there.
function follow(draw) {
  const isAtEnd = innerHeight + scrollY > document.documentElement.scrollHeight - FOLLOW_PX;
  draw();
  if (isAtEnd) scrollTo(0, document.documentElement.scrollHeight);
}
