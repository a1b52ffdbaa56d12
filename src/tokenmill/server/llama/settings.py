"""Sampling settings under llama-server's names, as its answers and /props repeat them. Pure."""

from __future__ import annotations

from typing import Any

from ...core.sampling import SAMPLERS, SETTINGS, SamplingParams

RANDOM_SEED = 2**32 - 1
"""llama-server's word for a seed that nobody gave."""

_NAMES = {"repetition_penalty": "repeat_penalty"}


def settings(sampling: SamplingParams, *, seed: int | None, max_tokens: int | None) -> dict[str, Any]:
    return {
        "n_predict": -1 if max_tokens is None else max_tokens,
        "seed": RANDOM_SEED if seed is None else seed,
        **{_NAMES.get(name, name): _told(getattr(sampling, name)) for name in SETTINGS},
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": max(0, sampling.top_k),
        "top_n_sigma": sampling.top_n_sigma or -1.0,
        "repeat_last_n": -1,
        "mirostat": 0,
        "stop": list(sampling.stop),
        "max_tokens": -1 if max_tokens is None else max_tokens,
        "n_keep": -1,
        "n_discard": 0,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [list(pair) for pair in sampling.logit_bias],
        "n_probs": sampling.logprobs or 0,
        "min_keep": 0,
        "samplers": list(SAMPLERS),
    }


def _told(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
