"""Sampling settings under llama-server's names, as its answers and /props repeat them, and `samplers`. Pure.

`samplers` lists what acts on a draw, in order. Here the order is fixed (docs/sampling.md): a list is taken if what
acts, acts in the order of here; what it leaves out is off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.errors import InvalidRequest
from ...core.sampling import SAMPLERS, SETTINGS, SamplingParams

_SAME = {"typical_p": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p"}
_FREE = ("top_n_sigma", "top_k")
"""The same before temperature as after it."""

_OFF: dict[str, dict[str, Any]] = {
    sampler: {name: declared.default for name, declared in SETTINGS.items() if declared.sampler == sampler}
    for sampler in SAMPLERS
}


def with_samplers(sampling: SamplingParams, wanted: Any) -> SamplingParams:
    """`sampling` with nothing on but what the list names. Raises InvalidRequest for a name that is not known, and for
    an order that would draw otherwise."""
    if wanted in (None, [], ""):
        return sampling
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise InvalidRequest("samplers must be an array of names.", param="samplers")
    named: list[str] = [_SAME.get(name, str(name)) for name in wanted]
    odd = next((name for name in named if name not in SAMPLERS), None)
    if odd is not None:
        known = ", ".join(SAMPLERS)
        raise InvalidRequest(f"samplers: there is no {odd[:40]!r} here; there are {known}.", param="samplers")
    for name in SAMPLERS:
        if name not in named:
            sampling = replace(sampling, **_OFF[name])
    acting = [name for name in named if _acts(sampling, name)]
    if sampling.temperature in (0, 1):
        acting = [name for name in acting if name != "temperature"]
    if sampling.temperature == 0:
        acting = [name for name in acting if name in ("penalties", "dry")]
    order = [name for name in SAMPLERS if name in acting]
    if [each for each in acting if each not in _FREE] != [each for each in order if each not in _FREE] or [
        each for each in acting if each != "temperature"
    ] != [each for each in order if each != "temperature"]:
        raise InvalidRequest(
            f"samplers: here the order is {', '.join(order)}; give it so, or leave it out.", param="samplers"
        )
    return sampling


def _acts(sampling: SamplingParams, name: str) -> bool:
    return any(getattr(sampling, setting) != value for setting, value in _OFF[name].items())


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
