"""The sampling that a request gets which names none, and why.

In this order: what the user sets, what the model's own files say, what is known of the model by the name in its
metadata, and where a GGUF file says nothing, what llama.cpp does. The bytes decide, never the name a model was asked
for by: an alias and its file answer alike.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError, InvalidRequest
from ..core.sampling import SETTINGS, SamplingParams
from ..formats.checkpoint import Checkpoint
from ..text.calls import default_max_tokens
from ..text.generation_config import recommended

LLAMA_CPP: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's own defaults, which those who choose GGUF files expect."""

_CARDS: Mapping[str, Mapping[str, Any]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
"""By general.basename of GGUF files of chat models: what the model card recommends and the files do not carry."""

_SETTINGS = (*SETTINGS, "max_tokens")
_OTHER_NAMES = {"max_new_tokens": "max_tokens", "temp": "temperature", "repeat_penalty": "repetition_penalty"}


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """defaults: of SamplingParams fields. notes: what the model recommends and is not done, a sentence each."""

    defaults: dict[str, Any]
    reason: str
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """For the start-up print."""
        acting = {name: value for name, value in self.defaults.items() if name != "max_tokens"}
        settings = ", ".join(f"{name} {_shown(value)}" for name, value in acting.items())
        return f"{settings or 'temperature 1'} where a request names none ({self.reason})"

    def describe_bound(self) -> str:
        """The same of the length of answers."""
        most = default_max_tokens(self.defaults, None)
        shown = "what is left of the context" if most is None else f"{most:,} tokens, or what is left of the context,"
        return f"{shown} where a chat names no max_tokens (-n sets it, -1: no bound)"


def choose_sampling(
    checkpoint: Checkpoint, generation_config: str, override: Mapping[str, Any] | None = None
) -> SamplingChoice:
    """generation_config: 'auto' follows the model, 'vllm' does not; the override comes before all else. Raises
    ConfigError for an unknown name or a bad value in it, and BadCheckpoint. max_tokens None: nothing bounds it, which
    an override says by -1."""
    given = _checked(override or {})
    follows = generation_config != "vllm"
    defaults, reason, notes = _follow(checkpoint) if follows else ({}, "the API's default", ())
    if given:
        reason = f"{', '.join(given)} as asked" if given.keys() >= defaults.keys() else f"as asked, else {reason}"
    return SamplingChoice({**defaults, **_settled(given)}, reason, notes)


def _settled(given: Mapping[str, Any]) -> dict[str, Any]:
    """-1 is llama-server's word for no bound."""
    return {name: None if (name, value) == ("max_tokens", -1) else value for name, value in given.items()}


def _follow(checkpoint: Checkpoint) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """The model's defaults, where they come from, and what of them cannot be followed."""
    found = recommended(checkpoint)
    if checkpoint.kind != "gguf":
        return found.defaults, "recommended for the model" if found.defaults else "the API's default", found.notes
    metadata = checkpoint.metadata
    basename = str(metadata.get("general.basename", "")).lower()
    card = _CARDS.get(basename) if "tokenizer.chat_template" in metadata else None
    base = LLAMA_CPP if card is None else card
    defaults = {name: value for name, value in base.items() if name not in found.off} | found.defaults
    if card is not None:
        reason = f"recommended for {metadata.get('general.basename')}"
    elif not (found.defaults or found.off):
        reason = "llama.cpp's defaults, as the file recommends nothing; --generation-config vllm for temperature 1"
    elif base.keys() <= found.defaults.keys() | found.off.keys():
        reason = "recommended in the model's file"
    else:
        reason = "recommended in the model's file, the rest llama.cpp's defaults"
    return defaults, reason, found.notes


def read_override(text: str) -> dict[str, Any]:
    """The settings in a JSON object. Raises ConfigError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f'--override-generation-config must be an object such as {{"temperature": 0.7}}, got {text[:100]!r}.',
            param="override_generation_config",
        )
    return _checked(value)


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, tuple)) else f"{value:g}"


def _checked(override: Mapping[str, Any]) -> dict[str, Any]:
    given = {}
    for key, value in override.items():
        name = _OTHER_NAMES.get(key, key)
        if name not in _SETTINGS:
            near = difflib.get_close_matches(str(key), _SETTINGS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_SETTINGS)}."
            raise ConfigError(
                f"override_generation_config cannot set {key!r}; {hint}", param="override_generation_config"
            )
        if value is not None:
            given[name] = value
    try:
        SamplingParams(**_settled(given))
    except InvalidRequest as error:
        raise ConfigError(f"override_generation_config: {error.message}", param="override_generation_config") from None
    return given
