"""What requests of an engine share: LoRA adapters, and long lists in their settings. Pure.

Which adapters requests may name, and when an unloaded one has lost its last user:

LoadAdapter -> job LoadAdapter -> its end -> AdapterLoaded, and requests may name the adapter
UnloadAdapter, or the end of a request    -> job DropAdapter, once no load and no request uses it
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.effects import DropAdapter, JobEnded, Outbox
from ..core.events import AdapterLoaded, LoadAdapter, UnloadAdapter
from ..core.request import Request, SamplingParams


@dataclass(slots=True)
class _Uses:
    loads: int = 0
    users: int = 0


class AdapterRegistry:
    """Adapters by digest. Loads count: one that was loaded twice is taken until it has been unloaded twice."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._uses: dict[str, _Uses] = {}
        self._num_loading = 0

    def __bool__(self) -> bool:
        return bool(self._uses)

    def load(self, event: LoadAdapter, now: float) -> None:
        """Have the executor load it; its digest is known when that has ended."""
        self._num_loading += 1
        self._outbox.jobs.append(event)

    def end_load(self, event: JobEnded, now: float) -> None:
        """From now on requests may name it, unless loading failed."""
        assert isinstance(event.job, LoadAdapter), event
        self._num_loading -= 1
        if not event.error:
            self._uses.setdefault(event.result, _Uses()).loads += 1
        number, error = event.job.number, (event.error, event.error_kind, event.error_param)
        self._outbox.answers.append(AdapterLoaded(number, event.result, *error))
        self._drop_unused()

    def unload(self, event: UnloadAdapter, now: float) -> None:
        """No further request may name it; those that do run to their end. One that is not loaded is ignored."""
        if self.takes(event.digest):
            self._uses[event.digest].loads -= 1
            self._drop_unused()

    def takes(self, digest: str) -> bool:
        """Whether a new request may name it."""
        return digest in self._uses and self._uses[digest].loads > 0

    def loads(self) -> list[str]:
        """Digests of what is loaded, each as often as it was."""
        return [digest for digest, uses in self._uses.items() for _ in range(uses.loads)]

    def begin(self, digest: str) -> None:
        """A request that names it has come."""
        self._uses[digest].users += 1

    def end(self, digest: str) -> None:
        """A request that named it has ended."""
        self._uses[digest].users -= 1
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Not while an adapter is being loaded: it may be one of these, found in its place and to be kept there."""
        if self._num_loading:
            return
        for digest in [digest for digest, uses in self._uses.items() if not uses.loads and not uses.users]:
            del self._uses[digest]
            self._outbox.jobs.append(DropAdapter(digest))

    def check(self, users: dict[str, int]) -> None:
        """Assert that the users counted are `users`."""
        counted = {digest: uses.users for digest, uses in self._uses.items() if uses.users}
        assert counted == users, (counted, users)


@dataclass(slots=True, eq=False)
class _Held:
    sampling: SamplingParams
    stop_ids: frozenset[int]
    num_requests: int = 0


class SharedSettings:
    """Settings with lists, by their value, as long as a request has them: each choice of a call arrives with a copy."""

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
