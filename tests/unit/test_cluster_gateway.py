"""The gateway's books, event by event: who has what, what outlives an engine, and who is tried alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenmill.cluster.entry import Entry
from tokenmill.cluster.events import (
    Cause,
    Closed,
    Effects,
    EngineMessage,
    GivenUp,
    Joined,
    Leaves,
    Left,
    Opened,
    Stepped,
    Ticked,
)
from tokenmill.cluster.failures import MAX_UNBLAMED_DEATHS
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.keys import with_keys
from tokenmill.core.cost import Costs
from tokenmill.core.errors import Unavailable
from tokenmill.core.events import EngineStats, Output, Ready, StepOutputs, Timing, WorkerFacts
from tokenmill.core.kv_events import CLEARED, STORED, KVEvent, KVEvents
from tokenmill.core.moves import Moved, Offer, Release
from tokenmill.core.policy import Forecast, Refusal, Verdict
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import Terms

READY = Ready("m", 512, 100, (2,), "id", 16, 64, max_num_seqs=8, max_num_batched_tokens=64)


def request(name: str, num_tokens: int = 3) -> Request:
    return Request(name, tuple(range(num_tokens)), SamplingParams(), 16, seed=1)


class Scene:
    """A gateway, with its books checked after every event."""

    def __init__(self, *, is_shared: bool = True) -> None:
        self.gateway = Gateway()
        self.gateway.is_shared = is_shared
        self.num_steps: dict[int, int] = {}
        self.attempts: dict[tuple[int, str], int] = {}

    def handle(self, event: object, now: float = 0.0) -> Effects:
        effects = self.gateway.handle(event, now)  # type: ignore[arg-type]
        self.gateway.check()
        self.attempts |= {(link, each.id): each.attempt for link, each in effects.submits}
        return effects

    def join(self, link: int, **facts: object) -> Effects:
        self.num_steps[link] = 0
        return self.handle(Joined(link, replace(READY, **facts)))  # type: ignore[arg-type]

    def open(self, *names: str) -> Effects:
        return self.handle(Opened([request(name) for name in names]))

    def step(self, link: int, *outputs: Output, now: float = 1.0) -> Effects:
        self.num_steps[link] += 1
        outputs = tuple(each._replace(attempt=self.attempts.get((link, each.request_id), 0)) for each in outputs)
        return self.handle(Stepped(link, StepOutputs(outputs, EngineStats(num_steps=self.num_steps[link]), now)))

    def token(self, link: int, *names: str) -> Effects:
        return self.step(link, *(Output(name, (7,), num_output=1) for name in names))


def names_of(effects: Effects) -> list[tuple[int, str]]:
    return [(link, each.id) for link, each in effects.submits]


def end(name: str, **facts: object) -> Output:
    return Output(name, finish_reason="length", **facts)  # type: ignore[arg-type]


def test_what_a_dead_engine_had_goes_on_in_the_next_with_its_tokens_and_its_first_numbers() -> None:
    scene = Scene()
    scene.join(0)
    scene.open("a", "b")
    first = Timing(0.0, 1.0, 2.0, -1.0)
    scene.step(0, Output("a", (5, 6), num_output=2, num_cached=3, timing=first))
    assert scene.handle(Left(0)).resumed == 2
    assert scene.gateway.num_waiting == 2
    assert not scene.open("c").submits, "no engine is there"
    submits = [each for _, each in scene.join(1).submits]
    assert [(each.id, each.output_tokens, each.is_resumed) for each in submits] == [
        ("a", (5, 6), True),
        ("b", (), True),
        ("c", (), False),
    ]
    later = Timing(0.0, 11.0, 12.0, 13.0)
    (output,) = scene.step(1, end("a", tokens=(7,), num_output=3, num_cached=0, timing=later)).outputs
    assert (output.num_cached, output.timing) == (3, replace(first, finished_s=13.0))
    (output,) = scene.step(1, Output("b", (9,), num_output=1, num_cached=1, timing=later)).outputs
    assert (output.num_cached, output.timing) == (1, later), "its first token is the second life's"


def test_what_was_over_for_its_client_is_not_resumed_and_counts_what_is_known() -> None:
    scene = Scene()
    scene.join(0)
    scene.open("a", "b")
    scene.token(0, "a", "b")
    assert scene.handle(GivenUp("a", "stop")).aborts == [(0, "a")]
    assert not scene.token(0, "a").outputs, "nobody listens"
    effects = scene.handle(Left(0))
    assert effects.resumed == 1
    (ended,) = effects.ended
    assert ended.output is not None and (ended.reason, ended.output.num_output) == ("stop", 2)
    assert not effects.outputs
    assert names_of(scene.join(1)) == [(1, "b")]


def test_one_who_leaves_while_no_engine_is_there_is_forgotten() -> None:
    scene = Scene()
    scene.join(0)
    scene.open("a", "b")
    scene.token(0, "a")
    scene.handle(Left(0))
    (ended,) = scene.handle(GivenUp("a", "abort")).ended
    assert ended.output is not None and ended.output.num_output == 1
    assert names_of(scene.join(1)) == [(1, "b")]


def test_resumed_requests_keep_their_places_and_come_before_who_waits() -> None:
    scene = Scene()
    scene.join(0, max_num_seqs=2)
    assert names_of(scene.open(*"abcde")) == [(0, "a"), (0, "b"), (0, "c")]
    scene.handle(Left(0))
    assert names_of(scene.join(1, max_num_seqs=2)) == [(1, "a"), (1, "b"), (1, "c")]
    assert names_of(scene.step(1, end("a", tokens=(1,)))) == [(1, "d")]
    scene.handle(Left(1))
    assert names_of(scene.join(2, max_num_seqs=1)) == [(2, "b")], "idle in two deaths: they are tried first"


def test_an_engine_with_fewer_tokens_open_gets_the_next_request_and_what_a_dead_one_had() -> None:
    scene = Scene(is_shared=False)
    scene.join(0)
    scene.join(1)
    assert names_of(scene.handle(Opened([request("a", 9)]))) == [(0, "a")]
    assert names_of(scene.open("b", "c", "d")) == [(1, "b"), (1, "c"), (1, "d")]
    scene.step(0, end("a", tokens=(1,)))
    assert names_of(scene.open("e")) == [(0, "e")]
    assert names_of(scene.handle(Left(1))) == [(0, "b"), (0, "c"), (0, "d")]
    assert scene.gateway.ready is not None


def test_places_are_those_of_all_engines() -> None:
    scene = Scene()
    scene.join(0, max_num_seqs=1)
    assert len(scene.open(*"abcdef").submits) == 2
    assert len(scene.join(1, max_num_seqs=1).submits) == 1
    scene.handle(Left(1))
    assert not scene.step(0, end("a", tokens=(1,))).submits, "no more places than rows are left"


def test_an_engine_that_would_give_other_answers_is_refused_beside_others_and_ends_what_it_cannot_resume() -> None:
    scene = Scene()
    scene.join(0)
    assert scene.join(1, numerics_id="other").refused
    scene.open("a", "b")
    scene.token(0, "a")
    scene.handle(Left(0))
    effects = scene.join(2, numerics_id="other")
    assert not effects.refused and names_of(effects) == [(2, "b")], "b has no tokens yet"
    assert [(each.request_id, each.error_kind) for each in effects.outputs] == [("a", "internal_error")]


def test_no_other_engine_joins_while_one_that_leaves_has_work() -> None:
    """If it died, what it had could go on nowhere else."""
    scene = Scene()
    scene.join(0)
    scene.open("a")
    scene.token(0, "a")
    scene.handle(Leaves(0))
    assert scene.join(1, numerics_id="other").refused
    assert scene.handle(Left(0)).resumed == 1
    assert names_of(scene.join(2)) == [(2, "a")]


def test_what_an_engine_did_for_another_front_end_is_not_counted_nor_progress() -> None:
    scene = Scene()
    before = EngineStats(num_steps=70, generation_tokens=900)
    for number in range(2):
        scene.join(number, stats=before)
        done = before._replace(num_steps=before.num_steps + 10, generation_tokens=before.generation_tokens + 100)
        scene.handle(Stepped(number, StepOutputs((), done, 1.0)))
        stats = scene.gateway.totals.stats
        assert (stats.num_steps, stats.generation_tokens) == (10 * number + 10, 100 * number + 100)
        scene.handle(Left(number))
        before = done  # the same engine comes again
    assert scene.gateway.totals.stats.generation_tokens == 200


def test_a_poison_request_is_tried_alone_and_given_up_after_two_deaths_there() -> None:
    """It ends each engine at once; the others lose no token and are told nothing."""
    scene = Scene()
    scene.join(0)
    scene.open("a", "poison", "b")
    scene.token(0, "a", "b")
    assert scene.handle(Left(0)).poisoned == 0
    assert len(scene.join(1).submits) == 3
    scene.handle(Left(1))  # all are suspect, the poison most: it was idle in both
    assert names_of(scene.join(2)) == [(2, "poison")]
    assert not scene.open("c").submits, "nobody else meanwhile"
    scene.handle(Left(2))
    assert names_of(scene.join(3)) == [(3, "poison")]
    effects = scene.handle(Left(3))
    assert effects.poisoned == 1
    assert [(each.request_id, each.finish_reason) for each in effects.outputs] == [("poison", "error")]
    assert names_of(scene.join(4)) == [(4, "a")]
    assert names_of(scene.token(4, "a")) == [(4, "b")], "cleared by its token; the next is tried"
    assert names_of(scene.token(4, "a", "b")) == [(4, "c")], "and then everybody"


def suspect() -> Scene:
    """A long prompt that had two engines that died before its first token."""
    scene = Scene()
    scene.join(0)
    scene.handle(Opened([request("s", 2000)]))
    scene.handle(Left(0))
    scene.join(1)
    scene.handle(Left(1))
    return scene


def die_at(scene: Scene, link: int, num_left: int) -> Effects:
    """An engine with nothing else computes a part of its prompt, and dies."""
    assert names_of(scene.join(link)) == [(link, "s")]
    scene.handle(Stepped(link, StepOutputs((), EngineStats(num_steps=3, num_prompt_left=num_left), 1.0)))
    return scene.handle(Left(link))


def test_a_suspect_whose_engines_die_at_one_place_of_its_prompt_is_given_up() -> None:
    scene = suspect()
    assert not die_at(scene, 2, 1500).poisoned
    assert die_at(scene, 3, 1400).poisoned, "the places are as near as steps under way"


def test_a_suspect_whose_engines_die_at_different_places_is_tried_again() -> None:
    scene = suspect()
    for link, num_left in ((2, 1500), (3, 900), (4, 1800)):
        assert not die_at(scene, link, num_left).poisoned
    assert names_of(scene.join(5)) == [(5, "s")]
    assert not scene.token(5, "s").ended and len(scene.gateway._entries["s"].tokens) == 1


def test_no_suspect_outlives_five_engines_in_which_it_was_alone() -> None:
    scene = suspect()
    for link, num_left in ((2, 1500), (3, 900), (4, 1800), (5, 300)):
        assert not die_at(scene, link, num_left).poisoned
    assert die_at(scene, 6, 1200).poisoned


def test_an_engine_that_was_told_to_leave_proves_nothing_against_what_it_had() -> None:
    scene = suspect()
    for link in range(2, 5):
        assert names_of(scene.join(link)) == [(link, "s")]
        scene.handle(Leaves(link))
        assert scene.handle(Left(link)).resumed == 1
    assert not die_at(scene, 5, 0).poisoned
    assert die_at(scene, 6, 0).poisoned, "others do"


def test_a_suspect_that_ends_an_engine_beside_others_is_tried_alone_next() -> None:
    scene = Scene()
    scene.join(0)
    scene.open("a", "poison")
    scene.token(0, "a", "poison")
    scene.handle(Left(0))
    scene.join(1)
    scene.handle(Left(1))
    assert names_of(scene.join(2)) == [(2, "a")]
    assert names_of(scene.token(2, "a")) == [(2, "poison")]
    assert scene.handle(Left(2)).poisoned == 0, "it was not alone"
    assert names_of(scene.join(3)) == [(3, "poison")]
    scene.handle(Left(3))
    scene.join(4)
    assert scene.handle(Left(4)).poisoned == 1
    assert names_of(scene.join(5)) == [(5, "a")]


def test_a_suspect_is_not_put_beside_requests_that_have_not_shown_themselves() -> None:
    """With two engines: the one that tries takes no others, and those it has first give a token."""
    scene = Scene(is_shared=False)
    scene.join(0)
    scene.handle(Opened([request("s", 9)]))
    scene.handle(Left(0))
    scene.join(1)
    scene.join(2)
    assert names_of(scene.open("a", "b")) == [(2, "a"), (2, "b")]
    scene.handle(Left(1))
    assert names_of(scene.open("c")) == [], "the one engine that is left is to try s"
    assert names_of(scene.token(2, "a")) == []
    assert names_of(scene.token(2, "a", "b")) == [(2, "s")]
    assert names_of(scene.token(2, "s")) == [(2, "c")]


def alone(scene: Scene, first: int, *causes: Cause, now: float = 100.0, gap_s: float = 10.0) -> list[int]:
    """Engines that have the suspect alone end so, one after the other: how many requests each end convicts."""
    convicted = []
    for link, cause in enumerate(causes, first):
        assert names_of(scene.join(link)) == [(link, "s")]
        convicted.append(scene.handle(Left(link, cause), now + gap_s * link).poisoned)
    return convicted


def test_ends_from_outside_make_nobody_suspect() -> None:
    """Two hundred kills in a row, though no engine gave a token: nobody is tried alone, nobody is convicted."""
    scene = Scene(is_shared=False)
    scene.join(0)
    scene.open("a", "b")
    for link in range(200):
        assert not scene.handle(Left(link, Cause.OUTSIDE), 0.3 * link).poisoned
        assert names_of(scene.join(link + 1)) == [(link + 1, "a"), (link + 1, "b")]


def test_an_end_from_outside_in_a_trial_proves_nothing_and_the_trial_is_made_again() -> None:
    scene = suspect()
    outside = [Cause.OUTSIDE] * 20
    assert alone(scene, 2, *outside, Cause.FAULT, *outside, Cause.FAULT) == [0] * 41 + [1]


def test_a_death_that_nobody_explains_counts_unless_others_die_in_the_same_seconds() -> None:
    """An engine elsewhere whose link ends may have been killed, with others of its machine."""
    assert alone(suspect(), 2, Cause.UNKNOWN, Cause.UNKNOWN) == [0, 1]
    scene = suspect()
    for link in range(2, 40, 2):
        assert names_of(scene.join(link)) == [(link, "s")]
        scene.join(link + 1)
        scene.handle(Left(link + 1), 100.0 * link)
        assert not scene.handle(Left(link), 100.0 * link + 1).poisoned
    assert alone(scene, 40, Cause.UNKNOWN, Cause.UNKNOWN, now=10_000.0) == [0, 1]


def test_requests_that_end_the_engines_they_are_tried_in_do_not_shelter_each_other_for_ever() -> None:
    """Each engine of another machine dies in a trial, within the same seconds as the other's."""
    scene = Scene(is_shared=False)
    scene.join(0)
    scene.open("a", "b")
    scene.handle(Left(0, Cause.FAULT))
    scene.join(1)
    scene.handle(Left(1, Cause.FAULT))
    num_convicted, link = 0, 2
    while num_convicted < 2 and link < 100:
        scene.join(link)
        scene.join(link + 1)
        num_convicted += scene.handle(Left(link, Cause.UNKNOWN), float(link)).poisoned
        num_convicted += scene.handle(Left(link + 1, Cause.UNKNOWN), link + 0.5).poisoned
        link += 2
    assert num_convicted == 2 and link <= 2 + 2 * (MAX_UNBLAMED_DEATHS + 2)


