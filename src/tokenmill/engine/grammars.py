"""Requests whose grammar the executor still prepares. Pure.

A request with a grammar enters the queue when the grammar is ready: what is slow about it is done beside the steps and
never within one.

Submit -> job PrepareGrammar -> its end -> the requests that wait for it enter, or are refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..core.effects import JobEnded, PrepareGrammar
from ..core.errors import EngineFailed, InvalidRequest, TokenmillError
from ..core.outputs import aborted_before, moved_before, refused
from ..core.request import Request
from .state import EngineState


class PendingGrammars:
    """refusal: what may have come to speak against a request while it waited."""

    def __init__(self, state: EngineState, refusal: Callable[[Request], TokenmillError | None]) -> None:
        self._state = state
        self._refusal = refusal
        self._waiting: dict[str, dict[str, Request]] = {}  # by grammar, then by the id of the request
        self._grammar_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._grammar_of)

    def __iter__(self) -> Iterator[str]:
        """Ids of requests, in the order in which they came."""
        return iter(self._grammar_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._grammar_of

    def hold(self, request: Request) -> None:
        """Until its grammar is ready; one job serves all requests that wait for the same."""
        grammar = request.sampling.grammar
        if grammar not in self._waiting:
            self._waiting[grammar] = {}
            self._state.outbox.jobs.append(PrepareGrammar(grammar))
        self._waiting[grammar][request.id] = request
        self._grammar_of[request.id] = grammar

    def end(self, event: JobEnded, now: float) -> None:
        """The end of a job that was heard of before finds nobody. Who asked first is charged."""
        assert isinstance(event.job, PrepareGrammar), event
        entered: list[str] = []
        for request in self._waiting.pop(event.job.grammar, {}).values():
            del self._grammar_of[request.id]
            error = _error_of(event) or self._refusal(request)
            if error is None:
                self._state.counters.num_constrained += 1
                self._state.enter(request, now)
                entered.append(request.id)
            else:
                self._state.outbox.outputs.append(refused(request, error, now))
        if entered and event.result:
            self._state.service.note_masks(self._state.by_id[entered[0]], float(event.result))

    def abort(self, request_id: str, now: float) -> None:
        """The job goes on: others may come to wait for it."""
        request = self._waiting[self._grammar_of.pop(request_id)].pop(request_id)
        self._state.outbox.outputs.append(aborted_before(request, now))

    def give_up(self, request_id: str, attempt: int, now: float) -> None:
        """It goes on elsewhere."""
        grammar = self._grammar_of.get(request_id)
        if grammar is not None and self._waiting[grammar][request_id].attempt == attempt:
            del self._grammar_of[request_id]
            request = self._waiting[grammar].pop(request_id)
            self._state.outbox.outputs.append(moved_before(request, now))

    def check(self) -> None:
        """Assert that nothing is held twice."""
        held = {name: grammar for grammar, requests in self._waiting.items() for name in requests}
        assert held == self._grammar_of, (held, self._grammar_of)
        assert not held.keys() & self._state.by_id.keys(), "a request is held and has entered"


def _error_of(event: JobEnded) -> TokenmillError | None:
    if not event.error:
        return None
    kind = InvalidRequest if event.error_kind == InvalidRequest.kind else EngineFailed
    return kind(event.error, param=event.error_param or None)
