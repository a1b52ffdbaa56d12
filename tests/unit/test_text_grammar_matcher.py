"""A matcher says which tokens may come next, can go back, and ends with a message."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tiny_tokenizer import DEFINED, SPECIAL, byte_tokenizer

from grammar_cases import END, GRAMMARS, VOCAB_SIZE, Characters, follows, regex, schema, vocabulary
from tokenmill.core.errors import InvalidRequest
from tokenmill.text.grammar import matcher as matchers
from tokenmill.text.grammar.matcher import GrammarFailed, Matcher, Vocabulary


class Words:
    """Bits that a matcher writes, as ids."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.words = np.zeros(-(-vocab_size // 32), np.uint32)
        self.vocab_size = vocab_size

    @property
    def place(self) -> tuple[int, int]:
        return self.words.ctypes.data, self.words.nbytes

    def after(self, matcher: Matcher) -> list[int]:
        matcher.fill(*self.place)
        return self.ids()

    def ids(self) -> list[int]:
        bits = np.unpackbits(self.words.view(np.uint8), bitorder="little")[: self.vocab_size]
        return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_whatever_is_drawn_follows_the_grammar(grammar):
    """Random walks through the masks end where the grammar does, and each is an answer to it."""
    words, text, ended = Words(), Characters(), 0
    for seed in range(20):
        rng, matcher, tokens = random.Random(seed), vocabulary().matcher(grammar), []
        while len(tokens) < 60 and (token := rng.choice(words.after(matcher))) != END:
            matcher.follow([token])
            tokens.append(token)
        if len(tokens) < 60:
            ended += 1
            assert matcher.is_whole and follows(grammar, text.decode(tokens)), text.decode(tokens)
    assert ended


def test_going_back_is_as_if_one_had_never_gone():
    """After any number of steps back, a matcher allows what one made anew allows after the same tokens."""
    words, other, made = Words(), Words(), vocabulary()
    for seed in range(30):
        rng = random.Random(seed)
        grammar = rng.choice(GRAMMARS)
        matcher, tokens = made.matcher(grammar), []
        for _ in range(40):
            token = rng.choice(words.after(matcher))
            if token == END or (tokens and rng.random() < 0.3):
                count = rng.randrange(1, 1 + len(tokens)) if tokens else 0
                matcher.roll_back(count)
                tokens = tokens[: len(tokens) - count]
            else:
                matcher.step(token, *words.place)
                tokens.append(token)
            anew = made.matcher(grammar)
            anew.follow(tokens)
            assert words.after(matcher) == other.after(anew), (grammar, tokens)


def test_a_copy_goes_its_own_way():
    words = Words()
    matcher = vocabulary().matcher(regex("ab|cd"))
    copy = matcher.copy()
    copy.follow(Characters().encode("ab"))
    assert words.after(copy) == [END] and words.after(matcher) == Characters().encode("ac")


def test_special_tokens_are_no_text():
    """A grammar of any text allows every byte and the tokens made of them, and no control token but the end's."""
    tokenizer = byte_tokenizer()
    end = tokenizer.token_id(SPECIAL)
    made = Vocabulary(tokenizer, tokenizer.vocab_size, (end,))
    words = Words(tokenizer.vocab_size)
    matcher = made.matcher(regex(r"(.|\n)+"))
    first = words.after(matcher)
    assert end not in first and tokenizer.token_id(DEFINED) in first and tokenizer.token_id("hello") in first
    matcher.follow(tokenizer.encode("<", add_special=False))
    assert end in words.after(matcher)


def test_a_vocabulary_smaller_or_larger_than_the_tokenizers():
    """Tokens that the model does not have are never allowed, nor are ids that stand for nothing."""
    tokenizer = byte_tokenizer()
    end = tokenizer.token_id(SPECIAL)
    larger = Vocabulary(tokenizer, tokenizer.vocab_size + 70, (end,))
    words = Words(tokenizer.vocab_size + 70)
    assert max(words.after(larger.matcher(regex("(.|\n)*")))) < tokenizer.vocab_size
    with pytest.raises(InvalidRequest, match="no token that ends"):
        Vocabulary(tokenizer, 100, (end,))


@pytest.mark.parametrize("grammar", [schema({"type": "strange"}), regex("(a"), "no JSON"])
def test_a_bad_grammar_is_refused_with_the_reason(grammar):
    made = vocabulary()
    with pytest.raises(InvalidRequest) as refused:
        made.check(grammar, "response_format")
    assert refused.value.param == "response_format" and len(refused.value.message) > 30
    with pytest.raises(GrammarFailed, match="cannot be used"):
        made.matcher(grammar)
    made.check(regex("ab?"), "response_format")


def test_a_grammar_that_nothing_fits_says_so():
    """In words, not by the library's own name for it, and before it is used."""
    with pytest.raises(GrammarFailed, match="nothing that fits it can come next"):
        vocabulary().matcher(schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}))


LATER = "[xy]{9}(a{1000}){1000}"
BOMBS = {
    "a repeated repetition": regex("(a{1000}){1000}"),
    "a long text": schema({"type": "string", "pattern": "^h{2000000}$"}),
    "many ways to be empty": regex("(?:a?){5000}a{5000}"),
    "rules that double": json.dumps(
        {
            "grammars": [
                {"lark_grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(30)) + 'a30: "x"'}
            ]
        }
    ),
    "lexemes that double": json.dumps(
        {
            "grammars": [
                {"lark_grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(24)) + 'A24: "x"'}
            ]
        }
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_that_explodes_is_refused_before_it_is_used(name):
    """By a limit that counts what it takes, and none of it is kept."""
    made = vocabulary()
    before_bytes = matchers.heap_bytes()
    with pytest.raises(InvalidRequest, match=r"too (large|big|many)|[Tt]oo many|more than"):
        made.check(BOMBS[name], "guided_regex")
    assert matchers.heap_bytes() - before_bytes < 2 << 20


def test_a_grammar_that_takes_more_memory_than_one_may_is_refused(monkeypatch):
    """What it takes is measured while it lives."""
    made, grammar = vocabulary(), regex("[a-f]{3,40}(x|yy|zzz)*")
    made.check(grammar, "guided_regex")
    monkeypatch.setattr(matchers, "MAX_BYTES", 2048)
    with pytest.raises(InvalidRequest, match="of memory"):
        made.check(grammar, "guided_regex")


def test_a_grammar_that_explodes_later_fails_at_a_bounded_price():
    words, made = Words(), vocabulary()
    made.check(regex(LATER), "guided_regex")
    matcher = made.matcher(regex(LATER))
    before_bytes = matchers.heap_bytes()
    with pytest.raises(GrammarFailed, match="too large"):
        for token in Characters().encode("xyxyxyxyxaa"):
            matcher.step(token, *words.place)
    assert matchers.heap_bytes() - before_bytes < matchers.MAX_BYTES


def test_a_token_out_of_the_grammar_is_an_error_and_stays_one():
    """Never free text: the mask after it is refused, too."""
    words = Words()
    matcher = vocabulary().matcher(regex("abc"))
    with pytest.raises(GrammarFailed, match="left its grammar"):
        matcher.step(Characters().encode("x")[0], *words.place)
    with pytest.raises(GrammarFailed):
        matcher.fill(*words.place)