def test_faults_of_several_engines_at_once_speak_less_against_a_request() -> None:
    """Something that all have in common may be the cause; five such deaths alone are enough all the same."""
    scene = suspect()
    convicted = []
    for link in range(2, 12, 2):
        assert names_of(scene.join(link)) == [(link, "s")]
        scene.join(link + 1)
        scene.handle(Left(link + 1, Cause.FAULT), 100.0 * link)
        convicted.append(scene.handle(Left(link, Cause.FAULT), 100.0 * link + 1).poisoned)
    assert convicted == [0, 0, 0, 0, 1]


def test_kills_of_other_engines_do_not_shelter_a_request_that_crashes_its_own() -> None:
    scene = suspect()
    convicted = []
    for link in (2, 4):
        assert names_of(scene.join(link)) == [(link, "s")]
        scene.join(link + 1)
        scene.handle(Left(link + 1, Cause.OUTSIDE), 100.0)
        convicted.append(scene.handle(Left(link, Cause.FAULT), 100.1).poisoned)
    assert convicted == [0, 1]


def test_suspects_are_tried_in_all_free_engines_at_once() -> None:
    scene = Scene(is_shared=False)
    scene.join(0)
    scene.open("a", "b", "c", "d")
    scene.handle(Left(0, Cause.FAULT))
    scene.join(1)
    scene.handle(Left(1, Cause.FAULT))
    assert names_of(scene.join(2)) == [(2, "a")]
    assert names_of(scene.join(3)) == [(3, "b")]
    assert names_of(scene.join(4)) == [(4, "c")]
    assert not scene.open("e").submits, "nobody else where one is tried"
    assert names_of(scene.token(3, "b")) == [(3, "d")]
    assert names_of(scene.token(2, "a")) == [(2, "e")], "it is cleared, and its engine serves all again"


