"""The keys of a prompt's blocks, made once in the front end and carried with its requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.embeds import Embeds
from ..core.events import Ready
from ..core.request import Request
from ..kv.blocks.hashing import prompt_keys


def with_keys(requests: Sequence[Request], ready: Ready) -> list[Request]:
    """The same, each with the keys that engines with these facts would make; half a microsecond a block, once for
    the choices of one prompt. Those shorter than a block stay as they are."""
    made: list[Request] = []
    prompt, keys = None, b""
    embeds: tuple[Embeds, ...] = ()
    for request in requests:
        if request.prompt_tokens is not prompt or request.embeds != embeds:
            prompt, embeds = request.prompt_tokens, request.embeds
            keys = b""
            if ready.block_size and len(prompt) >= ready.block_size:
                salt = request.cache_salt
                keys = prompt_keys(ready.numerics_id, request.adapter, salt, prompt, ready.block_size, embeds)
        made.append(replace(request, keys=keys) if keys else request)
    return made


def keys_of(tokens: Sequence[int], ready: Ready, adapter: str, salt: str, embeds: Sequence[Embeds] = ()) -> bytes:
    """Of a prompt that is no request, joined; b"" where nothing of it is cached."""
    if not ready.block_size or len(tokens) < ready.block_size:
        return b""
    return prompt_keys(ready.numerics_id, adapter, salt, tokens, ready.block_size, embeds)


def num_keys(requests: Sequence[Request], ready: Ready) -> int:
    """So many would be made."""
    size = ready.block_size
    return sum({id(each.prompt_tokens): len(each.prompt_tokens) // size for each in requests}.values()) if size else 0
