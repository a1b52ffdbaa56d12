"""What upstreams of one model have cached, as they tell by KV events, and how much of a call's prompt that is.

The prompt's tokens are made here, with the model's tokenizer and chat template; what cannot be read so, or not within
READ_S, or has a salt, goes by load. Nothing depends on these being right but how soon an answer begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...api.encoder import Encoder
from ...api.rules import rules_of
from ...api.sandbox import Caller, Sandbox, read_call
from ...cluster.token_index import TokenIndex
from ...core.errors import TokenmillError
from ...core.kv_events import TokenEvent
from ...text.text_model import TextModel

READ_S = 0.5
MOST_TOKENS = 1 << 20
_ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}


class Feed(Protocol):
    """What an upstream tells."""

    def open(self, hear: Callable[[tuple[TokenEvent, ...]], None]) -> None:
        """`hear` is called on the running loop."""
        ...

    def close(self) -> None:
        """Waits until nothing is read any more."""
        ...


@dataclass(slots=True)
class Known:
    """Of a call's prompt: its number of tokens, 0 where it is not known, and the keys of its blocks."""

    num_tokens: int = 0
    keys: dict[int, bytes] = field(default_factory=dict)


class Prefixes:
    """text, sandbox: of the model. feeds: of its upstreams, in their order. on_open, on_close: begin and end the
    sandbox."""

    def __init__(
        self,
        text: TextModel,
        sandbox: Sandbox,
        feeds: Sequence[Feed],
        on_open: Callable[[], None],
        on_close: Callable[[], Awaitable[None]],
    ) -> None:
        self._on_open = on_open
        self._index = TokenIndex(len(feeds))
        self._sandbox = sandbox
        self._feeds = feeds
        self._on_close = on_close
        self._rules = rules_of(text, False)
        self._encoder = Encoder(text, sandbox)

    def open(self) -> None:
        self._on_open()
        for place, feed in enumerate(self._feeds):
            feed.open(partial(self._index.hear, place))

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(feed.close) for feed in self._feeds))
        await self._on_close()

    def num_blocks(self, place: int) -> int:
        """So many blocks that upstream has told of."""
        return self._index.num_blocks(place)

    async def read(self, path: str, body: bytes, caller: Caller) -> Known:
        """The prompt of a call."""
        endpoint = _ENDPOINTS.get(path)
        if endpoint is None or caller.tenant.salt or not self._index.sizes:
            return Known()
        reader = Caller(caller.name, None, caller.tenant)  # whether the client leaves is watched already
        try:
            async with asyncio.timeout(READ_S):
                call, _, rendered = await read_call(
                    endpoint, body, self._rules, self._sandbox, reader, lambda fields: None, MOST_TOKENS
                )
                if call.cache_salt:
                    return Known()
                prompts = await self._encoder.encode_call(call, MOST_TOKENS, rendered=rendered, caller=reader)
        except (TokenmillError, TimeoutError):
            return Known()
        tokens = prompts[0].tokens if len(prompts) == 1 else ()
        return Known(len(tokens), self._index.keys(tokens))

    def hits(self, known: Known) -> dict[int, int]:
        """Tokens that upstreams have of a prompt, by their places."""
        return self._index.hits(known.keys)

    def given(self, place: int, call: str, known: Known) -> None:
        """That upstream has the call now, and will have its prompt."""
        self._index.expect(place, call, known.keys)

    def over(self, call: str) -> None:
        self._index.settle(call)
