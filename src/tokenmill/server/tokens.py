"""From a validated call to engine requests: render, encode, cut to fit, resolve what was left open.

Small prompts, and those whose beginning is known from others, are encoded in place; a large one goes to a thread (the
tokenizer releases the interpreter lock), so that other clients' streams do not wait for it, and at most two do so at
once, so that the engine keeps its cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from ..core.errors import BadCheckpoint, ContextTooLong, InvalidRequest
from ..core.events import Ready
from ..core.request import Request
from ..text.chat import ChatTemplate
from ..text.load import TextModel
from .openai import MAX_TOKENS_DEFAULT, Call, Conversation, Prompt

THREAD_CHARS = 5_000
"""Texts of more characters than this are encoded in a thread."""

KNOWN_CHARS = 100_000
"""Whether a text is known is not asked of longer ones: that, too, takes time."""

_ENCODERS = 2
_SHRINK = 4
_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's tokens, and its text where the caller gave text."""

    tokens: tuple[int, ...]
    text: str | None = None


class Encoder:
    """Encodes prompts for one text model."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._threads = asyncio.Semaphore(_ENCODERS)
        self._longest_token: int | None = None

    async def encode(
        self, prompt: Prompt, *, add_special: bool, shared: bool, room: int | None = None, param: str = "prompt"
    ) -> Encoded:
        """Token ids are taken as they are. `shared`: as in Tokenizer.encode. `room`: most tokens wanted; a text that
        cannot possibly fit is refused unread (ContextTooLong)."""
        if not isinstance(prompt, str):
            return Encoded(prompt)
        encode = partial(self._text.tokenizer.encode, prompt, add_special=add_special, shared=shared)
        if len(prompt) <= THREAD_CHARS or (shared and self._is_mostly_known(prompt)):
            return Encoded(tuple(encode()), prompt)
        if room is not None and len(prompt) > room * self._most_chars_per_token():
            raise ContextTooLong(
                f"{param} has {len(prompt)} characters, far more than the {room} tokens of this model's context; "
                "shorten it.",
                param=param,
            )
        async with self._threads:
            return Encoded(tuple(await asyncio.to_thread(encode)), prompt)

    def _is_mostly_known(self, text: str) -> bool:
        return len(text) <= KNOWN_CHARS and self._text.tokenizer.num_unknown_chars(text) <= THREAD_CHARS

    async def encode_inputs(
        self,
        texts: Sequence[str],
        seconds: Sequence[str] = (),
        *,
        limit: int,
        truncate_to: int | None = None,
        keep_end: bool = False,
    ) -> list[tuple[list[int], int]]:
        """Texts, or pairs with `seconds`, as Tokenizer.encode_inputs gives them; what cannot possibly fit is refused
        unread (ContextTooLong). `truncate_to`: keep this many tokens, -1: as many as fit, None: refuse what does not.
        """
        room = limit if truncate_to is None or truncate_to < 0 else min(truncate_to, limit)
        most_chars = max(THREAD_CHARS, room * self._most_chars_per_token())
        for text in (*texts, *seconds):
            if len(text) > most_chars and truncate_to is None:
                raise ContextTooLong(
                    f"The input has {len(text)} characters, far more than the {limit} tokens of this model's context.",
                    param="input",
                )
        if truncate_to is not None:
            kept = slice(-most_chars, None) if keep_end else slice(most_chars)
            texts, seconds = [text[kept] for text in texts], [text[kept] for text in seconds]
        encode = self._text.tokenizer.encode_inputs
        most = None if truncate_to is None else room
        if sum(map(len, texts)) + sum(map(len, seconds)) <= THREAD_CHARS:
            return encode(texts, seconds, max_tokens=most, keep_end=keep_end)
        async with self._threads:
            return await asyncio.to_thread(encode, texts, seconds, max_tokens=most, keep_end=keep_end)

    def render(self, conversation: Conversation) -> str:
        """The conversation as one text, special tokens included. Raises InvalidRequest naming the field."""
        chat = self._text.chat
        if conversation.template is not None:
            chat = self._other_template(conversation.template)
        if chat is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions, or a server that allows chat_template.",
                param="messages",
            )
        return chat.render(
            conversation.messages,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            extra=conversation.extra,
        )

    def _other_template(self, source: str) -> ChatTemplate:
        own = self._text.chat
        try:
            return own.with_source(source) if own else ChatTemplate(source)
        except BadCheckpoint as error:
            raise InvalidRequest(error.message, param="chat_template") from None

    async def encode_call(self, call: Call, limit: int) -> list[Encoded]:
        """The prompts of a call, truncated where it says so. `limit`: tokens of context. With a cache_salt nobody can
        tell by the time of another call what they are."""
        prompts: Sequence[Prompt] = call.prompts if call.conversation is None else (self.render(call.conversation),)
        encoded: list[Encoded] = []
        for given in prompts:
            if encoded:
                await asyncio.sleep(0)  # Between many prompts the streams of others have their turn.
            is_cut = call.truncate_to is not None and isinstance(given, str)
            text = self._cut(cast(str, given), limit, call.truncate_right) if is_cut else given
            encoded.append(
                await self.encode(
                    text,
                    add_special=call.add_special_tokens,
                    shared=not call.cache_salt,
                    room=limit,
                    param=call.prompt_field,
                )
            )
        if call.truncate_to is not None:
            most = call.truncate_to if call.truncate_to > 0 else limit - (call.sampling.max_tokens or 1)
            encoded = [_truncate(prompt, max(1, most), call.truncate_right) for prompt in encoded]
        for prompt in encoded:
            if not prompt.tokens:
                raise InvalidRequest(f"{call.prompt_field} must give at least one token.", param=call.prompt_field)
        return encoded

    def _cut(self, text: str, room: int, keep_head: bool) -> str:
        """What of a text that will be truncated to at most `room` tokens can matter; the cut is far beyond them."""
        most = room * self._most_chars_per_token()
        if len(text) <= most:
            return text
        return text[:most] if keep_head else text[-most:]

    def _most_chars_per_token(self) -> int:
        """A generous bound: the longest token in bytes, times what a normaliser might swallow."""
        if self._longest_token is None:
            tokenizer = self._text.tokenizer
            self._longest_token = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        return _SHRINK * max(1, self._longest_token)


def context_limit(ready: Ready) -> int:
    """Most tokens, prompt and output together, that one request of this engine may have."""
    return ready.max_model_len


def make_requests(
    call: Call,
    prompts: Iterable[Encoded],
    ready: Ready,
    *,
    root_id: str,
    arrival_s: float,
    new_seed: Callable[[], int],
    default_max_tokens: int | None,
    adapter: str = "",
) -> list[Request]:
    """One request per choice, prompt by prompt. `adapter`: digest, "" for none. Raises ContextTooLong.

    Without a seed each prompt gets its own, so that equal prompts may differ; with one, equal prompts give equal
    answers. The choices of one prompt share its seed and differ by their index.
    """
    limit = context_limit(ready)
    requests: list[Request] = []
    for prompt in prompts:
        max_tokens = _resolve_max_tokens(call, len(prompt.tokens), limit, default_max_tokens)
        sampling = replace(call.sampling, max_tokens=max_tokens)
        seed = new_seed() if sampling.seed is None else sampling.seed & _MASK64
        for choice in range(sampling.n):
            requests.append(
                Request(
                    id=f"{root_id}-{len(requests)}",
                    prompt_tokens=prompt.tokens,
                    sampling=sampling,
                    max_tokens=max_tokens,
                    seed=seed,
                    choice=choice,
                    eos_token_ids=ready.eos_token_ids,
                    priority=call.priority,
                    cache_salt=call.cache_salt,
                    adapter=adapter,
                    arrival_s=arrival_s,
                )
            )
    return requests


def _resolve_max_tokens(call: Call, num_prompt: int, limit: int, default: int | None) -> int:
    """What the caller asked for, which must fit; else the model's default or the endpoint's, cut to what fits."""
    room = limit - num_prompt
    if room < 1:
        raise ContextTooLong(
            f"This model's context is {limit} tokens, but {call.prompt_field} has {num_prompt}; at most {limit - 1} "
            "leave room for an answer.",
            param=call.prompt_field,
        )
    wanted = call.sampling.max_tokens
    if wanted is None:
        if default is None:
            default = room if call.conversation is not None else MAX_TOKENS_DEFAULT
        return min(max(default, call.sampling.min_tokens), room)
    if wanted > room:
        raise ContextTooLong(
            f"This model's context is {limit} tokens; {call.prompt_field} has {num_prompt} and {call.limit_field} is "
            f"{wanted}. Ask for at most {room}.",
            param=call.limit_field,
        )
    return wanted


def _truncate(prompt: Encoded, most: int, keep_head: bool) -> Encoded:
    if len(prompt.tokens) <= most:
        return prompt
    return Encoded(prompt.tokens[:most] if keep_head else prompt.tokens[-most:])


def prompt_text(text: TextModel, prompt: Encoded, skip_special: bool) -> str:
    """What `echo` shows: the text the caller gave, else the decoded tokens."""
    return (
        prompt.text
        if prompt.text is not None
        else text.tokenizer.decode(list(prompt.tokens), skip_special=skip_special)
    )
