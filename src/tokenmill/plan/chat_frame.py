"""What a model's chat template puts around messages, as tokens: a simulated prompt has them where a served one has.

A template is rendered once for each order of roles, with a mark in the place of each content, and what lies between the
marks is encoded as the server encodes it. Contents then stand between these pieces, whatever they are. It is rendered
in this process: who simulates has named the model himself, and nobody's messages are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

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
