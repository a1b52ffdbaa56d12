"""What a body says of the form of the answer, under the names of OpenAI, vLLM, llama-server, SGLang and TGI. Pure.

One constraint at most: two of them contradict each other, or say the same twice. What a constraint means is found out
where it is compiled (`text.grammar`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..core.errors import InvalidRequest
from ..text.grammar.constraint import Constraint, Kind
from .fields import Fields

_WHITESPACE_CHARS = 1000

_SPACES = re.compile(r"(?:[ \t\n\r]|\\[ntrs]|\[(?:[ \t\n\r]|\\[ntrs])+\]|\(\?:|[()|*+?]|\{\d*,?\d*\})*")
"""Patterns that can match nothing but white space."""

_ANY_SPACE = re.compile(r"\[[^\]]*\]|\\s")

_NOTHING: tuple[Any, ...] = (None, "", False)
"""Values of fields that ask for no constraint."""

_STRUCTURED: dict[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "gbnf",
    "structural_tag": "structural_tag",
}
"""Of vLLM's structured_outputs."""

_GUIDED = ("json", "json_object", "regex", "choice", "grammar")
"""With "guided_" before them, vLLM's older fields."""

_PLAIN: dict[str, Kind] = {
    "grammar": "gbnf",
    "grammar_string": "gbnf",
    "ebnf": "gbnf",
    "json_schema": "json_schema",
    "regex": "regex",
    "structural_tag": "structural_tag",
}
"""Fields of llama-server, SGLang and others."""

_TGI: dict[str, Kind] = {"json": "json_schema", "json_schema": "json_schema", "regex": "regex"}

_UNSUPPORTED = ("grammar_lazy", "grammar_triggers", "preserved_tokens")


def read_constraint(fields: Fields) -> Constraint | None:
    """Raises InvalidRequest naming the field, or both of two."""
    found = [
        *_response_format(fields),
        *_structured_outputs(fields.object("structured_outputs")),
        *_guided(fields),
        *_others(fields),
    ]
    _refuse_two(found)
    return found[0] if found else None


def _refuse_two(found: list[Constraint]) -> None:
    if len(found) > 1:
        one, other = found[:2]
        message = f"{one.param} and {other.param} both say what the answer must be; give one of them."
        raise InvalidRequest(message, param=other.param)


def _response_format(fields: Fields) -> Iterator[Constraint]:
    given = fields.object("response_format")
    if given is None:
        return
    form = Fields(given, "response_format")
    kind = form.text("type")
    if kind == "json_object":
        schema = form.any("schema")  # as llama-server takes it
        yield _constraint("json_object" if schema is None else "json_schema", schema, form.name("schema"))
    elif kind == "json_schema":
        yield _json_schema(form)
    elif kind == "structural_tag":
        if form.any("format") is not None:
            message = "response_format.format is not supported; give structures and triggers."
            raise InvalidRequest(message, param="response_format.format")
        tags = {"structures": form.any("structures"), "triggers": form.any("triggers")}
        yield Constraint("structural_tag", tags, "response_format")
    elif kind == "regex":
        yield Constraint("regex", form.any("pattern"), form.name("pattern"))
    elif kind == "grammar":
        yield Constraint("gbnf", form.any("grammar"), form.name("grammar"))
    elif kind != "text":
        message = "response_format.type must be one of text, json_object, json_schema, structural_tag, regex, grammar."
        raise InvalidRequest(message, param="response_format.type")
    form.refuse_unread()


def _json_schema(form: Fields) -> Constraint:
    """OpenAI's envelope, or the schema beside `type` as llama-server takes it. An answer always fits its schema,
    whatever `strict` says."""
    envelope, bare = form.object("json_schema"), form.any("schema")
    if envelope is None:
        if bare is None:
            message = "response_format.json_schema must be an object with name and schema."
            raise InvalidRequest(message, param="response_format.json_schema")
        return Constraint("json_schema", bare, form.name("schema"))
    inner = Fields(envelope, "response_format.json_schema")
    name = inner.text("name")
    if name is not None and not 0 < len(name) <= 64:
        raise InvalidRequest("response_format.json_schema.name must have 1 to 64 characters.", param=inner.name("name"))
    inner.text("description")
    inner.flag("strict")
    schema = inner.any("schema")
    if schema is None and "schema" not in envelope:
        raise InvalidRequest("response_format.json_schema.schema must be a schema.", param=inner.name("schema"))
    inner.refuse_unread()
    return Constraint("json_schema", schema, inner.name("schema"))


