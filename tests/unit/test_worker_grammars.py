"""Masks beside the steps: each is there for the draw that needs it, and nothing waits for one that will not come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from grammar_cases import END, VOCAB_SIZE, Characters, regex, vocabulary
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Drafts, Introduction
from tokenmill.ops.draws import ALWAYS, Mask
from tokenmill.ops.reference import ReferenceOps
from tokenmill.text.grammar import matcher as matchers
from tokenmill.text.grammar.matcher import Matcher
from tokenmill.worker import grammars as grammars_module
from tokenmill.worker.grammars import Constrained, DraftMasks, Grammars

NONE = np.zeros(0, np.int32)
text = Characters()


@pytest.fixture
def grammars(monkeypatch):
    """That put nobody off for how long a mask takes here."""
    monkeypatch.setattr(grammars_module, "STEP_S", math.inf)
    made = Grammars(ReferenceOps(), VOCAB_SIZE, vocabulary)
    yield made
    made.close()


def intro(grammar: str, output: str = "", **settings) -> Introduction:
    return Introduction((1,), tuple(text.encode(output)), SamplingParams(grammar=grammar, **settings), 0, 0, (END,))


def introduce(grammars: Grammars, intro: Introduction, allowed_ids: np.ndarray = NONE) -> Constrained:
    one = grammars.introduce(intro, allowed_ids)
    grammars.hand_over()
    return one


def advance(grammars: Grammars, several: list[Constrained], tokens: str) -> None:
    grammars.advance([(one, [token]) for one, token in zip(several, text.encode(tokens), strict=True)])


def ids(*strings: str) -> np.ndarray:
    return np.array([token for string in strings for token in text.encode(string)], np.int32)


def allowed(mask: Mask, position: int) -> list[int]:
    assert mask.wait(position)
    bits = np.unpackbits(mask.words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return np.flatnonzero(bits).tolist()


def until(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 30
    while not holds() and time.monotonic() < end_s:
        time.sleep(1e-3)
    return holds()


def test_each_token_makes_the_next_mask(grammars):
    """The mask of a position is published with it, and says nothing of the next one."""
    one = introduce(grammars, intro(regex("ab|cd")))
    assert allowed(one.mask, 0) == text.encode("ac") and one.mask.until[0] == 1
    advance(grammars, [one], "c")
    assert allowed(one.mask, 1) == text.encode("d") and one.mask.until[0] == 2
    advance(grammars, [one], "d")
    assert allowed(one.mask, 2) == [END]


def test_a_resumed_sequence_goes_on_where_it_was(grammars):
    one = introduce(grammars, intro(regex("abc"), "ab"))
    assert allowed(one.mask, 2) == text.encode("c") and one.mask.until[0] == 3


def test_an_ended_sequence_lets_its_overshoot_draw(grammars):
    """A step that was planned before the end is known waits for nothing; what it draws is dropped."""
    one = introduce(grammars, intro(regex("a?")))
    grammars.advance([(one, [END])])
    assert until(lambda: one.mask.until[0] == ALWAYS) and not one.error


def test_a_row_of_a_failed_step_lets_later_ones_draw(grammars):
    one = introduce(grammars, intro(regex("abc")))
    grammars.give_up(one)
    assert until(lambda: one.mask.until[0] == ALWAYS) and not one.error
    other = introduce(grammars, intro(regex("abc")))
    grammars.advance([(other, [-1])])  # its logits were not finite
    assert until(lambda: other.mask.until[0] == ALWAYS) and not other.error


def test_closing_lets_all_draw(grammars):
    one = introduce(grammars, intro(regex("abc")))
    grammars.close()
    assert one.mask.until[0] == ALWAYS


def test_an_error_ends_one_sequence_and_lets_it_draw(grammars):
    """A token that the grammar does not allow, which only a fault can bring; the other goes on."""
    one, other = (introduce(grammars, intro(regex("abc"))) for _ in range(2))
    advance(grammars, [one, other], "xa")
    assert until(lambda: one.mask.until[0] == ALWAYS) and "left its grammar" in one.error
    assert allowed(other.mask, 1) == text.encode("b") and not other.error


def test_other_settings_narrow_the_mask(grammars):
    """allowed_token_ids takes away, down to an error where nothing is left; under ignore_eos the end waits for the
    grammar's."""
    one = introduce(grammars, intro(regex("[a-d]{2}")), ids("bcx"))
    assert allowed(one.mask, 0) == text.encode("bc")
    two = introduce(grammars, intro(regex("[a-d]")), ids("x"))
    assert until(lambda: two.mask.until[0] == ALWAYS) and "allowed_token_ids" in two.error
    ends = introduce(grammars, intro(regex("ab?")))
    advance(grammars, [ends], "a")
    assert allowed(ends.mask, 1) == [*text.encode("b"), END]
    goes_on = introduce(grammars, intro(regex("ab?"), ignore_eos=True))
    advance(grammars, [goes_on], "a")
    assert allowed(goes_on.mask, 1) == text.encode("b")
    advance(grammars, [goes_on], "b")
    assert allowed(goes_on.mask, 2) == [END]


