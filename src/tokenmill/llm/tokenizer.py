"""A model's tokenizer with the names that users of transformers know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..text.text_model import TextModel

Render = Callable[[Sequence[Any], bool], tuple[Sequence[int], str]]
"""(messages, whether the answer is opened) -> token ids and text of the prompt"""


class LLMTokenizer:
    """encode, decode and chat templates, as the model itself uses them."""

    def __init__(self, text: TextModel, render: Render) -> None:
        self._text = text
        self._render = render
        self.vocab_size = text.tokenizer.vocab_size
        self.bos_token_id = text.bos_token_id
        self.eos_token_ids = text.eos_token_ids

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The first of those that end an answer."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def chat_template(self) -> str | None:
        return None if self._text.chat is None else self._text.chat.source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in the text count as such."""
        return self._text.tokenizer.encode(text, add_special=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._text.tokenizer.decode(ids, skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._text.tokenizer.token_id(token)

    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> str | list[int]:
        """The prompt of a conversation: its token ids, or its text. Raises InvalidRequest."""
        tokens, text = self._render(messages, add_generation_prompt)
        return list(tokens) if tokenize else text
