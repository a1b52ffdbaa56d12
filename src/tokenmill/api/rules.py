"""What the model and the settings add to validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..text.chat_format import ChatFormat
from ..text.fim import FimTokens
from ..text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class Rules:
    """defaults      the model's own sampling parameters
    fim           its marks around a gap
    chat_format   how it calls tools and marks reasoning
    has_template  conversations can be rendered by its own
    """

    vocab_size: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    allow_chat_template: bool = False
    fim: FimTokens | None = None
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    has_template: bool = True


def rules_of(text: TextModel, allow_chat_template: bool) -> Rules:
    return Rules(
        text.tokenizer.vocab_size,
        text.sampling_defaults,
        allow_chat_template,
        text.fim,
        text.chat_format,
        text.chat is not None,
    )
