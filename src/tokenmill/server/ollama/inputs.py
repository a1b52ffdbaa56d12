"""Bodies of /api/embed, and of /api/embeddings, which is older, as validated calls. Pure."""

from __future__ import annotations

from typing import Any

from ...core.errors import InvalidRequest
from ..fields import Fields, kind_name
from ..openai import Rules
from ..other_fields import Ignored, Table, check
from ..pooling import MAX_INPUTS, PoolingCall
from .options import read_options

OLDER: Table = {"keep_alive": Ignored("the model stays loaded")}
EMBED: Table = OLDER


def parse_embed(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    """Vectors of length 1; texts that are too long are cut unless `truncate` is false."""
    fields = Fields(body)
    check(fields, EMBED)
    value = fields.any("input")
    texts = value if isinstance(value, list) else [] if value in (None, "") else [value]
    if not all(isinstance(text, str) for text in texts):
        odd = next(text for text in texts if not isinstance(text, str))
        raise InvalidRequest(f"input must be a string or an array of strings, got {kind_name(odd)}.", param="input")
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"input may hold at most {MAX_INPUTS} texts, got {len(texts)}.", param="input")
    cuts = fields.flag("truncate")
    call = PoolingCall(
        model=fields.required_text("model"),
        inputs=tuple(texts),
        activate=True,
        dimensions=fields.integer("dimensions", 1, 2**31 - 1) or 0,
        truncate_to=None if cuts is False else -1,
    )
    return call, _unknown_options(fields)


def parse_embeddings(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    """One vector, as the model gives it."""
    fields = Fields(body)
    check(fields, OLDER)
    prompt = fields.text("prompt")
    inputs = (prompt,) if prompt else ()
    call = PoolingCall(model=fields.required_text("model"), inputs=inputs, names=("prompt", ""), activate=False)
    return call, _unknown_options(fields)


def _unknown_options(fields: Fields) -> list[str]:
    _, unknown = read_options(fields.object("options") or {})
    return unknown + fields.unread()