def ahead(grammars: Grammars, one: Constrained, position: int, drafts: str, end: bool = False) -> DraftMasks:
    masks = grammars.take_drafts(one, position, (*text.encode(drafts), *([END] if end else [])))
    grammars.hand_over()
    return masks


def known(masks: DraftMasks) -> list[list[int]]:
    """Of the draws behind drafts that have one, the mask."""
    assert until(lambda: all(mask.until[0] == ALWAYS for mask in masks.masks))
    return [allowed(mask, masks.position) for mask in masks.masks[: masks.known]]


def test_draws_behind_drafts_have_masks(grammars):
    """Made from the tokens before them, be these known already or not, and from the drafts; then the sequence goes on
    from what was accepted."""
    one = introduce(grammars, intro(regex("a(b[cd]|x)*y")))
    first = ahead(grammars, one, 1, "bcxb")
    assert first.masks[0].until[0] == 0
    advance(grammars, [one], "a")
    assert known(first) == [text.encode(each) for each in ("cd", "bxy", "bxy", "cd")]
    assert allowed(one.mask, 1) == text.encode("bxy")
    grammars.advance([(one, text.encode("bd"))])  # of the drafts one was right
    assert allowed(one.mask, 3) == text.encode("bxy")
    assert known(ahead(grammars, one, 3, "xb")) == [text.encode("bxy"), text.encode("cd")]
    grammars.advance([(one, text.encode("xbc"))])
    assert allowed(one.mask, 6) == text.encode("bxy") and not one.error


def test_behind_a_draft_that_cannot_come_a_draw_is_of_no_use(grammars):
    """One that the grammar or other settings forbid, one that ends the answer, or no sequence any more: nothing waits,
    and those before are known."""
    one = introduce(grammars, intro(regex("ab+")))
    assert known(ahead(grammars, one, 0, "acb")) == [text.encode("b")]
    assert known(ahead(grammars, one, 0, "x")) == []
    assert known(ahead(grammars, one, 0, "abb", end=True)) == [text.encode("b"), *[[*text.encode("b"), END]] * 2]
    narrow = introduce(grammars, intro(regex("[ab]{2}c")), ids("a"))
    assert (
        known(ahead(grammars, narrow, 0, "aa")) == [text.encode("a")] and known(ahead(grammars, narrow, 0, "b")) == []
    )
    pending = ahead(grammars, one, 1, "b")
    grammars.give_up(one)
    assert known(pending) == [] and known(ahead(grammars, one, 1, "b")) == []


def test_an_error_in_drafts_is_not_the_sequences(grammars, monkeypatch):
    """They leave the matcher where it cannot go on; the sequence goes on with another."""
    one = introduce(grammars, intro(regex("ab*c")))
    assert allowed(one.mask, 0) == text.encode("a")
    step, failing = Matcher.step, [False]

    def leave(self: Matcher, token: int, address: int, num_bytes: int) -> float:
        return step(self, text.encode("z")[0] if failing[0] else token, address, num_bytes)

    monkeypatch.setattr(Matcher, "step", leave)
    failing[0] = True
    assert known(ahead(grammars, one, 0, "ab")) == []
    failing[0] = False
    grammars.advance([(one, text.encode("ab"))])
    assert allowed(one.mask, 2) == text.encode("bc") and not one.error
    assert known(ahead(grammars, one, 2, "b")) == [text.encode("bc")]


