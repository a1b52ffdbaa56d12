"""Structural tags as Lark: free text in which what a trigger begins must go on as one of the structures does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ...core.errors import InvalidRequest
from .schema import prepare

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
