"""Ollama's `options`: which settings they are here, which are refused, and which change no answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidRequest
from ..fields import Fields, check_integer
from ..other_fields import Ignored, Refused, Table, check

READ: Mapping[str, str] = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Options that are read, and what OpenAI's bodies (with extra fields) call them."""

_LOADING = Ignored("it is settled when the server starts")
_NEVER_CUT = Ignored("a prompt is never cut: one that is too long is refused")

OTHERS: Table = {
    "num_ctx": Ignored("the context is settled when the server starts; /api/show tells it"),
    "num_keep": _NEVER_CUT,
    "mirostat": Refused((0,)),
    "mirostat_tau": Ignored("it belongs to a sampler that is refused"),
    "mirostat_eta": Ignored("it belongs to a sampler that is refused"),
    "tfs_z": Refused((1,)),
    "penalize_newline": Ignored("Ollama has dropped it too"),
    "num_batch": _LOADING,
    "num_gpu": _LOADING,
    "main_gpu": _LOADING,
    "num_thread": _LOADING,
    "numa": _LOADING,
    "low_vram": _LOADING,
    "f16_kv": _LOADING,
    "logits_all": _LOADING,
    "vocab_only": _LOADING,
    "use_mmap": _LOADING,
    "use_mlock": _LOADING,
    "embedding_only": _LOADING,
}
_NAMES = (*READ, *OTHERS)


def read_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the settings under OpenAI's names, unknown options). Raises InvalidRequest naming the option; also for one that
    is nearly a known one's name."""
    fields = Fields(dict(options), "options")
    try:
        check(fields, OTHERS)
    except InvalidRequest as error:
        raise InvalidRequest(f"options.{error.message}", param=f"options.{error.param}") from None
    fields.integer("num_ctx", 1, 2**31 - 1)
    found = {name: fields.any(option) for option, name in READ.items() if fields.any(option) is not None}
    if "max_tokens" in found and check_integer("options.num_predict", found["max_tokens"], -2, 2**31 - 1) < 1:
        del found["max_tokens"]
    if found.get("seed") == -1:
        del found["seed"]
    return found, [f"options.{name}" for name in fields.unread()]


def refuse_misplaced(names: list[str]) -> None:
    """Raises InvalidRequest for an option that stands beside `options`, where Ollama would overlook it."""
    for name in names:
        if name in _NAMES:
            raise InvalidRequest(f"{name} is to be given as options.{name}.", param=name)