@pytest.mark.parametrize(("given_s", "start_s", "limit_s"), [(None, 2.0, 30.0), (None, 20.0, 60.0), (5.0, 20.0, 5.0)])
def test_what_waits_is_ended_by_the_time_without_an_engine_however_many_starts_fail(
    given_s: float | None, start_s: float, limit_s: float
) -> None:
    """Thirty seconds, or three starts like the last good one, or as the operator says: from the first start that fails,
    not from the end of the last engine, after which nobody may have tried to start one."""
    scene = Scene()
    scene.gateway.start_limit.limit_s = given_s
    scene.handle(Joined(0, READY, start_s), 50.0)
    scene.open("a")
    scene.handle(Left(0), 60.0)
    for number in range(100):
        assert not scene.handle(Left(1 + number), 1000.0 + limit_s * number / 100).outputs
    (output,) = scene.handle(Left(101), 1000.0 + limit_s).outputs
    assert (output.request_id, output.finish_reason) == ("a", "error")
    assert not scene.gateway.num_open


def test_starts_that_fail_while_nothing_waits_do_not_count() -> None:
    """What comes an hour later has its time as if they had not been."""
    scene = Scene()
    scene.join(0)
    scene.handle(Left(0), 100.0)
    scene.handle(Left(1), 101.0)
    scene.handle(Left(2), 200.0)
    scene.open("a")
    assert not scene.handle(Left(3), 229.0).outputs
    assert scene.handle(Left(4), 230.0).outputs


