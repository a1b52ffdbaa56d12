"""The request log: a line for each call as it is admitted, and one for each of its choices as it ends.

    came cmpl-5f..: model=smollm2 choices=2 prompt_tokens=14 max_tokens=64 seed=81 temperature=0.2 top_p=0.9
    ended cmpl-5f..-0: stop, prompt_tokens=14 cached=0 output_tokens=23 queue=0.002 ttft=0.041 total=0.713

Times are seconds since the call arrived; `queue` ends when it was first scheduled. Of texts, as many characters of the
prompt as the owner of the server allows are shown, none by default, and nothing of stop strings.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...core.events import FINISH_ERROR, Output
from ...core.request import Request, SamplingParams

REQUEST_LOGGER = "tokenmill.requests"
_log = logging.getLogger(REQUEST_LOGGER)
_APART = frozenset({"n", "max_tokens", "seed"})
_MAX_VALUE = 60
_DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)}


class RequestLog:
    """`decode` gives the text of prompt tokens, of which at most `max_chars` characters are shown."""

    def __init__(self, model: str, decode: Callable[[Sequence[int]], str], max_chars: int = 0) -> None:
        self._model = model
        self._decode = decode
        self._max_chars = max_chars
        self.name_adapter: Callable[[str], str] = lambda digest: digest

    def came(self, requests: Sequence[Request], answer_id: str) -> None:
        """A call was admitted; its answer carries `answer_id`."""
        first = requests[0]
        root_id = first.id.rpartition("-")[0]
        model = self.name_adapter(first.adapter) if first.adapter else self._model
        facts = [f"model={model}", f"choices={len(requests)}"]
        facts.append(f"prompt_tokens={sum(len(request.prompt_tokens) for request in requests if not request.choice)}")
        if first.pooling is not None:
            facts.append(f"pooling={first.pooling.how}")
        else:
            facts += [f"max_tokens={first.max_tokens}", f"seed={first.seed}", *_settings(first.sampling)]
        if first.priority:
            facts.append(f"priority={first.priority}")
        if self._max_chars:
            text = self._decode(first.prompt_tokens[: self._max_chars])[: self._max_chars]
            facts.append(f"prompt={text!a}")
        name = root_id if answer_id == root_id else f"{root_id} as {answer_id!a}"
        _log.info("came %s: %s", name, " ".join(facts), extra=_about(first))

    def ended(self, request: Request, output: Output, reason: str, now: float) -> None:
        """The engine's last word on a request; `reason` as its client saw it."""
        timing = output.timing
        times = [("total", now)]
        if timing is not None:
            times = [("queue", timing.scheduled_s), ("ttft", timing.first_token_s), *times]
        _log.info(
            "ended %s: %s, prompt_tokens=%d cached=%d output_tokens=%d %s%s",
            request.id,
            reason,
            len(request.prompt_tokens),
            output.num_cached,
            output.num_output,
            " ".join(f"{name}={time_s - request.arrival_s:.3f}" for name, time_s in times if time_s >= 0),
            f" error={output.error!a}" if reason == FINISH_ERROR else "",
            extra=_about(request),
        )

    def given_up(self, request: Request, reason: str) -> None:
        """It ended for its client while it waited for a place."""
        _log.info("ended %s: %s, before the engine had it", request.id, reason, extra=_about(request))


def _about(request: Request) -> dict[str, Any]:
    """For logs of structured lines."""
    facts = {"request": request.id}
    return {"facts": facts | {"tenant": request.terms.tenant} if request.terms.tenant else facts}


def _settings(sampling: SamplingParams) -> list[str]:
    """What differs from the defaults; of texts and long lists only how many there are."""
    shown = []
    for name, default in _DEFAULTS.items():
        value = getattr(sampling, name)
        if name in _APART or value == default:
            continue
        is_shown = isinstance(value, bool | int | float) or value is None
        text = str(value) if is_shown else f"({len(value)})" if hasattr(value, "__len__") else type(value).__name__
        shown.append(f"{name}={text[:_MAX_VALUE]}")
    return shown
