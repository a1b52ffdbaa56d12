"""Sampling settings under llama-server's names, as its answers and /props repeat them. Pure."""

from __future__ import annotations

from typing import Any

from ...core.request import SamplingParams
from .samplers import NAMES

RANDOM_SEED = 2**32 - 1
"""llama-server's word for a seed that nobody gave."""


def settings(sampling: SamplingParams, *, seed: int | None, max_tokens: int | None) -> dict[str, Any]:
    return {
        "n_predict": -1 if max_tokens is None else max_tokens,
        "seed": RANDOM_SEED if seed is None else seed,
        "temperature": sampling.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": max(0, sampling.top_k),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma or -1.0,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "typical_p": sampling.typical_p,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "mirostat": 0,
        "stop": list(sampling.stop),
        "max_tokens": -1 if max_tokens is None else max_tokens,
        "n_keep": -1,
        "n_discard": 0,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [list(pair) for pair in sampling.logit_bias],
        "n_probs": sampling.logprobs or 0,
        "min_keep": 0,
        "samplers": list(NAMES),
    }