def test_a_good_engine_begins_the_time_without_one_anew() -> None:
    scene = Scene()
    scene.join(0)
    scene.open("a")
    for number in range(0, 100, 2):
        now = 20.0 * number
        scene.handle(Left(number, Cause.OUTSIDE), now)
        scene.handle(Left(number + 1), now + 19.0)
        scene.join(number + 2)
    assert scene.gateway.num_open == 1


def test_engines_that_never_start_beside_one_that_serves_count_for_nothing_once_it_dies() -> None:
    scene = Scene()
    scene.join(0)
    scene.open("a")
    for number in range(1, 100):
        scene.handle(Left(number), float(number))
    scene.handle(Left(0), 100.0)
    assert not scene.handle(Left(100), 101.0).outputs and scene.gateway.num_open == 1


def test_closing_ends_everything_open_with_the_reason() -> None:
    scene = Scene()
    scene.join(0, max_num_seqs=1)
    scene.open("a", "b", "c")
    effects = scene.handle(Closed(Unavailable("over")))
    assert {(each.request_id, each.error, each.error_kind) for each in effects.outputs} == {
        (name, "over", "unavailable_error") for name in "abc"
    }
    assert not scene.gateway.num_open


@pytest.mark.parametrize("number", [0, 9])
def test_words_of_an_engine_that_has_gone_are_nobodys(number: int) -> None:
    scene = Scene()
    scene.join(0)
    scene.open("a")
    scene.handle(Left(0))
    scene.num_steps[number] = 0
    effects = scene.token(number, "a")
    assert not effects.outputs and not effects.ended


