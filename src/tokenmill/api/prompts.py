"""Prompts as bodies give them: texts, token ids, and both in one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidRequest
from .fields import Fields, check_integer, kind_name

MAX_PROMPTS = 1024

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixed:
    """A prompt of token ids and texts, as llama-server takes it."""

    parts: tuple[int | str, ...]

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]


def parse_prompts(fields: Fields, vocab_size: int) -> tuple[Prompt, ...]:
    """`prompt`: a string, an array of strings, of token ids, or of arrays of token ids."""
    value = fields.any("prompt")
    shapes = "a string, an array of strings, an array of token ids or an array of arrays of token ids"
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        got = "an empty array" if value == [] else kind_name(value)
        raise InvalidRequest(f"prompt must be {shapes}, got {got}.", param="prompt")
    kinds = set(map(type, value))
    if kinds == {str}:
        prompts: tuple[Prompt, ...] = tuple(value)
    elif kinds == {list}:
        prompts = tuple(token_ids("prompt", item, vocab_size) for item in value)
    elif kinds & {str, list}:
        raise InvalidRequest(f"prompt must be {shapes}, got a mixture.", param="prompt")
    else:
        prompts = (token_ids("prompt", value, vocab_size),)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompts)}.", param="prompt")
    return prompts


def token_ids(name: str, value: list[Any], vocab_size: int) -> tuple[int, ...]:
    """At least one id in [0, vocab_size)."""
    if not value:
        raise InvalidRequest(f"{name} must hold at least one token.", param=name)
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab_size:
        return tuple(value)
    return tuple(check_integer(name, token, 0, vocab_size - 1) for token in value)  # to name the one at fault
