"""Prompts that one engine computes for another by way of tiers: one answer for the client, whatever fails between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_cluster_moves import READY, Scene

from tokenmill.cluster.events import Effects, GivenUp, Joined, Left
from tokenmill.core.events import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Output, WorkerFacts
from tokenmill.core.request import EXPORT, IMPORT
from tokenmill.core.tiers import DISK, HOST, REMOTE, TierFacts

NEAR = (TierFacts(HOST, 1 << 30), TierFacts(DISK, 1 << 30))


class Tiered(Scene):
    """Engines that cannot reach each other, and the stores that they use."""

    def __init__(self, *stores: str, tiers: tuple[TierFacts, ...] = NEAR) -> None:
        super().__init__()
        for link, store in enumerate(stores):
            self.num_steps[link] = 0
            worker = WorkerFacts(f"w{link}", "life", 1, "decode" if link else "prefill", "here", "", kv_store=store)
            self.handle(Joined(link, replace(READY, worker=worker, tiers=tiers if store else ())))

    def end(self, link: int, name: str, *tokens: int, reason: str = FINISH_LENGTH, is_saved: bool = True) -> Effects:
        return self.step(link, Output(name, tokens, finish_reason=reason, num_output=len(tokens), is_saved=is_saved))


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_answer_goes_on_where_its_prompts_kv_is_found(is_saved: bool) -> None:
    scene = Tiered("s", "s")
    ((source, first),) = scene.open("a").submits
    assert (source, first.handoff, first.max_tokens, first.yields) == (0, EXPORT, 1, "")
    effects = scene.end(0, "a", 7, is_saved=is_saved)
    ((target, second),) = effects.submits
    assert (target, second.output_tokens, second.max_tokens) == (1, (7,), 64) and second.is_resumed
    assert second.handoff == (IMPORT if is_saved else "")
    (output,) = effects.outputs
    assert (output.tokens, output.finish_reason) == ((7,), None) and not effects.ended
    (moved,) = effects.moved
    assert (moved.source, moved.target, moved.why, bool(moved.error)) == (0, 1, "split", not is_saved)
    assert moved.num_tokens == (16 if is_saved else 0)
    scene.token(1, "a", 8)
    effects = scene.end(1, "a", 9, reason=FINISH_STOP)
    assert [each.reason for each in effects.ended] == [FINISH_STOP] and scene.tokens["a"] == [7, 8, 9]
    assert not scene.offers and not len(scene.gateway._moves)


def test_what_its_engine_will_not_have_is_refused_as_it_was_sent() -> None:
    """And not for the one token that was asked of it."""
    scene = Tiered("s", "s")
    scene.open("a")
    refused = Output("a", finish_reason="error", error="max_tokens is 1", error_kind="invalid_request_error")
    ((target, again),) = scene.step(0, refused).submits
    assert (target, again.max_tokens, again.handoff) == (1, 64, "")
    effects = scene.step(1, refused._replace(error="max_tokens is 64"))
    assert [each.output.error for each in effects.ended if each.output] == ["max_tokens is 64"]


def test_an_answer_that_ends_with_its_first_token_ends() -> None:
    scene = Tiered("s", "s")
    scene.open("a")
    effects = scene.end(0, "a", 7, reason=FINISH_STOP)
    assert [each.reason for each in effects.ended] == [FINISH_STOP] and not effects.submits


def test_what_its_engine_cannot_finish_is_computed_by_another_with_its_own_limit() -> None:
    scene = Tiered("s", "s")
    scene.open("a")
    effects = scene.handle(Left(0))
    ((target, again),) = effects.submits
    assert (target, again.max_tokens, again.handoff) == (1, 64, "")
    assert not len(scene.gateway._moves)


def test_a_client_that_leaves_ends_it_on_either_side() -> None:
    scene = Tiered("s", "s")
    scene.open("a", "b")
    assert scene.handle(GivenUp("a", FINISH_ABORT)).aborts == [(0, "a")]
    effects = scene.end(0, "a", 7)
    assert [each.reason for each in effects.ended] == [FINISH_ABORT] and not effects.submits
    scene.end(0, "b", 7)
    assert scene.handle(GivenUp("b", FINISH_ABORT)).aborts == [(1, "b")]


@pytest.mark.parametrize(
    ("stores", "tiers", "is_split"),
    [
        (("s", "s"), NEAR, True),
        (("s", "t"), NEAR, False),
        (("s", ""), NEAR, False),
        (("", ""), NEAR, False),
        (("s", "t"), (*NEAR, TierFacts(REMOTE)), True),
    ],
)
def test_only_what_the_other_finds_is_handed_over(
    stores: tuple[str, ...], tiers: tuple[TierFacts, ...], is_split: bool
) -> None:
    scene = Tiered(*stores, tiers=tiers)
    ((_, request),) = scene.open("a").submits
    assert (request.handoff == EXPORT) == is_split
