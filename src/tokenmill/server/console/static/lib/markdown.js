// Markdown as elements. marked tells its parts; each becomes an element with text nodes here. Nothing is parsed as HTML: tags
// show as they are written. Links lead to web and mail addresses alone; pictures are links, so that a text that a model was
// made to write loads nothing from elsewhere.

import { Lexer } from "../vendor/marked/marked.esm.js";
import { h, show } from "./dom.js";
import { button, copy } from "./ui.js";

const SAFE = /^(https?:\/\/|mailto:)/i;
const CHARACTERS = { amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0" };
// How many of the last parts may still change as text is added.
const NUM_OPEN = 2;

const PARTS = {
  space: () => [],
  def: () => [],
  hr: () => h("hr"),
  br: () => h("br"),
  code: (token) => codeBlock(token.text, token.lang),
  codespan: (token) => h("code", null, token.text),
  // Levels below that of the answer's own heading. All the same one, since answers skip levels.
  heading: (token) => h("h3", { class: `depth${token.depth}` }, parts(token.tokens)),
  paragraph: (token) => h("p", null, parts(token.tokens)),
  blockquote: (token) => h("blockquote", null, parts(token.tokens)),
  list: (token) => h(token.ordered ? "ol" : "ul", token.ordered && token.start !== 1 ? { start: token.start } : null, parts(token.items)),
  list_item: (token) => h("li", token.task ? { class: "task" } : null, parts(token.tokens)),
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
  table: (token) => h("div", { class: "table-wrap", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", null,
    h("thead", null, h("tr", null, token.header.map((cell) => h("th", { scope: "col", class: cell.align }, parts(cell.tokens))))),
    h("tbody", null, token.rows.map((row) => h("tr", null, row.map((cell) => h("td", { class: cell.align }, parts(cell.tokens)))))))),
  strong: (token) => h("strong", null, parts(token.tokens)),
  em: (token) => h("em", null, parts(token.tokens)),
  del: (token) => h("del", null, parts(token.tokens)),
  link: (token) => link(token.href, parts(token.tokens)),
  image: (token) => link(token.href, `Picture: ${characters(token.text) || token.href}`),
  html: (token) => (/^<br\s*\/?>$/i.test(token.text) ? h("br") : token.block ? h("p", null, token.text.trimEnd()) : token.text),
  text: (token) => (token.tokens ? parts(token.tokens) : token.escaped ? token.text : characters(token.text)),
};

function parts(tokens) {
  return tokens.map((token) => PARTS[token.type]?.(token) ?? token.text);
}

function link(href, content) {
  return SAFE.test(href) ? h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, content) : content;
}

// What stands for a character: &lt; and &#60;. Names that are not known stay as they are.
function characters(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,4}));/gi, (whole, decimal, hex, name) => {
    const number = decimal ? Number(decimal) : hex ? Number.parseInt(hex, 16) : null;
    if (number === null) return CHARACTERS[name] ?? whole;
    return number > 0 && number <= 0x10ffff ? String.fromCodePoint(number) : whole;
  });
}

function codeBlock(text, lang) {
  const language = (lang ?? "").split(/\s/)[0];
  return h("div", { class: "code" },
    h("div", { class: "row small" }, h("span", { class: "muted" }, language), h("span", { class: "grow" }), button("Copy", () => copy(text, "Code"), { kind: "small plain" })),
    h("pre", { tabindex: "0", role: "group", "aria-label": `Code ${language}`.trim() }, h("code", null, text)));
}

// A text that grows. What can no longer change is drawn once, so that long answers stay quick and a selection stays put.
// isPlain: it is no Markdown.
export class Markdown {
  constructor({ isPlain = false } = {}) {
    this.read = isPlain ? asWritten : read;
    this.element = h("div", { class: "said markdown" });
    this.text = "";
    this.numRead = this.numDrawn = this.frame = 0;
  }

  // text: all there is so far. It is drawn with the next picture of the screen; `around` calls what draws.
  grow(text, around) {
    this.text = text;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      around(() => this.draw());
    });
  }

  draw() {
    const tokens = this.read(this.text.replace(/\r\n?/g, "\n").slice(this.numRead));
    let num = tokens.length;
    for (let numOpen = 0; num > 0 && numOpen < NUM_OPEN; num--) numOpen += tokens[num - 1].type !== "space";
    const closed = tokens.slice(0, num);
    while (this.element.childNodes.length > this.numDrawn) this.element.lastChild.remove();
    this.element.append(...parts(closed).flat(Infinity));
    this.numDrawn = this.element.childNodes.length;
    this.numRead += closed.reduce((sum, token) => sum + token.raw.length, 0);
    this.element.append(...parts(tokens.slice(num)).flat(Infinity));
  }

  // text: all of it, for good. It is read as a whole, since its end may say where a link at its beginning leads.
  end(text) {
    cancelAnimationFrame(this.frame);
    const whole = h("div", { class: "said markdown" }, parts(this.read(text.replace(/\r\n?/g, "\n"))));
    if (!whole.isEqualNode(this.element)) show(this.element, ...whole.childNodes);
  }
}

// Quotes in quotes by the thousand exhaust the stack: such a text is shown as it is.
function read(text) {
  try {
    return Lexer.lex(text);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return asWritten(text);
  }
}

function asWritten(text) {
  return text ? [{ type: "html", raw: text, text, block: true }] : [];
}
