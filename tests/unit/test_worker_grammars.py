"""Masks beside the steps: each is there for the draw that needs it, and nothing waits for one that will not come."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from grammar_cases import END, VOCAB_SIZE, Characters, regex, vocabulary
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Introduction
from tokenmill.ops.draws import ALWAYS, Mask
from tokenmill.ops.reference import ReferenceOps
from tokenmill.text.grammar import matcher as matchers
from tokenmill.worker import grammars as grammars_module
from tokenmill.worker.grammars import Grammars

NONE = np.zeros(0, np.int32)
text = Characters()


@pytest.fixture
def grammars():
    made = Grammars(ReferenceOps(), VOCAB_SIZE, vocabulary)
    yield made
    made.close()


def intro(grammar: str, output: str = "", **settings) -> Introduction:
    return Introduction((1,), tuple(text.encode(output)), SamplingParams(grammar=grammar, **settings), 0, 0, (END,))


def ids(*strings: str) -> np.ndarray:
    return np.array([token for string in strings for token in text.encode(string)], np.int32)


def allowed(mask: Mask, position: int) -> list[int]:
    assert mask.wait(position)
    bits = np.unpackbits(mask.words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return np.flatnonzero(bits).tolist()


def until(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 5
    while not holds() and time.monotonic() < end_s:
        time.sleep(1e-3)
    return holds()


def test_each_token_makes_the_next_mask(grammars):
    """The mask of a position is published with it, and says nothing of the next one."""
    one = grammars.introduce(intro(regex("ab|cd")), NONE)
    assert allowed(one.mask, 0) == text.encode("ac") and one.mask.until[0] == 1
    grammars.advance([None, one], [7, text.encode("c")[0]])
    assert allowed(one.mask, 1) == text.encode("d") and one.mask.until[0] == 2
    grammars.advance([one], text.encode("d"))
    assert allowed(one.mask, 2) == [END]


def test_a_resumed_sequence_goes_on_where_it_was(grammars):
    one = grammars.introduce(intro(regex("abc"), "ab"), NONE)
    assert allowed(one.mask, 2) == text.encode("c") and one.mask.until[0] == 3


def test_an_ended_sequence_lets_its_overshoot_draw(grammars):
    """A step that was planned before the end is known waits for nothing; what it draws is dropped."""
    one = grammars.introduce(intro(regex("a?")), NONE)
    grammars.advance([one], [END])
    assert until(lambda: one.mask.until[0] == ALWAYS) and not one.error


def test_a_row_of_a_failed_step_lets_later_ones_draw(grammars):
    one = grammars.introduce(intro(regex("abc")), NONE)
    grammars.give_up(one)
    assert until(lambda: one.mask.until[0] == ALWAYS) and not one.error
    other = grammars.introduce(intro(regex("abc")), NONE)
    grammars.advance([other], [-1])  # its logits were not finite
    assert until(lambda: other.mask.until[0] == ALWAYS) and not other.error


def test_closing_lets_all_draw(grammars):
    one = grammars.introduce(intro(regex("abc")), NONE)
    grammars.close()
    assert one.mask.until[0] == ALWAYS


def test_an_error_ends_one_sequence_and_lets_it_draw(grammars):
    """A token that the grammar does not allow, which only a fault can bring; the other goes on."""
    one, other = (grammars.introduce(intro(regex("abc")), NONE) for _ in range(2))
    grammars.advance([one, other], text.encode("xa"))
    assert until(lambda: one.mask.until[0] == ALWAYS) and "left its grammar" in one.error
    assert allowed(other.mask, 1) == text.encode("b") and not other.error


def test_a_mask_that_takes_too_long_is_an_error(grammars, monkeypatch):
    one = grammars.introduce(intro(regex("abc")), NONE)
    assert allowed(one.mask, 0)
    monkeypatch.setattr(matchers, "MASK_S", 0.0)
    grammars.advance([one], text.encode("a"))
    assert until(lambda: bool(one.error)) and "takes more than" in one.error


def test_other_settings_narrow_the_mask(grammars):
    """allowed_token_ids takes away, down to an error where nothing is left; under ignore_eos the end waits for the
    grammar's."""
    one = grammars.introduce(intro(regex("[a-d]{2}")), ids("bcx"))
    assert allowed(one.mask, 0) == text.encode("bc")
    two = grammars.introduce(intro(regex("[a-d]")), ids("x"))
    assert until(lambda: bool(two.error)) and "allowed_token_ids" in two.error and two.mask.until[0] == ALWAYS
    ends = grammars.introduce(intro(regex("ab?")), NONE)
    grammars.advance([ends], text.encode("a"))
    assert allowed(ends.mask, 1) == [*text.encode("b"), END]
    goes_on = grammars.introduce(intro(regex("ab?"), ignore_eos=True), NONE)
    grammars.advance([goes_on], text.encode("a"))
    assert allowed(goes_on.mask, 1) == text.encode("b")
    grammars.advance([goes_on], text.encode("b"))
    assert allowed(goes_on.mask, 2) == [END]


