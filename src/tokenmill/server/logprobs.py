"""Log probabilities as JSON, in the three shapes that clients know: OpenAI's for chat, OpenAI's older one for
completions, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.step import TokenLogprob
from ..text.tokenizer import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenNames:
    """What a token is called in JSON: its own text (bytes that are no character show as U+FFFD), or "token_id:N"."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self.text(token)

    def text(self, token: int) -> str:
        return self.raw(token).decode("utf-8", "replace")

    def raw(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)


def chat_logprobs(entries: Iterable[TokenLogprob], names: TokenNames, num_top: int) -> dict[str, Any]:
    """choices[].logprobs of chat."""
    return {
        "content": [
            _chat_entry(entry.token, entry.logprob, names)
            | {"top_logprobs": [_chat_entry(token, logprob, names) for token, logprob in entry.top[:num_top]]}
            for entry in entries
        ]
    }


def _chat_entry(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": max(logprob, _LEAST), "bytes": list(names.raw(token))}


def completion_logprobs(
    entries: Sequence[TokenLogprob | int], names: TokenNames, num_top: int, offset: int
) -> tuple[dict[str, Any], int]:
    """choices[].logprobs of completions, and the offset after the last token. `offset`: where the first token's text
    starts in the answer's text. A bare int is a token that nothing predicts: the first of an echoed prompt."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        token = entry if isinstance(entry, int) else entry.token
        tokens.append(names.name(token))
        offsets.append(offset)
        offset += len(names.text(token))
        if isinstance(entry, int):
            values.append(None)
            tops.append(None)
        else:
            values.append(max(entry.logprob, _LEAST))
            ranked = [(token, entry.logprob), *entry.top[:num_top]]
            tops.append({names.name(token): max(logprob, _LEAST) for token, logprob in ranked})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def prompt_logprobs(entries: Iterable[TokenLogprob], names: TokenNames, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: null for the first token, then for each one a map from token id to what is known."""
    shaped: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        ranked = {entry.token: entry.logprob, **dict(entry.top[:num_top])}
        shaped.append(
            {
                str(token): {
                    "logprob": max(logprob, _LEAST),
                    "rank": entry.rank if token == entry.token else ranks[token],
                    "decoded_token": names.text(token),
                }
                for token, logprob in ranked.items()
            }
        )
    return shaped