def test_drafts_take_what_time_masks_leave(grammars, monkeypatch):
    """What they take is charged, and counts for no bound of the sequence."""
    one = introduce(grammars, intro(regex("[ab]{9}")))
    assert allowed(one.mask, 0)
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    assert len(known(ahead(grammars, one, 0, "abab"))) == 4
    assert one.spent_s > 0 and one.slow_s == 0
    monkeypatch.setattr(grammars_module, "STEP_S", 0.0)
    assert len(known(ahead(grammars, one, 0, "abab"))) == 1


def test_what_a_grammar_forces_is_proposed(grammars):
    """With the first of such tokens, and no more where several may come, where another was drawn, or where nobody
    wants drafts."""
    for drafts in (True, False):
        grammars.drafts = drafts
        one = introduce(grammars, intro(regex("(abcd|xy)e?")))
        assert allowed(one.mask, 0) == text.encode("ax") and one.follow_up(text.encode("a")) is None
        advance(grammars, [one], "a")
        assert allowed(one.mask, 1) == text.encode("b")
        found = one.follow_up(text.encode("b"))
        assert found == (Drafts(tuple(text.encode("cd")), "grammar", (1.0, 1.0)) if drafts else None)
        grammars.advance([(one, text.encode("bc"))])
        assert allowed(one.mask, 3) == text.encode("d") and one.follow_up(text.encode("d")) is None


def test_of_a_long_text_that_must_come_so_much_is_proposed_as_can_be_of_use(grammars):
    grammars.drafts = True
    one = introduce(grammars, intro(regex("a{5000}")))
    assert allowed(one.mask, 0) == text.encode("a")
    assert len(one.follow_up(text.encode("a")).tokens) == 127
    assert len(one.follow_up(text.encode("a" * 65)).tokens) == 63


def test_grammars_are_prepared_once_and_kept_in_bounds(monkeypatch):
    """What is given up is made again when it is needed; the vocabulary is loaded once."""
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 2)
    loads = []
    grammars = Grammars(ReferenceOps(), VOCAB_SIZE, lambda: loads.append(1) or vocabulary())
    built = []
    build = grammars._build
    monkeypatch.setattr(Grammars, "_build", lambda self, grammar: built.append(grammar) or build(grammar))
    a, b, c = (regex(letter) for letter in "abc")
    took_s = [grammars.prepare(grammar) for grammar in (a, b, a, c, a, b)]
    assert [bool(spent_s) for spent_s in took_s] == [True, True, False, True, False, True]
    assert built == [a, b, c, b] and len(loads) == 1
    one = introduce(grammars, intro(c))
    assert allowed(one.mask, 0) == text.encode("c") and built[-1] == c
    grammars.close()


def test_a_bad_grammar_is_refused_when_prepared(grammars):
    with pytest.raises(InvalidRequest, match="cannot be used"):
        grammars.prepare(regex("(a"))


def test_no_sequence_fails_for_what_others_found_out(monkeypatch):
    """Copies share what the library knows of a grammar, which is bounded: where it is full, one starts afresh and goes
    on as if it had been alone."""
    monkeypatch.setattr(matchers, "_MAX_LEXER_STATES", 300)
    grammars = Grammars(ReferenceOps(), VOCAB_SIZE, vocabulary)
    grammar = regex(".*a.{12}")
    rng = np.random.default_rng(0)
    for _ in range(10):
        one = introduce(grammars, intro(grammar, max_tokens=None))
        for position, token in enumerate(rng.choice(ids("ab"), 60).tolist()):
            assert len(allowed(one.mask, position)) > 90
            grammars.advance([(one, [token])])
        assert allowed(one.mask, 60) and not one.error, one.error
    grammars.close()


