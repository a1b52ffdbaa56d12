"""A constraint made into a grammar of llguidance: JSON text that says what an answer may be, token by token.

What the grammar would not enforce is refused here by name, so that an answer that ends by itself always fits what its
caller asked for. Whether the grammar compiles within its limits is found out by who compiles it. A structural tag
becomes Lark: free text in which what a trigger begins must go on as one of the structures does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...core.errors import InvalidRequest
from ..tokenizer import Tokenizer
from ..tools.call_grammar import calls_to_lark, text_grammars
from .constraint import Constraint, Thinking
from .gbnf import is_gbnf, to_lark
from .in_json import lark_in_json, regex_in_json
from .patterns import CannotMend, plain_sets
from .schema import prepare

MAX_CHARS = 1 << 18
"""Of a grammar or pattern."""

MAX_CHOICES = 10_000

WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
"""What may stand between the tokens of JSON: written on one line, or indented. Bounded, because small models can go on
with spaces for as long as they are let."""

ESCAPES = 'nrbtf\\"'
"""What may follow a backslash. Without "u" a property cannot come again under another spelling of its name."""


def to_grammar(constraint: Constraint, tokenizer: Tokenizer | None = None) -> str:
    """The grammar of `constraint`, as JSON text.

    tokenizer  of the model, for markers that are tokens; None: all markers are text

    Raises InvalidRequest naming the field, and the keyword or place at fault.
    """
    grammars = _answer(constraint, tokenizer)
    thinking = constraint.thinking
    if thinking is not None:
        grammars = [{"lark_grammar": _think(thinking, tokenizer, constraint.param)}, *_named(grammars)]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _answer(constraint: Constraint, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    kind, value, param = constraint.kind, constraint.value, constraint.param
    if kind == "json_object":
        return [{"json_schema": _spaced({"type": "object"}, constraint)}]
    if kind == "json_schema":
        return [{"json_schema": _spaced(prepare(value, param), constraint)}]
    if kind == "structural_tag":
        spell = _speller(tokenizer)
        return [{"lark_grammar": tags_to_lark(value, param, spell, lambda schema: _spaced(schema, constraint))}]
    if kind == "tools":
        return [{"lark_grammar": _calls(constraint, tokenizer)}, *_texts(constraint)]
    if kind == "choice":
        return [{"lark_grammar": _choice(value, param)}]
    text = _text(value, param)
    if kind == "regex":
        return [{"lark_grammar": f"start: ANSWER\nANSWER: {quote_regex(text)}\n"}]
    if kind == "gbnf" and is_gbnf(text):
        text = to_lark(text, param)
    return [{"lark_grammar": text}]


def _calls(constraint: Constraint, tokenizer: Tokenizer | None) -> str:
    def finish(schema: Any, place: str) -> str:
        return "%json " + json.dumps(_spaced(prepare(schema, place), constraint), ensure_ascii=False)

    return calls_to_lark(constraint.value, _speller(tokenizer), finish)


def _texts(constraint: Constraint) -> list[dict[str, Any]]:
    """The grammars of texts that tools take, as they stand in the arguments of calls."""
    found = []
    for name, syntax, definition, place in text_grammars(constraint.value):
        _text(definition, place)
        try:
            grammar = regex_in_json(definition) if syntax == "regex" else lark_in_json(definition)
        except CannotMend as error:
            message = f"{place} has what cannot be enforced within the arguments of a call: {error}."
            raise InvalidRequest(message, param=place) from None
        found.append({"name": name, "lark_grammar": grammar})
    return found


def _speller(tokenizer: Tokenizer | None) -> Callable[[str], str]:
    marks = [] if tokenizer is None else [text for text in tokenizer.special_texts() if text]
    return lambda text: _spelled(text, marks, tokenizer)


def _spelled(text: str, marks: Sequence[str], tokenizer: Tokenizer | None) -> str:
    """Text as Lark, special tokens within it by their ids."""
    found = [mark for mark in marks if mark in text]
    if not found:
        return quote(text) if text else ""
    longest_first = "|".join(re.escape(mark) for mark in sorted(found, key=len, reverse=True))
    pieces = re.split(f"({longest_first})", text)
    return " ".join(_marker(piece, tokenizer) if piece in found else quote(piece) for piece in pieces if piece)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a string that is not empty.", param=param)
    if len(value) > MAX_CHARS:
        message = f"{param} has {len(value)} characters; at most {MAX_CHARS} are taken."
        raise InvalidRequest(message, param=param)
    return value


def _choice(value: Any, param: str) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise InvalidRequest(f"{param} must be an array of at least one string.", param=param)
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_CHARS:
        raise InvalidRequest(
            f"{param} may hold at most {MAX_CHOICES} texts of {MAX_CHARS} characters together.", param=param
        )
    return "start: ANSWER\nANSWER: " + " | ".join(map(quote, dict.fromkeys(value))) + "\n"


def _spaced(schema: Any, constraint: Constraint) -> dict[str, Any]:
    """The schema with what the library is to know of spaces. An empty pattern: none are allowed."""
    pattern = WHITESPACE if constraint.whitespace is None else constraint.whitespace
    options: dict[str, Any] = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    options["json_allowed_escapes"] = ESCAPES
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {"x-guidance": options, **schema}


def _named(grammars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": "answer", **grammars[0]}, *grammars[1:]]


def _think(thinking: Thinking, tokenizer: Tokenizer | None, param: str) -> str:
    """Lark of reasoning and the answer after it. With a budget, tokens are counted one by one, and the marker that ends
    reasoning must then be a token itself."""
    spell = _speller(tokenizer)
    begin = [] if thinking.is_open or not thinking.begin else [spell(thinking.begin), "SPACE"]
    after = spell(thinking.after) if thinking.after else "SPACE"
    end = None if tokenizer is None else tokenizer.token_id(thinking.end)
    space = "SPACE: /\\s{0,8}/\n"
    if thinking.budget is not None:
        if end is None:
            message = "A budget for reasoning needs a model that ends reasoning with a token of its own."
            raise InvalidRequest(message, param=param)
        assert tokenizer is not None
        kept_out = ",".join(_ranges({*tokenizer.special_ids(), end}))
        rule = f"think: <[^{kept_out}]>{{0,{thinking.budget}}}\n" if thinking.budget else 'think: ""\n'
        parts = [*begin, "think", f"<[{end}]>", after]
    elif end is not None and tokenizer is not None and tokenizer.is_special(end):
        rule = "think: /(?s:.*)/\n"
        parts = [*begin, "think", f"<[{end}]>", after]
    else:
        rule = f"think[suffix={quote(thinking.end)}]: /(?s:.*)/\n"
        parts = [*begin, "think", after]
    thought = " ".join(parts)
    thought = f"({thought})?" if thinking.may_skip and begin else thought
    return f"start: {thought} {spell(thinking.lead)} @answer\n{rule}{space}"


def _marker(text: str, tokenizer: Tokenizer | None) -> str:
    token = None if tokenizer is None else tokenizer.token_id(text)
    return quote(text) if token is None or tokenizer is None or not tokenizer.is_special(token) else f"<[{token}]>"


def _ranges(ids: set[int]) -> list[str]:
    """Runs of consecutive ids as `first-last`."""
    runs: list[list[int]] = []
    for token in sorted(ids):
        if runs and runs[-1][1] == token - 1:
            runs[-1][1] = token
        else:
            runs.append([token, token])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def quote(text: str) -> str:
    """A string of Lark that matches `text` alone."""
    return '"' + "".join(map(_spell, text)) + '"'


def quote_regex(pattern: str) -> str:
    """A regular expression of Lark that matches as `pattern` does. Digits and letters of \\d and \\w are ASCII ones:
    nobody who asks for a number wants it in another script."""
    return "/" + _OUTSIDE.sub(_respell, plain_sets(pattern)) + "/"


def _respell(found: re.Match[str]) -> str:
    text = found[0]
    return _ASCII.get(text) or {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(text, text)


_OUTSIDE = re.compile(r"\\.|/|\n", re.DOTALL)
_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[a-zA-Z0-9_]", r"\W": "[^a-zA-Z0-9_]"}
"""Sets, which may stand within other sets."""


def _spell(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\x{ord(char):02x}" if ord(char) < 32 or ord(char) == 127 else char


MAX_STRUCTURES = 256


def tags_to_lark(value: Any, param: str, spell: Callable[[str], str], finish: Callable[[Any], dict[str, Any]]) -> str:
    """`value`: {"structures": [{"begin", "schema", "end"}], "triggers": [text, ...]}.

    spell   text as Lark, with special tokens in it by their ids
    finish  a schema with what the library is to be told beside it

    Raises InvalidRequest.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object with structures and triggers.", param=param)
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not 1 <= len(structures) <= MAX_STRUCTURES:
        raise InvalidRequest(f"{param}.structures must be an array of 1 to {MAX_STRUCTURES} structures.", param=param)
    if not isinstance(triggers, list) or not all(isinstance(text, str) and text for text in triggers) or not triggers:
        raise InvalidRequest(f"{param}.triggers must be an array of strings that are not empty.", param=param)
    idle = set(triggers)
    rules = []
    for number, structure in enumerate(structures):
        where = f"{param}.structures[{number}]"
        begin, end, schema = _read(structure, where, param)
        found = [text for text in triggers if begin.startswith(text)]
        if not found:
            raise InvalidRequest(f"{where}.begin must begin with one of the triggers.", param=param)
        idle.difference_update(found)
        trigger = min(found, key=len)  # of several, this one comes up first in a text
        grammar = json.dumps(finish(prepare(schema, f"{where}.schema")), ensure_ascii=False)
        mark = spell(trigger)
        lazy = "" if "<[" in mark else "[lazy]"  # text never runs over a special token
        rules.append(f"tag{number}_head{lazy}: TEXT {mark}")
        rules.append(f"tag{number}: tag{number}_head {spell(begin[len(trigger) :])} %json {grammar} {spell(end)}")
    if idle:
        message = f"{param}.triggers: no structure begins with {min(idle)[:100]!r}, so nothing could come after it."
        raise InvalidRequest(message, param=param)
    tags = " | ".join(f"tag{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({tags})* rest", "rest: TEXT", "TEXT: /(?s:.*)/", *rules, ""])


def _read(structure: Any, where: str, param: str) -> tuple[str, str, Any]:
    if not isinstance(structure, dict):
        raise InvalidRequest(f"{where} must be an object.", param=param)
    if unknown := sorted(structure.keys() - {"begin", "schema", "end"}):
        raise InvalidRequest(f"{where}.{unknown[0][:100]} is not known here; leave it out.", param=param)
    begin, end = structure.get("begin"), structure.get("end", "")
    if not isinstance(begin, str) or not begin:
        raise InvalidRequest(f"{where}.begin must be a string that is not empty.", param=param)
    if not isinstance(end, str):
        raise InvalidRequest(f"{where}.end must be a string.", param=param)
    return begin, end, structure.get("schema", True)
