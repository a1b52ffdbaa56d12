"""Settings that the choices of one call share, stored once: each choice arrives with its own copy of long id lists."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.request import Request, SamplingParams


@dataclass(slots=True, eq=False)
class _Held:
    sampling: SamplingParams
    stop_ids: frozenset[int]
    num_requests: int = 0


class SettingsLedger:
    """Settings with lists, by their value, as long as a request has them."""

    def __init__(self) -> None:
        self._held: dict[tuple[SamplingParams, tuple[int, ...]], _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, request: Request) -> tuple[Request, frozenset[int]]:
        """The request with settings that equal ones share, and the tokens that end it. Give it back to `end`."""
        sampling = request.sampling
        eos = request.end_token_ids
        if not _has_lists(sampling):
            return request, frozenset(eos)
        held = self._held.get((sampling, eos))
        if held is None:
            held = self._held[sampling, eos] = _Held(sampling, frozenset(sampling.stop_token_ids) | frozenset(eos))
        held.num_requests += 1
        return request if held.sampling is sampling else replace(request, sampling=held.sampling), held.stop_ids

    def end(self, request: Request) -> None:
        if _has_lists(request.sampling):
            key = request.sampling, request.end_token_ids
            held = self._held[key]
            held.num_requests -= 1
            if not held.num_requests:
                del self._held[key]


def _has_lists(sampling: SamplingParams) -> bool:
    return bool(sampling.stop_token_ids or sampling.allowed_token_ids or sampling.grammar)
