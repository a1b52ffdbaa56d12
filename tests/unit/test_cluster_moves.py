"""Moves in the gateway's books: a request is at one engine for its client, whatever happens to either of two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenmill.cluster.events import (
    Effects,
    EngineMessage,
    GivenUp,
    Joined,
    Leaves,
    Left,
    Opened,
    Pooled,
    Stepped,
    Ticked,
)
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.keys import with_keys
from tokenmill.cluster.links import EngineLink
from tokenmill.cluster.moves import REST_S, STAGING_S
from tokenmill.cluster.pools import LeastCost, Options, decision_named
from tokenmill.cluster.rescheduling import policy_named
from tokenmill.core.cost import Costs
from tokenmill.core.events import FINISH_MOVED, EngineStats, Output, Ready, StepOutputs, WorkerFacts
from tokenmill.core.kv_events import CLEARED, STORED, KVEvent, KVEvents
from tokenmill.core.moves import Continue, Moved, Offer, Release, Staged, Yield
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import USUAL, Terms

READY = Ready("m", 512, 100, (2,), "id", 16, 64, max_num_seqs=8, max_num_batched_tokens=64)


class Scene:
    """A gateway, with its books checked after every event, and all offers of KV that are not released."""

    def __init__(self, *pools: str, decision: str = "always", migration: str = "off") -> None:
        self.num_tickets = 0
        self.gateway = Gateway(new_ticket=self._ticket)
        self.gateway.pools.decision = decision_named(decision)
        self.gateway.reviews.policy = policy_named(migration)
        self.num_steps: dict[int, int] = {}
        self.attempts: dict[tuple[int, str], int] = {}
        self.offers: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        for number, pool in enumerate(pools):
            self.join(number, pool)

    def _ticket(self) -> str:
        self.num_tickets += 1
        return f"t{self.num_tickets}"

    def handle(self, event: object, now: float = 0.0) -> Effects:
        effects = self.gateway.handle(event, now)  # type: ignore[arg-type]
        self.gateway.check()
        for link, each in effects.submits:
            self.attempts[link, each.id] = each.attempt
            if each.yields:
                self.offers[each.yields] = link
        for link, message in effects.tells:
            if isinstance(message, Offer):
                self.offers[message.ticket] = link
            elif isinstance(message, Release):
                assert self.offers.pop(message.ticket) == link, "released once, by its engine"
        for output in effects.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.tokens)
        if isinstance(event, Left):  # its offers have gone with it
            self.offers = {ticket: link for ticket, link in self.offers.items() if link != event.link}
        return effects

    def join(self, link: int, pool: str = "mixed", **facts: object) -> Effects:
        self.num_steps[link] = 0
        worker = WorkerFacts(f"w{link}", "life", 1, pool, "here", f"kv{link}")
        return self.handle(Joined(link, replace(READY, worker=worker, **facts)))  # type: ignore[arg-type]

    def open(self, *names: str, terms: Terms = USUAL, num_tokens: int = 20) -> Effects:
        requests = [
            Request(name, tuple(range(num_tokens)), SamplingParams(), 64, seed=1, terms=terms) for name in names
        ]
        return self.handle(Opened(requests))

    def step(self, link: int, *outputs: Output, now: float = 1.0) -> Effects:
        self.num_steps[link] += 1
        outputs = tuple(each._replace(attempt=self.attempts.get((link, each.request_id), 0)) for each in outputs)
        return self.handle(Stepped(link, StepOutputs(outputs, EngineStats(num_steps=self.num_steps[link]), now)), now)

    def token(self, link: int, name: str, token: int, end: str | None = None) -> Effects:
        return self.step(link, Output(name, (token,), num_output=1, finish_reason=end))

    def staged(self, link: int, name: str, num_tokens: int = 20) -> Effects:
        return self.handle(EngineMessage(link, Staged(name, self.attempts[link, name], num_tokens)))

    def moved(self, link: int, name: str, error: str = "") -> Effects:
        return self.handle(EngineMessage(link, Moved(name, self.attempts[link, name], 0 if error else 21, error)), 2.0)

    def end(self, link: int, name: str) -> None:
        """All is over, nothing is left."""
        self.token(link, name, 99, "length")
        assert not self.gateway.num_open and not self.offers and not len(self.gateway._moves)


def migrating() -> Scene:
    """A request that draws in engine 0, staged for engine 1, which was told to take it."""
    scene = Scene("mixed")
    scene.open("a")
    scene.token(0, "a", 1)
    scene.join(1)
    entry = scene.gateway._entries["a"]
    effects = Effects()
    scene.gateway._moves.migrate(entry, scene.gateway._links[1], "balance", 0.0, effects)
    ((_, request),) = effects.submits
    assert request.output_tokens == (1,) and request.source is not None and request.source.worker == "w0"
    assert [type(each) for _, each in effects.tells] == [Offer]
    scene.attempts[1, "a"] = request.attempt
    scene.offers[request.source.ticket] = 0
    scene.gateway.check()
    return scene


def test_a_split_request_has_its_first_token_from_the_prefill_engine_and_the_others_from_the_decode_engine() -> None:
    scene = Scene("prefill", "decode")
    effects = scene.open("a")
    (prefill, first), (decode, second) = effects.submits
    assert (prefill, decode) == (0, 1) and first.yields == second.source.ticket and not second.yields
    assert (first.attempt, second.attempt) == (0, 1)
    effects = scene.token(0, "a", 5, FINISH_MOVED)
    assert [(each.tokens, each.finish_reason) for each in effects.outputs] == [((5,), None)]
    assert effects.tells == [(1, Continue("a", 1, (5,)))]
    effects = scene.moved(1, "a")
    assert [(each.why, each.error, each.num_tokens) for each in effects.moved] == [("split", "", 21)]
    scene.token(1, "a", 6)
    scene.end(1, "a")
    assert scene.tokens["a"] == [5, 6, 99]


def test_a_request_that_ends_with_its_first_token_leaves_nothing_at_the_decode_engine() -> None:
    scene = Scene("prefill", "decode")
    scene.open("a")
    effects = scene.token(0, "a", 5, "length")
    assert effects.aborts == [(1, "a")] and len(effects.ended) == 1
    assert not scene.offers and not scene.gateway.num_open


def test_without_pools_or_the_decision_nothing_is_split() -> None:
    for scene in (Scene("mixed", "mixed"), Scene("prefill", "decode", decision="never"), Scene("prefill", "prefill")):
        effects = scene.open("a")
        assert len(effects.submits) == 1 and not effects.submits[0][1].yields


def test_what_cannot_move_is_not_split() -> None:
    scene = Scene("prefill", "decode")
    request = Request("a", (1, 2), SamplingParams(prompt_logprobs=1), 64, seed=1)
    assert len(scene.handle(Opened([request])).submits) == 1
    request = Request("b", (1, 2), SamplingParams(), 1, seed=1)
    assert len(scene.handle(Opened([request])).submits) == 1, "it has no second token"


def test_a_split_request_outlives_its_prefill_engine_at_the_decode_engine() -> None:
    scene = Scene("prefill", "decode")
    scene.open("a")
    effects = scene.handle(Left(0))
    assert effects.resumed == 1 and effects.tells == [(1, Continue("a", 1, ()))]
    scene.moved(1, "a", "its source has gone")
    scene.token(1, "a", 5)
    scene.end(1, "a")
    assert scene.tokens["a"] == [5, 99]


def test_a_small_answer_passes_larger_ones_that_find_no_room() -> None:
    """A decode engine takes 256 tokens of prompts that are still computed."""
    scene = Scene("prefill", "decode")
    for name, num_tokens in (("a", 200), ("b", 150), ("c", 40), ("d", 50), ("e", 150), ("f", 49)):
        scene.open(name, num_tokens=num_tokens)
    assert list(scene.gateway.link(1).arriving) == ["a", "c"]  # type: ignore[union-attr]
    effects = scene.token(0, "c", 5, FINISH_MOVED)
    assert [(link, each.id) for link, each in effects.submits] == [(1, "d")]
    effects = scene.token(0, "d", 5, FINISH_MOVED)
    assert [(link, each.id) for link, each in effects.submits] == [(1, "f")]
    effects = scene.token(0, "a", 5, FINISH_MOVED)
    assert [(link, each.id) for link, each in effects.submits] == [(1, "b")]


def test_a_split_request_whose_decode_engine_dies_goes_on_where_it_can_and_is_not_split_again() -> None:
    scene = Scene("prefill", "decode")
    scene.open("a")
    effects = scene.handle(Left(1))
    assert [type(each) for _, each in effects.tells] == [Release]
    effects = scene.token(0, "a", 5, FINISH_MOVED)
    assert effects.outputs[0].finish_reason is None
    ((link, request),) = effects.submits
    assert (link, request.output_tokens, request.attempt, request.yields) == (0, (5,), 2, "")
    scene.end(0, "a")
    assert scene.tokens["a"] == [5, 99]


def test_a_decode_engine_that_dies_after_the_switch_loses_no_token() -> None:
    scene = Scene("prefill", "decode", "decode")
    scene.open("a")
    target = next(link for link, name in scene.attempts if link)
    scene.token(0, "a", 5, FINISH_MOVED)
    effects = scene.handle(Left(target))
    assert effects.resumed == 1 and [type(each) for _, each in effects.tells] == [Release]
    ((link, request),) = effects.submits
    assert request.output_tokens == (5,)
    scene.end(link, "a")
    assert scene.tokens["a"] == [5, 99]


def test_a_request_that_draws_moves_with_its_tokens_and_each_token_comes_once() -> None:
    scene = migrating()
    scene.token(0, "a", 2)
    assert scene.staged(1, "a").tells == [(0, Yield("t1", "a", 0))]
    assert not scene.staged(1, "a").tells, "said once"
    scene.token(0, "a", 3)
    effects = scene.step(0, Output("a", finish_reason=FINISH_MOVED))
    assert effects.tells == [(1, Continue("a", 1, (2, 3)))] and not effects.outputs
    stale = Output("a", (77,), attempt=0)
    assert not scene.handle(Stepped(0, StepOutputs((stale,), EngineStats(num_steps=9), 1.0))).outputs
    scene.moved(1, "a")
    scene.token(1, "a", 4)
    scene.end(1, "a")
    assert scene.tokens["a"] == [1, 2, 3, 4, 99]


def test_a_target_that_dies_or_refuses_or_has_no_room_changes_nothing_for_the_request() -> None:
    for number in range(4):
        scene = migrating()
        if number == 0:
            effects = scene.handle(Left(1))
        elif number == 1:
            effects = scene.moved(1, "a", "no such ticket")
        elif number == 2:
            assert scene.gateway.next_due_s == STAGING_S
            effects = scene.handle(Ticked(), STAGING_S)
        else:
            effects = scene.step(1, Output("a", finish_reason="error", error="no"))
        assert [type(each) for _, each in effects.tells] == [Release] and effects.moved[0].error
        assert effects.aborts == ([(1, "a")] if number in (1, 2) else [])
        entry = scene.gateway._entries["a"]
        assert not scene.gateway._moves.can_move(entry, 0.5) and scene.gateway._moves.can_move(entry, 9.0 + REST_S)
        scene.token(0, "a", 2)
        scene.end(0, "a")
        assert scene.tokens["a"] == [1, 2, 99]


def test_a_source_that_was_told_to_stop_and_has_no_target_any_more_gives_the_request_to_the_next() -> None:
    scene = migrating()
    scene.staged(1, "a")
    scene.handle(Left(1))
    scene.join(2)
    effects = scene.token(0, "a", 2, FINISH_MOVED)
    ((link, request),) = effects.submits
    assert request.output_tokens == (1, 2) and request.attempt == 2 and request.source is None
    scene.end(link, "a")
    assert scene.tokens["a"] == [1, 2, 99]


def test_a_target_that_gets_no_kv_after_the_source_was_told_to_stop_computes_it() -> None:
    scene = migrating()
    scene.staged(1, "a")
    assert not scene.moved(1, "a", "its ticket was refused").tells
    effects = scene.token(0, "a", 2, FINISH_MOVED)
    assert [type(each) for _, each in effects.tells] == [Continue, Release] and effects.moved[0].error
    scene.end(1, "a")
    assert scene.tokens["a"] == [1, 2, 99]


def test_a_source_that_dies_at_any_moment_leaves_the_request_to_its_target() -> None:
    for is_yielding in (False, True):
        scene = migrating()
        scene.token(0, "a", 2)
        if is_yielding:
            scene.staged(1, "a")
        effects = scene.handle(Left(0))
        assert effects.resumed == 1 and effects.tells == [(1, Continue("a", 1, (2,)))]
        scene.moved(1, "a")
        scene.end(1, "a")
        assert scene.tokens["a"] == [1, 2, 99]


def test_one_who_gives_up_is_over_at_both_engines_at_every_state() -> None:
    scene = migrating()
    effects = scene.handle(GivenUp("a", "stop"))
    assert sorted(effects.aborts) == [(0, "a"), (1, "a")] and not scene.offers
    scene.step(1, Output("a", finish_reason="abort"))
    assert scene.gateway.num_open == 1, "the one that has it has not confirmed"
    scene.step(0, Output("a", finish_reason="abort"))
    assert not scene.gateway.num_open

    scene = migrating()
    scene.staged(1, "a")
    scene.handle(GivenUp("a", "stop"))
    ended = scene.token(0, "a", 2, FINISH_MOVED).ended
    assert [each.reason for each in ended] == ["stop"] and not scene.gateway.num_open

    scene = migrating()
    scene.token(0, "a", 2, FINISH_MOVED)
    effects = scene.handle(GivenUp("a", "abort"))
    assert effects.aborts == [(1, "a")] and not scene.offers
    scene.step(1, Output("a", finish_reason="abort"))
    assert not scene.gateway.num_open


def test_a_time_limit_ends_a_request_that_moves_with_what_it_has() -> None:
    scene = Scene("prefill", "decode")
    scene.open("a", terms=Terms(timeout_s=10.0))
    effects = scene.handle(Ticked(), 10.0)
    assert sorted(effects.aborts) == [(0, "a"), (1, "a")] and not scene.offers
    assert effects.outputs[0].finish_reason == "error"


def test_an_engine_that_leaves_gives_all_it_has_to_others() -> None:
    scene = Scene("mixed", migration="on")
    scene.open("a", "b")
    scene.token(0, "a", 1)
    scene.join(1)
    effects = scene.handle(Leaves(0))
    assert effects.rerouted == 1 and (0, "b") in effects.aborts
    assert sorted((link, each.id, each.output_tokens) for link, each in effects.submits) == [
        (1, "a", (1,)),
        (1, "b", ()),
    ]
    scene.staged(1, "a")
    scene.token(0, "a", 2, FINISH_MOVED)
    scene.moved(1, "a")
    assert not scene.gateway.num_open_at(0)
    scene.token(1, "b", 8, "length")
    scene.end(1, "a")
    assert scene.tokens == {"a": [1, 2, 99], "b": [8]}


def test_a_prefix_is_expected_where_its_request_is() -> None:
    """One that draws is handed over, one that waits is given to the other: both prompts will be cached there."""
    scene = Scene("mixed", "mixed", migration="on")
    prompts = {name: tuple(range(first, first + 100)) for name, first in (("a", 0), ("b", 1000))}
    made = [Request(name, prompt, SamplingParams(), 64, seed=1) for name, prompt in prompts.items()]
    requests = {each.id: each for each in with_keys(made, READY)}
    scene.handle(Leaves(1))
    scene.handle(Opened(list(requests.values())))
    scene.token(0, "a", 1)
    scene.join(2)
    scene.handle(Leaves(0))
    router = scene.gateway.router
    assert [router.hits(requests[name], 16) for name in "ab"] == [{0: 64}, {2: 64}]
    scene.staged(2, "a")
    scene.token(0, "a", 2, FINISH_MOVED)
    assert router.hits(requests["a"], 16) == {2: 64}


def test_what_is_cached_counts_where_a_request_is_computed_and_whether_it_is_split() -> None:
    costs = Costs(step_s=1e-3, row_s=1e-5, token_s=1e-4, position_s=1e-9, context_s=1e-9)
    prompt = tuple(range(320))

    def scene_with(holder: int | None, *pools: str) -> Effects:
        scene = Scene(decision="cost")
        for number, pool in enumerate(pools):
            scene.join(number, pool, stats=EngineStats(costs=costs))
        (request,) = with_keys([Request("a", prompt, SamplingParams(), 64, seed=1)], READY)
        if holder is not None:
            events = KVEvent(CLEARED), KVEvent(STORED, request.keys)
            scene.handle(EngineMessage(holder, KVEvents(0, events)))
        effects = scene.handle(Opened([request]))
        scene.end(effects.submits[0][0], "a")
        return effects

    for holder, chosen in ((None, 0), (1, 1), (2, 2)):
        effects = scene_with(holder, "mixed", "mixed", "prefill", "decode")
        assert [link for link, _ in effects.submits] == [chosen]

    links = {}
    for number, pool in enumerate(("mixed", "prefill", "decode")):
        links[number] = EngineLink(number, replace(READY), pool, EngineStats(costs=costs))
    request = Request("a", prompt, SamplingParams(), 64, seed=1)
    at = Options(links[0], links[1], links[2], 320, {}, 32, lambda link, now: 0.0, 0.005)
    assert not LeastCost().splits(request, at, 0.0), "a hand-over takes longer than none"
    assert LeastCost().splits(request, at._replace(hits={1: 304}), 0.0)
    assert not LeastCost().splits(request, at._replace(hits={0: 304, 1: 304}), 0.0)


def test_nothing_moves_to_an_engine_that_leaves() -> None:
    scene = migrating()
    effects = scene.handle(Leaves(1))
    assert effects.aborts == [(1, "a")] and [type(each) for _, each in effects.tells] == [Release]
    scene.end(0, "a")


def test_without_a_policy_an_engine_that_leaves_finishes_what_it_has() -> None:
    scene = Scene("mixed")
    scene.open("a")
    scene.join(1)
    assert not scene.handle(Leaves(0)).submits
    scene.end(0, "a")


def test_prompts_are_not_sent_on_before_there_is_room_for_them() -> None:
    """A quarter of the decode engine's room waits for prompts that are still being computed."""
    scene = Scene("prefill", "decode")
    names = list("abcdef")
    effects = scene.open(*names, num_tokens=100)  # the decode engine has room for 1024
    sent = [each.id for link, each in effects.submits if link == 1]
    assert sent == ["a", "b"]
    effects = scene.token(0, "a", 1, FINISH_MOVED)
    assert [each.id for link, each in effects.submits if link == 1] == ["c"]
    effects = scene.token(0, "f", 1, FINISH_MOVED)  # out of turn, and with KV that waits: it goes anyhow
    assert [(each.id, each.output_tokens) for link, each in effects.submits if link == 1] == [("f", (1,))]
    assert effects.tells == [(1, Continue("f", scene.attempts[1, "f"], ()))]