def test_an_engine_that_leaves_gets_nothing_more_and_finishes_what_it_has() -> None:
    scene = Scene()
    scene.join(0)
    scene.join(1)
    assert names_of(scene.open("a", "b")) == [(0, "a"), (1, "b")]
    scene.handle(Leaves(0))
    assert names_of(scene.open("c")) == [(1, "c")]
    assert scene.step(0, end("a", num_output=1)).ended
    assert not scene.handle(Left(0)).resumed
    scene.handle(Leaves(1))
    assert scene.gateway.ready is None and names_of(scene.open("d")) == []
    assert names_of(scene.join(2)) == [(2, "d")]
    assert scene.handle(Left(1)).resumed == 2, "it died before it was done"


def test_a_request_whose_time_is_over_ends_with_what_it_has() -> None:
    """With tokens it ends as at its limit, and says why; without it fails; its engine is told."""
    scene = Scene()
    scene.join(0)
    terms = Terms(timeout_s=5.0)
    scene.handle(Opened([replace(request(name), terms=terms, arrival_s=1.0) for name in "ab"]), 1.0)
    assert scene.gateway.next_due_s == 6.0
    scene.token(0, "a")
    assert not scene.handle(Ticked(), 5.9).outputs
    effects = scene.handle(Ticked(), 6.0)
    one, other = effects.outputs
    assert (one.request_id, one.finish_reason, one.error, one.num_output) == ("a", "length", "timeout", 1)
    assert (other.request_id, other.finish_reason, other.error_kind) == ("b", "error", "timeout_error")
    assert "longer than the 5 s" in other.error
    assert effects.aborts == [(0, "a"), (0, "b")] and effects.expired == 2 and scene.gateway.num_open == 2
    late = scene.step(0, end("a", num_output=1), end("b"))
    assert not late.outputs and [each.reason for each in late.ended] == ["length", "error"]
    assert scene.gateway.num_open == 0 and scene.gateway.next_due_s is None


