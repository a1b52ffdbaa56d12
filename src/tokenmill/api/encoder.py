"""The prompts of a validated call as tokens: rendered, encoded, cut to fit.

Small prompts, and those whose beginning is known from others, are encoded in place; larger ones go to a thread (the
tokenizer releases the interpreter lock), so that other clients' streams do not wait for them, and at most two do so at
once, so that the engine keeps its cores. Those of more than 100,000 characters, and every chat template, are the
sandbox process's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..core.errors import InvalidRequest
from ..core.terms import Terms
from ..text.calls import TextCall, bad_word_ids, breaker_ids, default_max_tokens
from ..text.special_tokens import Rendered
from ..text.text_model import TextModel
from .call import Call
from .conversations import Conversation
from .jobs import (
    Encode,
    EncodeInputs,
    Tokenize,
    check_template,
    encode_inputs,
    render_job,
    unpack_ids,
    unpack_inputs,
    unpack_rendered,
)
from .openai.tokenize import MAX_TOKENIZE_CHARS, tokenize_body
from .prompts import Mixed, Prompt
from .sandbox import Caller, Sandbox

THREAD_CHARS = 2_000
"""Texts of more characters than this are encoded in a thread. Many short lines take over a microsecond each."""

THREAD_IDS = 10_000
"""More ids than this are decoded in a thread."""

KNOWN_CHARS = 100_000
"""Longer ones are encoded in the sandbox process. Nor is it asked whether they are known: that, too, takes time."""

_ENCODERS = 2
_NOBODY = Caller()


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's tokens, and its text where the caller gave text."""

    tokens: tuple[int, ...]
    text: str | None = None


