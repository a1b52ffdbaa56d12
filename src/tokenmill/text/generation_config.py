"""What a checkpoint recommends for sampling: generation_config.json of a folder, general.sampling.* of a GGUF file.

GGUF keys are llama.cpp's. `general.sampling.sequence` lists the samplers that run: what it leaves out is off. What
cannot be followed here is not dropped in silence: it comes back as notes, to be printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint

_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.xtc_probability": "xtc_probability",
    "general.sampling.xtc_threshold": "xtc_threshold",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_INTEGERS = {"top_k", "max_tokens"}

NOT_FOLLOWED: Mapping[str, tuple[float, ...]] = {
    "general.sampling.mirostat": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "encoder_repetition_penalty": (1,),
}
"""Recommendations that have no counterpart here, with the values that ask for nothing."""

_SAMPLERS = {
    "temperature": ("temperature", 1.0),
    "temp": ("temperature", 1.0),
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1.0),
    "nucleus": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "xtc": ("xtc_probability", 0.0),
    "penalties": ("repetition_penalty", 1.0),
}
"""Of a GGUF sequence: the setting that each sampler reads, and the value that turns it off."""


@dataclass(frozen=True, slots=True)
class Recommended:
    """defaults: of SamplingParams fields. off: settings that the model's makers turn off, with the value that does it.
    notes: what could not be followed, a sentence each."""

    defaults: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def recommended(checkpoint: Checkpoint) -> Recommended:
    """Raises BadCheckpoint for a value that is no number."""
    if checkpoint.kind == "gguf":
        return _from_gguf(checkpoint.metadata)
    config = checkpoint.generation_config
    return Recommended(_numbers(config, _GENERATION_CONFIG), notes=tuple(_not_followed(config)))


def _from_gguf(metadata: Mapping[str, Any]) -> Recommended:
    defaults, notes = _numbers(metadata, _GGUF), list(_not_followed(metadata))
    last_n = metadata.get("general.sampling.penalty_last_n")
    if defaults.get("repetition_penalty", 1.0) != 1 and last_n not in (None, -1):
        notes.append("general.sampling.penalty_last_n is not followed: penalties cover the whole sequence.")
    sequence = metadata.get("general.sampling.sequence")
    if not isinstance(sequence, str) or not sequence.strip(" ;"):
        return Recommended(defaults, notes=tuple(notes))
    named = [name.strip().lower().replace("-", "_") for name in sequence.split(";")]
    order = [_SAMPLERS[name][0] for name in named if name in _SAMPLERS]
    off = {setting: neutral for setting, neutral in _SAMPLERS.values() if setting not in order}
    defaults = {name: value for name, value in defaults.items() if name not in off}
    if defaults.get("temperature", 1.0) not in (0, 1) and any(
        order.index(name) < order.index("temperature")
        for name in ("top_p", "min_p", "xtc_probability")
        if name in order
    ):
        notes.append(
            "the order of general.sampling.sequence is not followed: temperature comes before top_p, min_p and XTC."
        )
    return Recommended(defaults, off, tuple(notes))


def _not_followed(source: Mapping[str, Any]) -> Iterator[str]:
    for key, neutral in NOT_FOLLOWED.items():
        value = source.get(key)
        if value is not None and value not in neutral:
            yield f"{key} is {value} in the model's files and is not followed: there is no such sampler here."


def _numbers(source: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    defaults = {}
    for key, name in names.items():
        value = source.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise BadCheckpoint(f"The checkpoint's sampling default {key} must be a number, got {value!r}.")
        defaults[name] = int(value) if name in _INTEGERS else float(value)
    return defaults
