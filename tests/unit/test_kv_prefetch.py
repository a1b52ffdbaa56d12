"""A prefix that is prefetched from tiers is in the pools when a request for it comes; what fails holds nothing."""

from __future__ import annotations

from test_engine_core import make_request
from test_kv_tier_catalogue import BLOCK_BYTES, TieredEngine

from tokenmill.core.block import split_keys
from tokenmill.core.effects import Effects, FetchBlocks, FindBlocks, Job, JobEnded
from tokenmill.core.events import Submit
from tokenmill.core.moves import Prefetch, Prefetched
from tokenmill.kv.blocks.hashing import prompt_keys
from tokenmill.kv.connector.scheduler import prefetch

PROMPT = make_request("a", 22, 2).prompt_tokens


class Scene(TieredEngine):
    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Prefetched] = []
        self.keys = tuple(split_keys(prompt_keys(self.core.config.numerics_id, "", "", PROMPT, 4)))

    def prefetch(self, number: int = 7) -> list[FindBlocks]:
        self._take(self.core.handle(Prefetch(number, self.keys), 0.0))
        return self.jobs(FindBlocks)

    def end(self, job: Job, result: str = "", error: str = "", now: float = 1.0) -> None:
        self._take(self.core.handle(JobEnded(job, result, error), now))
        self.core.check()

    def _take(self, effects: Effects) -> None:
        self.told += effects.jobs
        self.answers += [each for each in effects.answers if isinstance(each, Prefetched)]


def test_what_is_there_comes_in_order_and_is_cached(monkeypatch) -> None:
    monkeypatch.setattr(prefetch, "CHUNK_BYTES", 2 * BLOCK_BYTES)
    scene = Scene()
    (find,) = scene.prefetch()
    assert [key for _, key in find.wanted] == list(scene.keys) and find.number < 0
    scene.end(find, "12110")
    for count in (2, 2):
        (fetch,) = scene.jobs(FetchBlocks)
        assert len(fetch.moves) == count and fetch.within_s and not scene.answers
        scene.end(fetch)
    assert scene.answers == [Prefetched(7, 4)] and not scene.jobs(FetchBlocks)
    assert (scene.core.stats().num_held_blocks, scene.core.stats().num_cached_blocks) == (0, 4)
    scene.core.handle(Submit((make_request("a", 22, 2),)), 0.0)
    scene.jobs(FindBlocks)
    assert scene.core.state.find_match(next(iter(scene.core.state.by_id.values()))).num_blocks == 4


def test_what_was_lost_ends_it_with_what_came_before(monkeypatch) -> None:
    monkeypatch.setattr(prefetch, "CHUNK_BYTES", 2 * BLOCK_BYTES)
    scene = Scene()
    (find,) = scene.prefetch()
    scene.end(find, "11111")
    (fetch,) = scene.jobs(FetchBlocks)
    scene.end(fetch, "10")
    assert scene.answers == [Prefetched(7, 1)] and not scene.jobs(FetchBlocks)
    (find,) = scene.prefetch(8)
    assert len(find.wanted) == 4
    scene.end(find, "1111")
    (fetch,) = scene.jobs(FetchBlocks)
    scene.end(fetch, error="gone")
    assert scene.answers[1] == Prefetched(8, 1), "it was here"
    assert scene.core.stats().num_held_blocks == 0


def test_what_is_nowhere_is_said_to_be(monkeypatch) -> None:
    scene = Scene()
    (find,) = scene.prefetch()
    scene.end(find, error="gone")
    (find,) = scene.prefetch(8)
    scene.end(find, "01111")
    assert [(each.num_blocks, each.error) for each in scene.answers] == [(0, "gone"), (0, prefetch.LOST)]
    monkeypatch.setattr(prefetch, "MOST", 1)
    (find,) = scene.prefetch(9)
    assert scene.prefetch(10) == [] and scene.answers[-1] == Prefetched(10, 0, prefetch.NO_ROOM)
    scene.end(find, "11111")
    (fetch,) = scene.jobs(FetchBlocks)
    scene.end(fetch)
    assert scene.prefetch(11) == [] and scene.answers[-1] == Prefetched(11, 5), "it is here"


def test_without_room_nothing_is_taken() -> None:
    scene = Scene()
    scene.core.state.blocks.pools[0].reserve(62)
    (find,) = scene.prefetch()
    effects = scene.core.handle(JobEnded(find, "11111"), 1.0)
    assert effects.answers == (Prefetched(7, 0, prefetch.NO_ROOM),) and not scene.jobs(FetchBlocks)


def test_a_prefix_that_a_request_fetches_at_the_same_time_is_cached_once() -> None:
    """Whichever of the two is in first; what the other has loaded beside it goes."""
    for first in (0, 1):
        scene = Scene()
        (find,) = scene.prefetch()
        (other,) = scene.ask(make_request("a", 22, 2))
        scene.end(find, "11111")
        scene.end(other, "11111")
        assert scene.plan() is None
        fetches = scene.jobs(FetchBlocks)
        assert len(fetches) == 2 and fetches[0].moves != fetches[1].moves
        scene.end(fetches[first])
        scene.end(fetches[1 - first])
        assert scene.answers == [Prefetched(7, 5)]
        assert {output.num_cached for output in scene.finish()} == {20}
        assert (scene.core.stats().num_held_blocks, scene.core.stats().num_cached_blocks) == (0, 5)
