"""Text for drawn parts: token ids, or words that are one token each, straight as the bytes of a JSON body.

A prompt of n drawn tokens is n pieces drawn from a table, so its length is exact as far as the table's pieces are one
token each and stay so side by side: ids are; words are where a tokenizer chose them; the built-in words nearly always
are, and the server's own count is in the result. Pieces are cached by key, because shared text is asked for often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ...core.errors import ConfigError
from .plan import Drawn, generator

MAX_WORDS = 4096
MIN_WORDS = 64
MAX_DRAWN_TOKENS = 200_000_000
"""Of distinct text in one plan: beyond it the cache would not fit a small machine."""

# Common English words: with a space before them, one token in the vocabularies of all usual models.
_WORDS = """
the and for that with this from have not are was were which their there when what will would could about after
before other some time into only over such most first also because through between under while where these those
then than more very just like made make many much must never number often once open order part people place point
power present problem process public question rather reason right room same school second seem several should show
side since small social something start state still story study system take tell thing think three today together
too turn two until upon use want war water way week well white why without word work world write year young against
almost along already always among another around away back become began behind being best better both business call
came can case change child city close come common company country course day development different each early end
enough even every example eye face fact family far father few find follow form found four free friend full general
get give going good government great group hand hard head help her high him himself his home house how however human
idea important increase interest know large last late law lead least leave left less let life light line little
local long look love man may mean might mind money month morning mother move name national nature near need new next
night nothing now off old own
"""
WORDS = _WORDS.split()


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Material:
    """Draws parts from a table of pieces. `separator` stands between pieces (ids), or is empty (words)."""

    def __init__(self, seed: int, pieces: Sequence[bytes], separator: bytes, about: str) -> None:
        assert pieces, "nothing to draw from"
        self.about = about
        self.separator = separator
        self._seed = seed
        self._pieces = pieces
        self._drawn: dict[Drawn, bytes] = {}

    def draw(self, part: Drawn) -> bytes:
        """The part's bytes. Equal keys begin alike. Cost: about 0.2 us a token the first time, then none."""
        drawn = self._drawn.get(part)
        if drawn is None:
            rng = generator(self._seed, f"text/{part.key}")
            drawn = self.separator.join(rng.choices(self._pieces, k=part.num_tokens))
            self._drawn[part] = drawn
        return drawn

    def forget(self, label: str) -> None:
        """Drop what is kept of parts renewed with this label (Plan.with_fresh_text); they can be drawn again."""
        for part in [part for part in self._drawn if part.key.endswith(f"/{label}")]:
            del self._drawn[part]

    def prepare(self, parts: Iterable[Drawn]) -> None:
        """Draw everything beforehand, so that sending never waits for it."""
        distinct = set(parts)
        total = sum(part.num_tokens for part in distinct)
        if total > MAX_DRAWN_TOKENS:
            raise ConfigError(
                f"The load holds {total:,} tokens of distinct text, above {MAX_DRAWN_TOKENS:,}:"
                " send fewer requests (--num-prompts) or shorter ones (--length-scale, --max-model-len).",
                param="num_prompts",
            )
        for part in distinct:
            self.draw(part)


def token_material(seed: int, low: int, high: int) -> Material:
    """Token ids low to high - 1."""
    if not 0 <= low < high:
        raise ConfigError(f"--vocab-range must be two rising numbers, got {low}:{high}.", param="vocab_range")
    return Material(seed, [b"%d" % token for token in range(low, high)], b",", f"token ids {low} to {high - 1}")


def word_material(seed: int, vocabulary: Vocabulary | None) -> Material:
    """Words: those of which `vocabulary` makes one token each, or the built-in ones where there is none."""
    if vocabulary is None:
        words, about = WORDS, "built-in words, one token each in most vocabularies"
    else:
        words, about = single_token_words(vocabulary), "words that are one token each"
    return Material(seed, [f" {word}".encode() for word in words], b"", f"{len(words)} {about}")


def single_token_words(vocabulary: Vocabulary) -> list[str]:
    """Words of lower-case ASCII letters that are one token after a space, in the order of their ids."""
    words = []
    for token in range(vocabulary.vocab_size):
        text = vocabulary.token_bytes(token).decode(errors="replace")
        word = text[1:]
        if not (text.startswith(" ") and len(word) > 1 and word.isascii() and word.isalpha() and word.islower()):
            continue
        if vocabulary.encode(f" {word} {word}", add_special=False, parse_special=False) == [token, token]:
            words.append(word)
            if len(words) == MAX_WORDS:
                break
    if len(words) < MIN_WORDS:
        raise ConfigError(
            f"The tokenizer has only {len(words)} words that are one token each: text of exact length cannot be built"
            " from it. Use --prompt-format tokens.",
            param="tokenizer",
        )
    return words