def test_bounds_of_time_of_requests_that_are_over_are_forgotten() -> None:
    """However far off they are: a day's bound on each of many short calls takes no memory for a day."""
    scene = Scene()
    scene.join(0)
    terms = Terms(timeout_s=86_400.0, queue_s=5_000.0)
    scene.handle(Opened([replace(request("stays"), terms=terms)]))
    for number in range(1000):
        scene.handle(Opened([replace(request(f"r{number}"), terms=terms)]))
        scene.step(0, end(f"r{number}", num_output=1))
    assert len(scene.gateway._deadlines._heap) < 80
    assert scene.gateway.next_due_s == 5_000.0


def test_who_waits_for_a_place_longer_than_it_wants_to_is_refused_then() -> None:
    """One that an engine has goes on: the engine ends it itself, if it has not begun."""
    scene = Scene()
    scene.join(0, max_num_seqs=1)
    names = "abcdefgh"
    scene.handle(Opened([replace(request(name), terms=Terms(queue_s=2.0)) for name in names]))
    num_waiting = scene.gateway.request_queue.num_waiting
    assert 0 < num_waiting < len(names)
    assert not scene.handle(Ticked(), 1.9).outputs
    effects = scene.handle(Ticked(), 2.0)
    assert {(each.finish_reason, each.error_kind) for each in effects.outputs} == {("error", "overloaded_error")}
    assert len(effects.outputs) == effects.expired == num_waiting and scene.gateway.request_queue.num_waiting == 0
    assert scene.gateway.num_open == len(names) - num_waiting


