"""Whether two engines give equal answers to equal requests, so that it does not matter which one serves. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.events import Ready

_FACTS = (
    ("numerics_id", "It computes otherwise: weights, --quantization, --kv-cache-dtype or kernels differ"),
    ("draw_version", "It draws tokens in another way"),
    ("vocab_size", "Its vocabulary is another"),
    ("max_model_len", "Its --max-model-len is another"),
    ("pooling", "Its --pooling is another"),
)


def unlike(ready: Ready, other: Ready | None) -> str:
    """Why an engine would not give the answers of another; "": it would, or there is no other."""
    if other is not None:
        for name, text in _FACTS:
            mine, theirs = getattr(ready, name), getattr(other, name)
            if mine != theirs:
                return f"{text} ({name} {mine}, not {theirs})."
    return ""


def unasked(ready: Ready, asked: Iterable[tuple[str, str]]) -> str:
    """Why an engine would not give the answers that these settings ask for; "": it would."""
    settings = dict(ready.settings)
    for name, value in asked:
        if settings.get(name) != value:
            flag = f"--{name.replace('_', '-')}"
            return f"Its {flag} is {settings.get(name, 'not told')}; the front end was given {value}."
    return ""
