"""The sampling that a request gets which names none: what the model recommends, or the API's own defaults.

A folder recommends it in generation_config.json and a GGUF file in its metadata. For an alias whose file says nothing,
the table of aliases may.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import ConfigError
from ..formats.hub import ResolvedModel
from ..text.load import TextModel
from .resolve import GENERATION_CONFIGS


def choose_sampling(text: TextModel, model: ResolvedModel, generation_config: str) -> TextModel:
    """`text` with its defaults settled. Raises ConfigError for an unknown `generation_config`."""
    if generation_config not in GENERATION_CONFIGS:
        known = " or ".join(GENERATION_CONFIGS)
        raise ConfigError(f"generation_config must be {known}, got {generation_config!r}.", param="generation_config")
    defaults = {**model.sampling, **text.sampling_defaults} if generation_config == "auto" else {}
    return replace(text, sampling_defaults=defaults)


def describe_sampling(text: TextModel) -> str:
    """For the start-up print, with the reason."""
    settings = ", ".join(f"{name} {value:g}" for name, value in text.sampling_defaults.items())
    if not settings:
        return "temperature 1 (the API's default)"
    return f"{settings} where a request names none (recommended for the model)"