def test_what_failed_at_a_price_is_not_kept(grammars, monkeypatch):
    """The next one with that grammar starts from nothing. What failed for little leaves the grammar to others."""
    grammars.prepare(grammar := regex("abc"))

    def fail() -> None:
        one = introduce(grammars, intro(grammar))
        assert allowed(one.mask, 0) == text.encode("a")
        advance(grammars, [one], "x")
        assert until(lambda: one.mask.until[0] == ALWAYS) and one.is_invalid

    fail()
    assert grammar in grammars._prepared
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "_COSTLY_S", 0.0)
    fail()
    assert grammar not in grammars._prepared


def test_kept_grammars_are_bounded_by_bytes(grammars, monkeypatch):
    """As the heap has grown, whatever their number; what is at work goes on."""
    used = [0]
    monkeypatch.setattr(grammars_module, "heap_bytes", lambda: used[0])
    grammars.prepare(a := regex("ab"))
    one = introduce(grammars, intro(a))
    assert allowed(one.mask, 0) and a in grammars._prepared
    used[0] += grammars_module.MAX_GROWN_BYTES + 1
    grammars.prepare(regex("cd"))
    assert not grammars._prepared
    advance(grammars, [one], "a")
    assert allowed(one.mask, 1) == text.encode("b") and not one.error


@pytest.mark.parametrize("is_its_own", [True, False])
def test_an_answer_ends_only_for_what_its_own_matcher_holds(grammars, monkeypatch, is_its_own):
    """Where dropping the kept grammars frees nothing: the one at work gives its matcher up, and goes on with a new one
    if that frees nothing either."""
    base, full = 1000, 1000 + grammars_module.MAX_GROWN_BYTES + 1
    used = [base]
    monkeypatch.setattr(grammars_module, "heap_bytes", lambda: used[0])
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "_COSTLY_S", 0.0)
    one = introduce(grammars, intro(regex("abc")))
    assert allowed(one.mask, 0)
    monkeypatch.setattr(grammars_module, "heap_bytes", lambda: base if is_its_own and one.matcher is None else full)
    advance(grammars, [one], "a")
    if is_its_own:
        assert until(lambda: one.mask.until[0] == ALWAYS) and "MiB" in one.error and one.is_invalid
    else:
        assert allowed(one.mask, 1) == text.encode("b") and not one.error


def test_the_heap_is_not_measured_for_each_slow_mask(grammars, monkeypatch):
    measured = []
    monkeypatch.setattr(grammars_module, "heap_bytes", lambda: measured.append(1) or 0)
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "_COSTLY_S", 1e6)
    one = introduce(grammars, intro(regex("a{9}")))
    assert allowed(one.mask, 0)
    measured.clear()
    for position in range(1, 9):
        advance(grammars, [one], "a")
        assert allowed(one.mask, position)
    assert not measured


def test_an_answers_slow_masks_are_bounded_together(grammars, monkeypatch):
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "SPENT_S", -1.0)
    one = introduce(grammars, intro(regex("abc")))
    advance(grammars, [one], "a")
    assert until(lambda: one.mask.until[0] == ALWAYS) and "processor time" in one.error and one.is_invalid


def test_a_step_waits_for_one_slow_mask(grammars, monkeypatch):
    """What was asked for with it is put off, whatever it would have cost, and is not failed; those that have cost least
    come before it, and the end of an answer needs no mask."""
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "STEP_S", 0.0)
    several = [introduce(grammars, intro(regex("abc"))) for _ in range(4)]
    assert all(allowed(one.mask, 0) for one in several)
    for one, slow_s in zip(several, (0.03, 0.01, 0.02, 0.04), strict=True):
        one.slow_s = slow_s
    grammars.advance([*((one, text.encode("a")) for one in several[:3]), (several[3], [END])])
    assert until(lambda: all(one.mask.until[0] for one in several))
    assert allowed(several[1].mask, 1) == text.encode("b")
    assert until(lambda: all(several[place].mask.until[0] == ALWAYS for place in (0, 2, 3)))
    assert [one.lacks_mask for one in several] == [True, False, True, False] and not any(one.error for one in several)


def test_sequences_that_begin_together_are_put_off_too(grammars, monkeypatch):
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "STEP_S", 0.0)
    several = [grammars.introduce(intro(regex("abc"), output), NONE) for output in ("", "ab", "a")]
    grammars.hand_over()
    assert allowed(several[1].mask, 2) == text.encode("c")  # who has gone on for longest comes first
    assert until(lambda: several[0].mask.until[0] == several[2].mask.until[0] == ALWAYS)
    assert [one.lacks_mask for one in several] == [True, False, True]


