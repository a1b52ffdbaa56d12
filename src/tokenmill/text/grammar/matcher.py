"""Grammars at work: which tokens may come next, on the `llguidance` library (docs/develop/decisions/grammar.md).

A `Vocabulary` is a model's tokens as the library wants them; a `Matcher` follows one answer through a grammar. Grammars
are the library's own, as JSON text. A matcher belongs to one thread at a time; the library lets other threads run while
it builds one or makes a mask.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

import llguidance

from ...core.errors import InvalidRequest
from ..tokenizer import Tokenizer

MAX_BYTES = 16 << 20
"""Of a grammar with its first mask. Usual ones take a fifth of a mebibyte."""

BYTES_PER_TOKEN = 1100
"""Of a vocabulary, about, with the tokenizer it is made from."""

MATCHER_BYTES = 1 << 20
"""Of a matcher, about, with what was found out about a usual grammar."""

COPY_BYTES = 1 << 15
"""Of a copy of one, which shares that."""

_MAX_LEXER_STATES = 32_000
"""What is found out about a grammar, in pieces of one or two kilobytes."""

_NO_TOKEN = "NoExtensionBias"
"""What the library says where no token can come next."""

_NOTHING_FITS = "nothing that fits it can come next"

_OUT_OF_ROOM = "too many states"
"""What the library says when it has found out that much."""

_OUT_OF_FUEL = "too many expressions"

_INITIAL_LEXER_FUEL = 200_000
_STEP_LEXER_FUEL = 50_000
"""Each unit is about half a microsecond and 200 bytes. The first is for all that is done before the first token. Real
schemas need up to half of it, and nearly all of what a step may use."""

_STEP_ITEMS = 50_000
_ROW_ITEMS = 4_000
"""Ways in which an answer can go on at one place; an optional property is four of them."""

_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class GrammarFailed(Exception):
    """A matcher cannot go on, and stays so; the message is for the user. is_out_of_room: it knows too much of its
    grammar, and one that is made anew may go on."""

    def __init__(self, message: str, *, is_out_of_room: bool = False) -> None:
        super().__init__(message)
        self.is_out_of_room = is_out_of_room


class Vocabulary:
    """vocab_size: tokens of the model, which may be more or fewer than the tokenizer has. Takes tenths of a second to
    make. Special tokens are no text: a grammar allows one only where it names it. Raises InvalidRequest where no token
    ends an answer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        ends = [token for token in eos_token_ids if token < vocab_size]
        if not ends:
            raise InvalidRequest("This model has no token that ends an answer, so that no grammar can be followed.")
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(ends)
        source = llguidance.TokenizerWrapper(_Tokens(tokenizer, vocab_size, ends[0]))
        self._tokens = llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=ends)

    def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest with what the library says of a grammar that it does not take, or which limit it meets
        before or with its first token. Nothing else may use this process's heap meanwhile."""
        before_bytes = heap_bytes()
        try:
            matcher = self.matcher(grammar)
            _require_small(heap_bytes() - before_bytes)
            del matcher  # until it was measured it must live
        except GrammarFailed as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of an answer, where its first mask is known and some token can come. Raises
        GrammarFailed."""
        inner = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=_limits())
        if inner.is_error():
            raise GrammarFailed(f"The grammar cannot be used: {inner.get_error().strip()}")
        matcher = Matcher(inner)
        words = (ctypes.c_uint32 * -(-self.vocab_size // 32))()
        place = ctypes.addressof(words), ctypes.sizeof(words)
        matcher.fill(*place)
        first = next(index * 32 + (word & -word).bit_length() - 1 for index, word in enumerate(words) if word)
        if first not in self.eos_token_ids:
            matcher.copy().step(first, *place)  # a mask that met a limit says so with the token after it
        return matcher


class Matcher:
    """What one answer has matched so far."""

    __slots__ = ("_inner",)

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self._inner = inner

    def copy(self) -> Matcher:
        """One that goes its own way from here; takes microseconds."""
        return Matcher(self._inner.deep_copy())

    def follow(self, tokens: list[int]) -> None:
        """Take tokens that were drawn, none of which ends the answer. Raises GrammarFailed."""
        if not self._inner.consume_tokens(tokens):
            raise self._failure("The answer left its grammar")

    def step(self, token: int, address: int, num_bytes: int) -> float:
        """Take a token and write what may follow it; the seconds of this thread's processor time that it took. Raises
        GrammarFailed."""
        began_s = time.thread_time()
        if not self._inner.consume_token(token):
            raise self._failure("The answer left its grammar")
        self.fill(address, num_bytes)
        return time.thread_time() - began_s

    def fill(self, address: int, num_bytes: int) -> None:
        """Write what may come next, a bit for each token, lowest first: at least one. The model's end tokens are
        allowed where the answer is whole. Raises GrammarFailed."""
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)
        if self._inner.is_error():
            raise self._failure("The grammar cannot be followed any further")

    def forced(self) -> list[int]:
        """Tokens that must come next, one after the other, as far as the grammar leaves no choice. Takes some ten
        microseconds where there are some."""
        return list(self._inner.compute_ff_tokens())

    def roll_back(self, num_tokens: int) -> None:
        """Forget the last tokens that were taken. Raises GrammarFailed where one of them has failed."""
        if not self._inner.rollback(num_tokens):
            raise self._failure("The grammar cannot be followed back")

    @property
    def is_whole(self) -> bool:
        """Whether the answer may end here."""
        return self._inner.is_accepting()

    def _failure(self, what: str) -> GrammarFailed:
        reason = self._inner.get_error().strip().partition("\n")[0]
        reason = _NOTHING_FITS if reason == _NO_TOKEN else reason
        if _OUT_OF_FUEL in reason:
            what, reason = (
                "This grammar is too large",
                f"{reason} (limit {_STEP_LEXER_FUEL:,} a token). Make it simpler.",
            )
        return GrammarFailed(f"{what}: {reason}", is_out_of_room=_OUT_OF_ROOM in reason)


class _Tokens:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if tokenizer.is_special(token)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special=False, parse_special=False, shared=False)


def heap_bytes() -> int:
    """What this process has taken of glibc's heap, the library's memory included; 0 on other systems. Takes a few
    microseconds."""
    told = _mallinfo()
    if told is None:
        return 0
    found = told()
    return int(found.uordblks + found.hblkhd)


def trim_heap() -> None:
    """Give back what freed grammars have left, which the next ones would not fill. Takes a millisecond or two."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def _mallinfo() -> Any:
    """glibc's mallinfo2, which its version 2.33 brought."""
    told = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if told is not None:
        fields = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]
        told.restype = type("Mallinfo", (ctypes.Structure,), {"_fields_": fields})
    return told


def _require_small(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise GrammarFailed(f"This grammar takes more than {MAX_BYTES >> 20} MiB of memory. Make it simpler.")


def _limits() -> llguidance.LLParserLimits:
    """What one matcher may take. Errors do not quote the whole grammar."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=_INITIAL_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_ITEMS,
        max_items_in_row=_ROW_ITEMS,
        max_lexer_states=_MAX_LEXER_STATES,
        verbose_errors=False,
    )