class Encoder:
    """Renders and encodes prompts for one text model."""

    def __init__(self, text: TextModel, sandbox: Sandbox) -> None:
        self._text = text
        self._sandbox = sandbox
        self._threads = asyncio.Semaphore(_ENCODERS)

    async def encode(
        self,
        prompt: Prompt | Mixed | Rendered,
        *,
        add_special: bool,
        shared: bool,
        room: int | None = None,
        keep: str = "",
        param: str = "prompt",
        caller: Caller = _NOBODY,
    ) -> Encoded:
        """Token ids are taken as they are. `shared`: as in Tokenizer.encode, with the texts of the caller's tenant.
        `room`: most tokens wanted; a large text that exceeds it is refused (ContextTooLong), or cut, far beyond it,
        where `keep` is "head" or "tail"."""
        if isinstance(prompt, Mixed):
            return await self._encode_mixed(prompt, add_special, shared, room, keep, param, caller)
        if not isinstance(prompt, (str, Rendered)):
            return Encoded(prompt)
        rendered = Rendered((prompt,)) if isinstance(prompt, str) else prompt
        text = rendered.text
        if len(text) > KNOWN_CHARS:
            job = Encode(rendered, add_special, room, keep, param)
            return Encoded(unpack_ids(await caller.stay(self._sandbox.run(job, caller.name))), text)
        tokenizer = self._text.tokenizer
        if rendered.is_split:
            encode = partial(tokenizer.encode_split, rendered.pieces, add_special=add_special)
            shared = False
        else:
            encode = partial(tokenizer.encode, text, add_special=add_special, shared=shared, salt=caller.tenant.salt)
        if len(text) <= THREAD_CHARS or (
            shared and tokenizer.num_unknown_chars(text, caller.tenant.salt) <= THREAD_CHARS
        ):
            return Encoded(tuple(encode()), text)
        async with self._threads:
            return Encoded(tuple(await asyncio.to_thread(encode)), text)

    async def _encode_mixed(
        self, prompt: Mixed, add_special: bool, shared: bool, room: int | None, keep: str, param: str, caller: Caller
    ) -> Encoded:
        """Text by text. What the model wants before a text comes only before one that is first."""
        tokens: list[int] = []
        for place, part in enumerate(prompt.parts):
            if isinstance(part, int):
                tokens.append(part)
                continue
            is_first = add_special and not place
            encoded = await self.encode(
                part, add_special=is_first, shared=shared, room=room, keep=keep, param=param, caller=caller
            )
            tokens += encoded.tokens
        return Encoded(tuple(tokens))

    async def encode_inputs(
        self,
        texts: Sequence[str],
        seconds: Sequence[str] = (),
        *,
        limit: int,
        truncate_to: int | None = None,
        keep_end: bool = False,
        caller: Caller = _NOBODY,
    ) -> list[tuple[Sequence[int], int]]:
        """Texts, or pairs with `seconds`, as Tokenizer.encode_inputs gives them; a large one that cannot possibly fit
        is refused unread (ContextTooLong). `truncate_to`: keep this many tokens, -1: as many as fit, None: refuse what
        does not."""
        job = EncodeInputs(tuple(texts), tuple(seconds), limit, truncate_to, keep_end)
        num_chars = sum(map(len, texts)) + sum(map(len, seconds))
        if num_chars > KNOWN_CHARS:
            result = await caller.stay(self._sandbox.run(job, caller.name))
            return [(unpack_ids(ids), second) for ids, second in unpack_inputs(result)]
        encode = partial(encode_inputs, self._text.tokenizer, job, 0)
        if num_chars <= THREAD_CHARS:
            return list(encode())
        async with self._threads:
            return list(await asyncio.to_thread(encode))

    async def render(self, conversation: Conversation, caller: Caller = _NOBODY) -> Rendered:
        """The conversation as one text, special tokens included. Raises InvalidRequest naming the field."""
        check_template(self._text.chat, conversation)
        rendering = self._sandbox.run(render_job(conversation), caller.name)
        if conversation.template is None:  # soon over, and others need the process that does it
            return unpack_rendered(await rendering)
        return unpack_rendered(await caller.stay(rendering))

    async def tokenize(
        self,
        prompt: str | Rendered,
        *,
        add_special: bool,
        form: str,
        max_model_len: int,
        param: str,
        caller: Caller = _NOBODY,
    ) -> bytes:
        """The body of an answer of /tokenize. Nothing is taken from other texts or left to them, else its time would
        tell what others have sent."""
        rendered = Rendered((prompt,)) if isinstance(prompt, str) else prompt
        num_chars = len(rendered.text)
        if num_chars > MAX_TOKENIZE_CHARS:
            raise InvalidRequest(
                f"{param} gives {num_chars} characters; at most {MAX_TOKENIZE_CHARS} are encoded at once.", param=param
            )
        if num_chars > (THREAD_CHARS if form in ("strings", "pieces") else KNOWN_CHARS):
            job = Tokenize(rendered, add_special, form, max_model_len, param)
            return await caller.stay(self._sandbox.run(job, caller.name))
        encoded = await self.encode(rendered, add_special=add_special, shared=False, param=param)
        return tokenize_body(self._text.tokenizer, encoded.tokens, form, max_model_len)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        decode = partial(self._text.tokenizer.decode, ids, skip_special=False)
        if len(ids) <= THREAD_IDS:
            return decode()
        async with self._threads:
            return await asyncio.to_thread(decode)

    async def count(self, call: Call, rendered: Rendered | None, param: str, caller: Caller) -> int:
        """Tokens of the conversation of a call. Nothing is taken from other texts or left to them, else its time would
        tell what others have sent."""
        assert call.conversation is not None
        prompt = await self.encode(
            await self.render(call.conversation, caller) if rendered is None else rendered,
            add_special=call.add_special_tokens,
            shared=False,
            param=param,
            caller=caller,
        )
        return len(prompt.tokens)

    async def encode_prediction(self, call: Call, limit: int, caller: Caller) -> tuple[int, ...]:
        """What a call expects of its answer, as far as `limit` tokens of context have room for it."""
        if not (call.prediction and limit):
            return ()
        shared = not call.cache_salt
        encoded = await self.encode(
            call.prediction,
            add_special=False,
            shared=shared,
            room=limit,
            keep="head",
            param="prediction",
            caller=caller,
        )
        return encoded.tokens[:limit]

    async def encode_call(
        self, call: Call, limit: int, *, rendered: Rendered | None = None, caller: Caller = _NOBODY
    ) -> list[Encoded]:
        """The prompts of a call, truncated where it says so. `limit`: tokens of context. `rendered`: its conversation,
        where that has been rendered already. With a cache_salt nobody can tell by the time of another call what they
        are."""
        prompts: Sequence[Prompt | Mixed | Rendered] = call.prompts
        if call.conversation is not None:
            prompts = (await self.render(call.conversation, caller) if rendered is None else rendered,)
        elif call.infill is not None:
            prompts = (call.infill,)
        encoded: list[Encoded] = []
        for given in prompts:
            if encoded:
                await asyncio.sleep(0)  # Between many prompts the streams of others have their turn.
            encoded.append(
                await self.encode(
                    given,
                    add_special=call.add_special_tokens,
                    shared=not call.cache_salt,
                    room=limit,
                    keep="" if call.truncate_to is None else "head" if call.truncate_right else "tail",
                    param=call.prompt_field,
                    caller=caller,
                )
            )
        if call.prefix:
            encoded = [_behind(call.prefix, prompt, self._text.bos_token_id) for prompt in encoded]
        if call.truncate_to is not None:
            most = call.truncate_to if call.truncate_to > 0 else limit - (call.sampling.max_tokens or 1)
            encoded = [_truncate(prompt, max(1, most), call.truncate_right) for prompt in encoded]
        return encoded


def text_call(
    call: Call, text: TextModel, adapter: str, terms: Terms, cache_salt: str, prediction: tuple[int, ...] = ()
) -> TextCall:
    """What the requests of `call` have in common. adapter: digest, "" for none; cache_salt: the tenant's with the
    call's own; prediction: the call's in tokens. Raises InvalidRequest."""
    return TextCall(
        sampling=call.sampling,
        default_max_tokens=default_max_tokens(text.sampling_defaults, call.usual_tokens),
        priority=call.priority,
        terms=terms,
        cache_salt=cache_salt,
        handoff=call.handoff,
        adapter=adapter,
        bad_words=bad_word_ids(text.tokenizer, call.sampling.bad_words),
        dry_breakers=breaker_ids(text.tokenizer, call.sampling),
        prediction=prediction,
        fits_room=call.fits_room,
        prompt_field=call.prompt_field,
        limit_field=call.limit_field,
    )


def _behind(prefix: tuple[int, ...], prompt: Encoded, bos: int | None) -> Encoded:
    """A text begins only once."""
    tokens = prompt.tokens[1:] if bos is not None and prompt.tokens[:1] == (bos,) else prompt.tokens
    return Encoded(prefix + tokens, prompt.text)


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
