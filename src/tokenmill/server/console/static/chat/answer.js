// One answer as it comes: what a stream of chat chunks adds up to. Knows nothing of how it is shown.

import { events, open } from "../lib/api.js";

export class Answer {
  constructor(body) {
    this.body = body;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.tokens = [];
    this.finish = "";
    this.usage = null;
    this.error = null;
    this.raw = [];
    this.numEvents = 0;
    this.startMs = this.firstMs = this.lastMs = 0;
    this.abort = new AbortController();
  }

  // Sends the request and takes the stream in; `changed({content, reasoning})` hears of what is new. Never raises.
  async run(path, changed) {
    this.startMs = performance.now();
    try {
      const response = await open(path, { method: "POST", body: this.body, signal: this.abort.signal });
      for await (const data of events(response, (text) => this.raw.push(text))) {
        if (data !== "[DONE]") changed(this.take(JSON.parse(data)));
      }
      if (!this.finish) throw new Error("The answer ended before it was complete.");
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      else {
        this.error = error;
        if (error.status) this.raw.push(`${error.status} ${error.message}`);
      }
    }
    this.lastMs = performance.now();
  }

  stop() {
    this.abort.abort();
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const added = { content: "", reasoning: "", tokens: [] };
    const choice = chunk.choices?.[0];
    if (!choice) return added;
    const delta = choice.delta ?? {};
    added.content = delta.content ?? "";
    added.reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    added.tokens = choice.logprobs?.content ?? [];
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
    if (added.content || added.reasoning || delta.tool_calls?.length || added.tokens.length) this.firstMs ||= performance.now();
    this.content += added.content;
    this.reasoning += added.reasoning;
    this.tokens.push(...added.tokens);
    this.finish = choice.finish_reason ?? this.finish;
    return added;
  }

  takeCall(part) {
    const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }

  // As a message of the conversation that goes on.
  message() {
    const message = { role: "assistant", content: this.content || (this.calls.length ? null : "") };
    if (this.calls.length) {
      message.tool_calls = this.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    return message;
  }
}
