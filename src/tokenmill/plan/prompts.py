"""Prompts of simulated requests: tokens by what they are named, not by what they say.

Parts of equal key are equal tokens, and the longer of two has the shorter as its beginning, so that a prefix cache
finds in a simulation what it would find live. A drawn part is the output of an extendable hash of its key (SHAKE-128,
FIPS 202), a byte a token. Quoted text is counted by a tokenizer where one is named; else four characters are a token,
OpenAI's rule of thumb for English.

Around messages stand the tokens of the model's chat template. It is rendered once for each order of roles, with a mark
in the place of each content, and what lies between the marks is encoded as the server encodes it. Rendering in this
process is safe: the user named the model, and nobody else's messages are in it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from ..bench.load.material import Vocabulary
from ..bench.load.plan import Call, Drawn, Literal, Part
from ..bench.load.player import Replies
from ..core.errors import ConfigError, InvalidRequest
from ..text.chat_template import Renderer
from ..text.text_model import TextModel

Frame = Callable[[tuple[str, ...]], tuple[tuple[int, ...], ...]]
"""Roles of messages -> tokens before the first, between each two, and after the last."""
_DATE = datetime(2026, 1, 1)
"""For templates that print one: a simulation is the same on every day."""


def chat_frame(text: TextModel, name: str) -> Frame:
    """By the template of a model, which `name` calls. Raises ConfigError where it has none; and, when it is asked for
    roles that the template refuses, or whose messages are not in the prompt once each in their order."""
    if text.chat is None:
        raise ConfigError(f"--endpoint chat: {name} has no chat template.", param="tokenizer")
    renderer, known = Renderer(text.chat, now=lambda: _DATE), dict[tuple[str, ...], tuple[tuple[int, ...], ...]]()

    def around(roles: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        found = known.get(roles)
        if found is None:
            pieces = _pieces(renderer, roles, name)
            # The template writes the special tokens itself.
            found = tuple(tuple(text.tokenizer.encode(piece, add_special=False)) if piece else () for piece in pieces)
            known[roles] = found
        return found

    return around


def _pieces(renderer: Renderer, roles: tuple[str, ...], name: str) -> list[str]:
    marks = [f"\ue000{number}\ue001" for number in range(len(roles))]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        left, pieces = renderer.render(messages).text, list[str]()
    except InvalidRequest as error:
        raise ConfigError(f"--endpoint chat: {name}: {error.message}", param="tokenizer") from None
    for mark in marks:
        piece, found, left = left.partition(mark)
        if not found or mark in left:
            told = f"the chat template of {name} does not repeat each message once and in order"
            raise ConfigError(f"--endpoint chat: {told}; leave --tokenizer out to count none.", param="tokenizer")
        pieces.append(piece)
    return [*pieces, left]


CHARS_A_TOKEN = 4
KEPT_BYTES = 64 << 20
"""Of parts, for others that ask for them again."""

AnsweredTokens = Callable[[int], tuple[int, ...]]


class Asked(NamedTuple):
    """A call, and the tokens of its prompt."""

    call: Call
    prompt: tuple[int, ...]


class PromptWriter:
    """is_scripted: earlier answers are drawn, not what the service really answered, which `answered` tells. frame: what
    stands around messages; None: nothing. The least prompt is one token."""

    def __init__(
        self,
        seed: int,
        vocabulary: Vocabulary | None = None,
        *,
        is_scripted: bool = True,
        answered: AnsweredTokens = lambda index: (),
        frame: Frame | None = None,
    ) -> None:
        self.is_scripted = True  # of texts, which nobody keeps here
        self.has_guessed = False
        self._quotes = not is_scripted
        self._seed = seed
        self._vocabulary = vocabulary
        self._answered = answered
        self._frame = frame
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0

    def write(self, call: Call, replies: Replies) -> Asked:
        pieces: list[bytes | list[int] | tuple[int, ...]]
        if self._frame is None:
            pieces = [self._tokens(part) for part in call.parts]
        else:
            first, *behind = self._frame(tuple(message.role for message in call.messages))
            pieces = [first]
            for message, after in zip(call.messages, behind, strict=True):
                pieces += (*(self._tokens(part) for part in message.parts), after)
        if all(isinstance(piece, bytes) for piece in pieces):
            prompt = tuple(b"".join(piece for piece in pieces if isinstance(piece, bytes)))
        else:
            prompt = tuple(token for piece in pieces for token in piece)
        return Asked(call, prompt or (0,))

    def forget(self, label: str) -> None:
        """Nothing is kept that would not be dropped by itself."""

    def _tokens(self, part: Part) -> bytes | list[int] | tuple[int, ...]:
        match part:
            case Drawn(key, num_tokens):
                return self._draw(key, num_tokens)
            case Literal(text):
                return self._read(text)
            case reply if self._quotes:
                return self._answered(reply.index)
            case reply:
                return self._draw(f"reply/{reply.index}", reply.num_tokens)

    def _draw(self, key: str, num_tokens: int) -> bytes:
        kept = self._kept.get(key)
        if kept is None or len(kept) < num_tokens:
            if self._kept_bytes > KEPT_BYTES:
                self._kept.clear()
                self._kept_bytes = 0
            self._kept_bytes += num_tokens + 100 - (0 if kept is None else len(kept))
            kept = self._kept[key] = hashlib.shake_128(f"{self._seed}/{key}".encode()).digest(num_tokens)
        return kept if len(kept) == num_tokens else kept[:num_tokens]

    def _read(self, text: str) -> bytes | list[int]:
        if self._vocabulary is not None:
            return self._vocabulary.encode(text, add_special=False)
        self.has_guessed = True
        # By what they hold, so that texts of equal beginnings have equal first tokens.
        starts = range(0, len(text), CHARS_A_TOKEN)
        return bytes(zlib.crc32(text[start : start + CHARS_A_TOKEN].encode()) & 255 for start in starts)
