"""By what kinds of steps errors are told, and how large they are of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...core.step_records import TimedStep
from ...sim.calibrated import Calibrated, Error
from .cost_model import slowness_of
from .observed import Observed

SHORT = 128
"""Tokens of a short step of prompts at most."""

_DECODES = ((1, "decode, 1 row"), (4, "decode, 2-4 rows"), (16, "decode, 5-16 rows"), (64, "decode, 17-64 rows"))
_CONTEXTS = ((256, "decode, context to 256"), (1024, "decode, context to 1024"))


def regime_of(step: TimedStep) -> str:
    """By rows of one token and of more."""
    if step.num_decode_rows == step.num_rows:
        return next((name for most, name in _DECODES if step.num_rows <= most), "decode, more rows")
    if step.num_decode_rows:
        return "mixed"
    return f"prefill, to {SHORT} tokens" if step.num_tokens <= SHORT else "prefill, more tokens"


def context_of(step: TimedStep) -> str:
    """By the mean context of its rows; "": it has chunks of prompts."""
    if step.num_decode_rows < step.num_rows:
        return ""
    mean = step.num_context / step.num_rows
    return next((name for most, name in _CONTEXTS if mean <= most), "decode, longer context")


NAMES = (*(name for _, name in _DECODES), "decode, more rows", f"prefill, to {SHORT} tokens", "prefill, more tokens",
         "mixed", *(name for _, name in _CONTEXTS), "decode, longer context")  # fmt: skip


def errors_of(law: Calibrated, spans: Sequence[Sequence[Observed]]) -> tuple[Error, ...]:
    """Of each regime that has steps in these spans of time, and of all of them."""
    seen = [each for span in spans for each in span]
    steps = [each.step for each in seen]
    if not steps:
        return ()
    measured = np.array([step.duration_s for step in steps])
    predicted = np.array([each.predicted(law) for each in seen])
    places = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
    paced = predicted * slowness_of(measured / predicted, places, len(spans))[places]
    found = []
    for name in (*NAMES, "all"):
        these = [name in (regime_of(step), context_of(step), "all") for step in steps]
        if any(these):
            found.append(_error(name, measured[these], predicted[these], paced[these]))
    return tuple(found)


def _error(
    name: str, measured: NDArray[np.float64], predicted: NDArray[np.float64], paced: NDArray[np.float64]
) -> Error:
    off = predicted / measured - 1
    figures = (
        np.median(off),
        np.median(np.abs(off)),
        np.quantile(np.abs(off), 0.9),
        np.median(np.abs(paced / measured - 1)),
        predicted.sum() / measured.sum() - 1,
    )
    return Error(name, len(measured), *(round(float(each), 5) for each in figures))