def test_a_forecast_is_compared_with_what_came() -> None:
    """And the next are corrected by how far off it was, little at a time."""
    scene = Scene()
    scene.join(0)
    for number in range(60):
        name = f"r{number}"
        verdict = Verdict(None, Forecast(0.0, 1.0, 0.0), 0.5)
        scene.handle(Opened([replace(request(name), arrival_s=0.0)], "", verdict), 0.0)
        effects = scene.step(0, Output(name, (7,), num_output=1), now=1.3)
        assert effects.forecasts == [(1.0, 1.3)]
        scene.step(0, end(name))
    assert scene.gateway.request_queue.calibration.factor == pytest.approx(1.5, abs=0.25)


def test_the_forecast_of_further_tokens_is_compared_with_the_answer_that_came() -> None:
    """As it ends: tokens that come more slowly than told raise the next forecasts and their margin. One token alone
    says nothing."""
    scene = Scene()
    scene.join(0)
    calibration = scene.gateway.request_queue.tpot_calibration
    margin = calibration.margin
    for number in range(60):
        name = f"r{number}"
        verdict = Verdict(None, Forecast(0.0, 1.0, 0.1), 0.5)
        made = replace(request(name), arrival_s=0.0, terms=Terms(tpot_s=0.1))
        scene.handle(Opened([made], "", verdict), 0.0)
        scene.step(0, Output(name, (7,), num_output=1), now=1.0)
        if number % 2:
            scene.step(0, Output(name, (7, 7), num_output=3), now=1.3)
        scene.step(0, end(name), now=9.0)
        if not number:
            assert (calibration.factor, calibration.margin) == (1.0, margin)
    assert calibration.factor == pytest.approx(1.5, abs=0.25) and calibration.margin > margin


def test_what_a_shadow_lets_in_corrects_no_forecast() -> None:
    """It would not have been served: what becomes of it says nothing of those that are."""
    scene = Scene()
    scene.join(0)
    verdict = Verdict(Refusal("ttft", "", 1.0), Forecast(0.0, 1.0, 0.0), 2.0)
    scene.handle(Opened([request("a")], "", verdict), 0.0)
    assert not scene.step(0, Output("a", (7,), num_output=1), now=9.0).forecasts
    assert scene.gateway.request_queue.calibration.factor == 1.0


def test_a_prefix_that_another_engine_has_is_taken_from_there() -> None:
    """The peer offers it, and the request goes to the idle engine, which takes it; what that took is noted."""
    scene = Scene(is_shared=False)
    scene.gateway = Gateway(new_ticket=lambda: "t")
    costs = Costs(step_s=1e-3, token_s=1e-3)
    for link in (0, 1):
        worker = WorkerFacts(f"w{link}", kv_address="here")
        scene.join(link, max_num_batched_tokens=512, worker=worker, stats=EngineStats(costs=costs))
    (made,) = with_keys([request("b", 1024)], READY)
    for link, events in ((0, (KVEvent(CLEARED),)), (1, (KVEvent(CLEARED), KVEvent(STORED, made.keys)))):
        scene.handle(EngineMessage(link, KVEvents(0, events)))
    scene.handle(Opened([request("x", 1)]))
    (busy,) = scene.handle(Opened([replace(made, id="busy")])).submits
    assert busy[0] == 1, "where its prefix is"
    for name in "cdefgh":
        scene.gateway._links[1].give(Entry(request(name, 512)))
    effects = scene.gateway.handle(Opened([made]), 0.0)
    ((link, sent),) = effects.submits
    assert link == 0 and sent.source is not None and sent.source.worker == "w1"
    keys = tuple(made.keys[at : at + 16] for at in range(0, 63 * 16, 16))
    assert effects.tells[0] == (1, Offer("t", "", keys))
    handoff_s = scene.gateway.pools._handoff_s
    moved = scene.gateway.handle(EngineMessage(0, Moved("b", 0, 1008)), 0.2)
    assert scene.gateway.pools._handoff_s == handoff_s, "nobody was stopped for it"
    assert (1, Release("t")) in moved.tells