def test_an_engine_serves_in_another_pool_at_once_and_keeps_what_it_has() -> None:
    scene = Scene("mixed", "mixed")
    scene.open("a")
    scene.handle(Pooled(0, "prefill"))
    scene.handle(Pooled(1, "decode"))
    effects = scene.open("b")
    assert [link for link, _ in effects.submits] == [0, 1] and effects.submits[0][1].yields
    scene.token(0, "a", 1)
    scene.token(0, "b", 1, FINISH_MOVED)
    scene.handle(Pooled(1, "prefill"))
    scene.moved(1, "b")
    scene.token(1, "b", 2, "length")
    scene.end(0, "a")
    assert scene.tokens == {"a": [1, 99], "b": [1, 2]}


@pytest.mark.parametrize("number", range(2))
def test_a_request_that_ends_its_decode_engines_is_found_out(number: int) -> None:
    """Splitting hides no request that ends engines; what moves with it is not accused for its source's death."""
    scene = Scene("prefill", "decode")
    scene.open("poison")
    scene.token(0, "poison", 1, FINISH_MOVED)
    link = 1
    for life in range(2, 9):
        effects = scene.handle(Left(link))
        if effects.poisoned:
            break
        submits = effects.submits or scene.join(life, "decode").submits
        while not submits:
            submits = scene.step(0).submits
        link = submits[-1][0]
        if number and link == 0:
            scene.join(100 + life, "decode")
    assert effects.poisoned == 1 and effects.outputs[0].finish_reason == "error"
    assert not scene.offers and not scene.gateway.num_open


def test_an_engine_that_serves_kv_to_nobody_is_no_source() -> None:
    scene = Scene()
    worker = WorkerFacts("w0", "life", 1, "prefill", "here", "")
    scene.num_steps[0] = 0
    scene.handle(Joined(0, replace(READY, worker=worker)))
    scene.join(1, "decode")
    assert len(scene.open("a").submits) == 1