def test_grammars_are_prepared_once_and_kept_in_bounds(monkeypatch):
    """What is given up is made again when it is needed; the vocabulary is loaded once."""
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 2)
    loads = []
    grammars = Grammars(ReferenceOps(), VOCAB_SIZE, lambda: loads.append(1) or vocabulary())
    built = []
    build = grammars._build
    monkeypatch.setattr(Grammars, "_build", lambda self, grammar: built.append(grammar) or build(grammar))
    a, b, c = (regex(letter) for letter in "abc")
    for grammar in (a, b, a, c, a, b):
        grammars.prepare(grammar)
    assert built == [a, b, c, b] and len(loads) == 1
    one = grammars.introduce(intro(c), NONE)
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
        one = grammars.introduce(intro(grammar), NONE)
        for position, token in enumerate(rng.choice(ids("ab"), 60).tolist()):
            assert len(allowed(one.mask, position)) > 90
            grammars.advance([one], [token])
        assert allowed(one.mask, 60) and not one.error, one.error
    grammars.close()


def test_what_failed_is_not_kept(grammars):
    """And is the caller's to mend; the next one with that grammar starts from nothing."""
    grammars.prepare(grammar := regex("abc"))
    one = grammars.introduce(intro(grammar), NONE)
    grammars.advance([one], text.encode("x"))
    assert until(lambda: one.mask.until[0] == ALWAYS) and one.is_invalid
    assert grammar not in grammars._prepared
    assert allowed(grammars.introduce(intro(grammar), NONE).mask, 0) == text.encode("a")


def test_kept_grammars_are_bounded_by_bytes(grammars, monkeypatch):
    """As the heap has grown, whatever their number; what is at work goes on."""
    used = [0]
    monkeypatch.setattr(grammars_module, "heap_bytes", lambda: used[0])
    grammars.prepare(a := regex("ab"))
    one = grammars.introduce(intro(a), NONE)
    assert allowed(one.mask, 0) and a in grammars._prepared
    used[0] += grammars_module.MAX_GROWN_BYTES + 1
    grammars.prepare(regex("cd"))
    assert not grammars._prepared
    grammars.advance([one], text.encode("a"))
    assert allowed(one.mask, 1) == text.encode("b") and not one.error


def test_an_answer_whose_masks_fill_the_heap_ends(grammars, monkeypatch):
    """Where dropping the kept grammars frees nothing, the one at work has it."""
    used = [0]
    monkeypatch.setattr(grammars_module, "heap_bytes", lambda: used[0])
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "_COSTLY_S", 0.0)
    one = grammars.introduce(intro(regex("abc")), NONE)
    assert allowed(one.mask, 0)
    used[0] += grammars_module.MAX_GROWN_BYTES + 1
    grammars.advance([one], text.encode("a"))
    assert until(lambda: one.mask.until[0] == ALWAYS) and "MiB" in one.error and one.is_invalid


def test_an_answers_slow_masks_are_bounded_together(grammars, monkeypatch):
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars_module, "_SPENT_S", -1.0)
    one = grammars.introduce(intro(regex("abc")), NONE)
    grammars.advance([one], text.encode("a"))
    assert until(lambda: one.mask.until[0] == ALWAYS) and "processor time" in one.error and one.is_invalid
