"""Jobs of the sandbox process end with the client they are done for."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from scripted import make_text_model
from tokenmill.api.conversations import Conversation
from tokenmill.api.encoder import Encoder
from tokenmill.api.errors import ClientGone
from tokenmill.api.jobs import Job
from tokenmill.api.sandbox import Caller


class Busy:
    """A sandbox that never has an answer."""

    def __init__(self) -> None:
        self.has_ended = False

    async def run(self, job: Job, client: str) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            self.has_ended = True
        raise AssertionError


class Leaving:
    """A request whose client leaves."""

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.disconnect"}


def test_a_rendering_by_the_callers_own_template_ends_with_the_caller() -> None:
    sandbox = Busy()
    conversation = Conversation(messages=({"role": "user", "content": "x"},), template="{{ messages }}")
    rendering = Encoder(make_text_model(), sandbox).render(conversation, Caller("c", cast(Any, Leaving())))
    with pytest.raises(ClientGone):
        asyncio.run(asyncio.wait_for(rendering, 30))
    assert sandbox.has_ended
