// The playground's parameters: their controls, and the request body that they give.

import { h, show } from "../lib/dom.js";
import { checkbox, field, select } from "../lib/ui.js";

const NUMBERS = [
  ["max_tokens", "Max tokens", 1, null, 1, true],
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["top_k", "Top k", -1, null, 1, true],
  ["min_p", "Min p", 0, 1, 0.01],
  ["seed", "Seed", 0, null, 1, true],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0.01, 2, 0.05],
];
const FORMS = [["text", "Text"], ["json_object", "Any JSON object"], ["json_schema", "JSON schema"]];
const CHOICES = [["auto", "The model decides"], ["required", "At least one call"], ["none", "No calls"]];
const EXAMPLE_SCHEMA = { type: "object", properties: { city: { type: "string" }, country: { type: "string" } }, required: ["city", "country"] };
const EXAMPLE_TOOLS = [{ type: "function", function: { name: "get_weather", description: "The weather in a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

// A field's text is not what it has to be. The field says so itself.
export class BadField extends Error {}

export class Settings {
  // compared(): another model to compare with was chosen, or none.
  constructor(compared) {
    this.model = field("Model", h("select"));
    this.other = field("Compare with", h("select", { onchange: compared }), "The same is said to both, side by side.");
    this.other.element.hidden = true;
    this.system = field("System message", h("textarea", { rows: "3" }));
    this.numbers = NUMBERS.map(([name, label, min, max, step, isWhole]) => ({
      name, min, max, isWhole, ...field(label, h("input", { type: "text", inputmode: isWhole ? "numeric" : "decimal", placeholder: "default", autocomplete: "off" })),
    }));
    this.stop = field("Stop texts", h("textarea", { rows: "2", class: "code" }), "One a line.");
    this.logprobs = checkbox("Probabilities of tokens", false);
    this.schema = field("Schema", h("textarea", { rows: "8", class: "code", spellcheck: "false", value: pretty(EXAMPLE_SCHEMA) }));
    this.schema.element.hidden = true;
    this.form = field("Answer", select(FORMS, "text", () => { this.schema.element.hidden = this.form.control.value !== "json_schema"; }));
    this.tools = field("Tools", h("textarea", { rows: "4", class: "code", spellcheck: "false", placeholder: "[]" }), "An array of functions, as in OpenAI's API.");
    this.choice = field("Calls", select(CHOICES, "auto"));
    this.further = field("Further fields", h("textarea", { rows: "3", class: "code", spellcheck: "false", placeholder: "{}" }), "A JSON object, added to the request.");
    this.element = this.draw();
  }

  draw() {
    const example = h("button", { type: "button", class: "small", onclick: () => { this.tools.control.value = pretty(EXAMPLE_TOOLS); } }, "Fill in an example");
    return h("div", { class: "stack settings" },
      this.model.element,
      this.other.element,
      this.system.element,
      h("div", { class: "fields" }, this.numbers.slice(0, 6).map((each) => each.element)),
      this.logprobs.element,
      this.form.element,
      this.schema.element,
      h("details", null, h("summary", null, "Tools"), h("div", { class: "stack" }, this.tools.element, example, this.choice.element)),
      h("details", null, h("summary", null, "More parameters"),
        h("div", { class: "stack" }, h("div", { class: "fields" }, this.numbers.slice(6).map((each) => each.element)), this.stop.element, this.further.element)));
  }

  // cards: of /v1/models. What was chosen stays chosen, if it is still there.
  setModels(cards) {
    const options = (chosen) => cards.map(({ id, owned_by }) => h("option", { value: id, selected: id === chosen, "data-owner": owned_by }, id));
    const [model, other] = [this.model, this.other].map(({ control }) => control.value);
    show(this.model.control, options(model));
    show(this.other.control, h("option", { value: "" }, "None"), options(other));
    this.other.element.hidden = cards.length < 2;
    this.model.error("");
  }

  // The request that continues `messages`, for the model of that field. Raises BadField.
  body(messages, model) {
    const system = this.system.control.value;
    const body = { model: model.control.value, messages: system ? [{ role: "system", content: system }, ...messages] : messages, stream: true, stream_options: { include_usage: true } };
    // So that an answer that is stopped has its counts. Servers of others may refuse a field that they do not know.
    if (model.control.selectedOptions[0]?.dataset.owner === "tokenmill") body.stream_options.continuous_usage_stats = true;
    for (const number of this.numbers) {
      const value = read(number, (text) => numberOf(text, number));
      if (value !== undefined) body[number.name] = value;
    }
    const stop = this.stop.control.value.split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    if (this.logprobs.control.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    const form = this.form.control.value;
    if (form === "json_object") body.response_format = { type: form };
    if (form === "json_schema") body.response_format = { type: form, json_schema: { name: "answer", strict: true, schema: read(this.schema, objectOf) ?? {} } };
    const tools = read(this.tools, arrayOf);
    if (tools?.length) Object.assign(body, { tools, tool_choice: this.choice.control.value });
    return Object.assign(body, read(this.further, objectOf));
  }

  // Sets all fields as they were for these requests; of a second one the model alone. Returns the models that are not here.
  take([body, second]) {
    const { model, messages, stream, stream_options, stop, logprobs, top_logprobs, response_format: form, tools, tool_choice: choice, ...rest } = body;
    const missing = [[this.model, model], [this.other, second?.model ?? ""]].filter(([field, name]) => !choose(field, name));
    this.system.control.value = messages[0]?.role === "system" ? textOf(messages[0].content) : "";
    for (const { name, control } of this.numbers) {
      control.value = rest[name] ?? "";
      delete rest[name];
    }
    this.stop.control.value = [stop ?? []].flat().join("\n");
    this.logprobs.control.checked = Boolean(logprobs);
    const hasForm = FORMS.some(([name]) => name === form?.type), hasChoice = CHOICES.some(([name]) => name === choice);
    // What the controls cannot say stays as a further field.
    Object.assign(rest, form && !hasForm && { response_format: form }, choice && !hasChoice && { tool_choice: choice });
    this.form.control.value = hasForm ? form.type : "text";
    this.form.control.dispatchEvent(new Event("change"));
    if (form?.json_schema) this.schema.control.value = pretty(form.json_schema.schema ?? {});
    this.tools.control.value = tools ? pretty(tools) : "";
    this.choice.control.value = hasChoice ? choice : "auto";
    this.further.control.value = Object.keys(rest).length ? pretty(rest) : "";
    return missing.map(([, name]) => name);
  }
}

// False where there is no such model.
function choose({ control }, name) {
  const isThere = name === undefined || [...control.options].some((option) => option.value === name);
  if (isThere && name !== undefined) control.value = name;
  return isThere;
}

// Of a message's content, which may be a list of parts.
export function textOf(content) {
  return typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? `[${part.type}]`).join("\n");
}

// Of a field that is not empty. A bad one is marked, shown and given the focus.
function read(field, parse) {
  field.error("");
  const text = field.control.value.trim();
  if (!text) return undefined;
  try {
    return parse(text);
  } catch (error) {
    field.error(error.message);
    const hidden = field.control.closest("details");
    if (hidden) hidden.open = true;
    field.control.focus();
    throw new BadField(error.message);
  }
}

function numberOf(text, { min, max, isWhole }) {
  const value = Number(text);
  const isGood = (isWhole ? Number.isInteger(value) : Number.isFinite(value)) && value >= min && (max === null || value <= max);
  if (!isGood) throw new Error(`Must be ${isWhole ? "a whole number" : "a number"} ${max === null ? `of at least ${min}` : `from ${min} to ${max}`}.`);
  return value;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Not JSON: ${error.message}`);
  }
}

function objectOf(text) {
  const value = parsed(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("Must be a JSON object.");
  return value;
}

function arrayOf(text) {
  const value = parsed(text);
  if (!Array.isArray(value)) throw new Error("Must be a JSON array.");
  return value;
}

export function pretty(value) {
  return JSON.stringify(value, null, 2);
}
