"""What the front end holds is bounded: bodies count until their call has been submitted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenmill.api.errors import headers
from tokenmill.core.errors import BodyTooLarge, Overloaded
from tokenmill.core.policy import Refusal
from tokenmill.net.system import MonotonicClock
from tokenmill.server.client import EngineClient
from tokenmill.server.config import ServerConfig
from tokenmill.server.limits import Limits


class Sent:
    """A request whose body arrives in parts."""

    def __init__(self, *parts: bytes) -> None:
        self.headers: dict[str, str] = {}
        self._parts = list(parts)

    async def receive(self) -> dict[str, Any]:
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}


def limits() -> Limits:
    return Limits(ServerConfig(("m",), max_body_bytes=80, max_buffered_bytes=100), EngineClient(), MonotonicClock())


def test_a_body_counts_while_its_call_is_prepared_and_no_longer():
    async def main() -> None:
        held = limits()
        async with held.body(Sent(b"a" * 30, b"b" * 30)) as body:
            assert body == b"a" * 30 + b"b" * 30
            with pytest.raises(Overloaded):
                async with held.body(Sent(b"c" * 60)):
                    pass
            async with held.body(Sent(b"c" * 40)):
                pass
        async with held.body(Sent(b"c" * 60)):
            pass

    asyncio.run(main())


def test_the_message_tells_the_same_time_as_the_header():
    for retry_s, told in ((0.2, "1"), (7.5, "8"), (1e6, "300")):
        with pytest.raises(Overloaded) as refused:
            limits()._refuse(Refusal("wait", "Full", retry_s))
        assert headers(refused.value) == {"retry-after": told}
        assert refused.value.message == f"Full; retry in {told} s."


def test_a_failed_call_gives_its_bytes_back():
    async def main() -> None:
        held = limits()
        for _ in range(3):
            with pytest.raises(ValueError, match="bad"):
                async with held.body(Sent(b"a" * 60)):
                    raise ValueError("bad")
            with pytest.raises(BodyTooLarge):
                async with held.body(Sent(b"a" * 60, b"b" * 60)):
                    pass

    asyncio.run(main())