def structured_outputs(given: dict[str, Any]) -> Constraint:
    """Of vLLM's object. Raises InvalidRequest."""
    found = list(_structured_outputs(given))
    _refuse_two(found)
    return found[0]


def _structured_outputs(given: dict[str, Any] | None) -> Iterator[Constraint]:
    if given is None:
        return
    options = Fields(given, "structured_outputs")
    whitespace = _whitespace(options, "whitespace_pattern")
    if options.flag("disable_any_whitespace"):
        if whitespace:
            message = "structured_outputs.disable_any_whitespace and whitespace_pattern contradict each other."
            raise InvalidRequest(message, param="structured_outputs.disable_any_whitespace")
        whitespace = ""
    if options.flag("disable_additional_properties"):
        message = "structured_outputs.disable_additional_properties may only be false; say it in the schema."
        raise InvalidRequest(message, param="structured_outputs.disable_additional_properties")
    for name in ("disable_fallback", "backend", "_backend", "_backend_was_auto"):
        options.any(name)
    num_found = 0
    for name, kind in _STRUCTURED.items():
        value = options.any(name)
        if value not in _NOTHING or (kind == "json_schema" and value is False):
            num_found += 1
            yield _constraint(kind, value, options.name(name), whitespace)
    options.refuse_unread()
    if not num_found:
        message = f"structured_outputs must have one of {', '.join(_STRUCTURED)}."
        raise InvalidRequest(message, param="structured_outputs")


def _guided(fields: Fields) -> Iterator[Constraint]:
    """The fields that vLLM had before."""
    whitespace = _whitespace(fields, "guided_whitespace_pattern")
    fields.any("guided_decoding_backend")
    for name in _GUIDED:
        kind, value = _STRUCTURED[name], fields.any(f"guided_{name}")
        if value not in _NOTHING:
            yield _constraint(kind, value, f"guided_{name}", whitespace)


def _others(fields: Fields) -> Iterator[Constraint]:
    for name in _UNSUPPORTED:
        if fields.any(name) not in (None, False, []):
            raise InvalidRequest(f"{name} is not supported: a grammar holds from the first token on.", param=name)
    for name, kind in _PLAIN.items():
        value = fields.any(name)
        if value in _NOTHING:
            continue
        if name == "grammar" and isinstance(value, dict):
            yield _tgi(Fields(value, "grammar"))
        else:
            yield _constraint(kind, value, name)


def _tgi(grammar: Fields) -> Constraint:
    kind = _TGI.get(grammar.text("type") or "")
    if kind is None:
        raise InvalidRequest(f"grammar.type must be one of {', '.join(_TGI)}.", param="grammar.type")
    value = grammar.any("value")
    if kind == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict) and "name" in value:
        value = value["schema"]
    grammar.refuse_unread()
    return _constraint(kind, value, "grammar.value")


def _constraint(kind: Kind, value: Any, param: str, whitespace: str | None = None) -> Constraint:
    """Schemas, structural tags and lists of choices may also come as JSON text."""
    if kind == "json_object":
        if value not in (None, True):
            raise InvalidRequest(f"{param} must be true or false.", param=param)
        return Constraint(kind, None, param, whitespace)
    wanted = _FROM_TEXT.get(kind)
    if wanted is not None and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not valid JSON: {error}.", param=param) from None
    if wanted is not None and not wanted(value):
        raise InvalidRequest(f"{param} must be {_WANTED[kind]}.", param=param)
    return Constraint(kind, value, param, whitespace)


_FROM_TEXT: dict[Kind, Callable[[Any], bool]] = {
    "json_schema": lambda value: isinstance(value, (dict, bool)),
    "structural_tag": lambda value: isinstance(value, dict),
}
_WANTED = {"json_schema": "a JSON schema", "structural_tag": "an object with structures and triggers"}


def _whitespace(fields: Fields, name: str) -> str | None:
    pattern = fields.text(name)
    if pattern is not None and len(pattern) > _WHITESPACE_CHARS:
        message = f"{fields.name(name)} may have at most {_WHITESPACE_CHARS} characters."
        raise InvalidRequest(message, param=fields.name(name))
    if pattern is not None and not _SPACES.fullmatch(pattern):
        message = f"{fields.name(name)} may match spaces, tabs and line breaks alone: others are no JSON."
        raise InvalidRequest(message, param=fields.name(name))
    if pattern is None:
        return None
    return _ANY_SPACE.sub(lambda found: r"[ \t\n\r]" if r"\s" in found[0] else found[0], pattern)