def test_what_slow_masks_took_goes_with_a_sequence_that_is_introduced_again(grammars, monkeypatch):
    """It counts for the bound, and for who comes first."""
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    resumed = intro(regex("abc"), "a")
    over = introduce(grammars, replace(resumed, slow_s=0.5))
    assert until(lambda: over.mask.until[0] == ALWAYS) and "processor time" in over.error
    one = introduce(grammars, replace(resumed, slow_s=0.01))
    assert allowed(one.mask, 1) == text.encode("b") and one.slow_s > 0.01
    monkeypatch.setattr(grammars_module, "STEP_S", 0.0)
    several = [grammars.introduce(replace(resumed, slow_s=slow_s), NONE) for slow_s in (0.02, 0.0, 0.01)]
    grammars.hand_over()
    assert until(lambda: several[0].mask.until[0] == several[2].mask.until[0] == ALWAYS)
    assert [one.lacks_mask for one in several] == [True, False, True]


def test_the_first_mask_of_a_sequence_that_is_introduced_again_counts(grammars, monkeypatch):
    grammars.prepare(grammar := regex("abc"))
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "SPENT_S", -1.0)
    one = introduce(grammars, intro(grammar, "ab"))
    assert until(lambda: one.mask.until[0] == ALWAYS) and "processor time" in one.error


def test_one_slow_mask_is_no_error(grammars, monkeypatch):
    """A machine that is held up counts a mask as slow that is none."""
    step = Matcher.step
    monkeypatch.setattr(Matcher, "step", lambda self, token, *place: (step(self, token, *place), 0.05)[1])
    one = introduce(grammars, intro(regex("abc")))
    advance(grammars, [one], "a")
    assert allowed(one.mask, 1) == text.encode("b") and one.slow_s == 0.05
    advance(grammars, [one], "b")
    assert until(lambda: one.mask.until[0] == ALWAYS) and "took 0.1 s of processor time" in one.error


def test_no_mask_is_made_after_the_last_token(grammars):
    """Of max_tokens, also where some were drawn before. Whoever draws nevertheless is put off, and never without a
    mask."""
    for output, position in (("", 0), ("a", 1)):
        one = introduce(grammars, intro(regex("abcd"), output, max_tokens=position + 2))
        assert allowed(one.mask, position) == text.encode("abcd"[position])
        advance(grammars, [one], "abcd"[position])
        assert allowed(one.mask, position + 1) == text.encode("abcd"[position + 1]) and not one.lacks_mask
        advance(grammars, [one], "abcd"[position + 1])
        assert until(lambda one=one: one.mask.until[0] == ALWAYS) and one.lacks_mask and not one.error


def test_what_a_mask_took_is_known_before_it_is_drawn_by(monkeypatch):
    """So that the row that draws by it tells."""
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    known: list[float] = []

    class Recording(ReferenceOps):
        def publish(self, mask: Mask, until: int) -> None:
            known.append(one.spent_s)
            super().publish(mask, until)

    grammars = Grammars(Recording(), VOCAB_SIZE, vocabulary)
    one = grammars.introduce(intro(regex("abc")), NONE)
    grammars.hand_over()
    assert allowed(one.mask, 0)
    advance(grammars, [one], "a")
    assert allowed(one.mask, 1)
    grammars.close()
    assert 0 < known[0] < known[1]


def test_what_slow_masks_took_is_charged_once(grammars, monkeypatch):
    """Of answers that go on as of those that fail."""
    one = introduce(grammars, intro(regex("abc")))
    assert allowed(one.mask, 0)
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    charged_s = one.charge()
    advance(grammars, [one], "a")
    assert allowed(one.mask, 1)
    charged_s += one.charge()
    advance(grammars, [one], "x")
    assert until(lambda: one.mask.until[0] == ALWAYS) and one.error
    assert charged_s + one.charge() == pytest.approx(one.spent_s) and one.spent_s > 0 and one.charge() == 0
