"""Grammars at work: which tokens may come next, on the `llguidance` library (docs/decisions/grammar.md).

A `Vocabulary` is a model's tokens as the library wants them; a `Matcher` follows one answer through a grammar. Grammars
are the library's own, as JSON text. A matcher belongs to one thread at a time; the library lets other threads run while
it builds one or makes a mask.
"""

from __future__ import annotations

import time

import llguidance

from ...core.errors import InvalidRequest
from ..tokenizer import Tokenizer

MASK_S = 0.005
"""Processor time that one token may take: to follow it, and to find what may come after it."""

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

_STEP_LEXER_FUEL = 100_000
_STEP_ITEMS = 50_000
_TOO_SLOW = f"The next token of this grammar takes more than {1e3 * MASK_S:g} ms to find. Make the grammar simpler."


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
        """Raises InvalidRequest with what the library says of a grammar that it does not take."""
        error = llguidance.LLMatcher.validate_grammar(grammar, self._tokens, limits=_limits())
        if error:
            raise InvalidRequest(f"{param}: {error.strip()}", param=param)

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of an answer. Raises GrammarFailed."""
        inner = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=_limits())
        if inner.is_error():
            raise GrammarFailed(f"The grammar cannot be used: {inner.get_error().strip()}")
        return Matcher(inner)


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

    def step(self, token: int, address: int, num_bytes: int) -> None:
        """Take a token and write what may follow it. Raises GrammarFailed, also where it took longer than MASK_S of
        this thread's processor time."""
        began_s = time.thread_time()
        if not self._inner.consume_token(token):
            raise self._failure("The answer left its grammar")
        self.fill(address, num_bytes)
        if time.thread_time() - began_s > MASK_S:
            raise GrammarFailed(_TOO_SLOW)

    def fill(self, address: int, num_bytes: int) -> None:
        """Write what may come next, a bit for each token, lowest first: at least one. The model's end tokens are
        allowed where the answer is whole. Raises GrammarFailed."""
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)
        if self._inner.is_error():
            raise self._failure("The grammar cannot be followed any further")

    def roll_back(self, num_tokens: int) -> None:
        """Forget the last tokens that were taken."""
        assert self._inner.rollback(num_tokens), self._inner.get_error()

    @property
    def is_whole(self) -> bool:
        """Whether the answer may end here."""
        return self._inner.is_accepting()

    def _failure(self, what: str) -> GrammarFailed:
        reason = self._inner.get_error().strip().partition("\n")[0]
        reason = _NOTHING_FITS if reason == _NO_TOKEN else reason
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


def _limits() -> llguidance.LLParserLimits:
    """What one matcher may take. Errors do not quote the whole grammar."""
    return llguidance.LLParserLimits(
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_MAX_LEXER_STATES,
        verbose_errors=False,
    )
