"""What a front end opens is closed again, what needs other parts before them, also where a part cannot be opened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import tokenmill.cli.front_end as front_end
from tokenmill.cli import idle_job
from tokenmill.control import signing
from tokenmill.control.audit import log as audit_log
from tokenmill.core.errors import ConfigError
from tokenmill.server import app as app_module

ORDER = (
    "idle time", "idle job", "streams", "resume file", "sandbox", "tracing", "responses", "answers", "accounting",
    "the end is noted", "audit",
)  # fmt: skip


class Parts:
    """Parts of a front end that note when they are closed; `broken` cannot be opened."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.closed: list[str] = []

    def open(self, name: str, **more: Any) -> Any:
        if name == self.broken:
            raise ConfigError(f"no {name}")
        return SimpleNamespace(close=lambda: self.closed.append(name), **more)

    def open_async(self, name: str) -> Any:
        part = self.open(name)

        async def close() -> None:
            part.close()

        return SimpleNamespace(close=close)

    def audit(self, mask: object) -> Any:
        def note(what: Any) -> None:
            if what == audit_log.STOPPED:
                self.closed.append("the end is noted")

        return self.open("audit", note=note)

    def build(self, *_: object) -> Any:
        if self.broken == "application":
            raise ConfigError("no application")
        return SimpleNamespace(
            state=SimpleNamespace(resume=self.open_async("streams"), idle_time=self.open("idle time"))
        )

    def given(self) -> Any:
        nothing: dict[str, Any] = {}
        return SimpleNamespace(
            options=SimpleNamespace(seed=None, lora_modules=(), idle_command="true", observers=()),
            config=SimpleNamespace(
                model_names=("m",), api_keys=(), mask=None, responses_store="r", idempotency_store="a", usage_dir="u",
                files_dir="", usage_kept_days=1, sign_responses="key",
            ),
            tracing=self.open("tracing"),
            access=None,
            audit=SimpleNamespace(open=self.audit, watch=lambda *_: None),
            upstreams=SimpleNamespace(upstreams=lambda *_: (), prefixes=lambda: nothing, upstream_max_open=1),
            tiers=SimpleNamespace(admin=None),
        )  # fmt: skip

    async def serve(self) -> None:
        async with contextlib.AsyncExitStack() as held:
            given, text, sandbox = self.given(), SimpleNamespace(), self.open_async("sandbox")
            client = SimpleNamespace(adapters=SimpleNamespace(name_of=str))
            resources = front_end._open_resources(given, client, text, sandbox, held)  # type: ignore[arg-type]
            front_end._build(given, text, client, sandbox, resources, held)  # type: ignore[arg-type]
            assert not self.closed


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Parts]:
    def make(broken: str) -> Parts:
        made = Parts(broken)
        stores = made.open
        monkeypatch.setattr(front_end, "open_accounting", lambda *_: stores("accounting"))
        monkeypatch.setattr(front_end, "open_kept_stores", lambda *_: (stores("responses"), stores("answers")))
        monkeypatch.setattr(front_end, "file_records", lambda *_: None)
        monkeypatch.setattr(front_end, "open_resume_store", lambda *_: stores("resume file"))
        monkeypatch.setattr(signing, "load_signer", lambda *_: stores("signer"))
        monkeypatch.setattr(idle_job, "IdleCommand", lambda *_: made.open_async("idle job"))
        monkeypatch.setattr(app_module, "build_app", made.build)
        return made

    return make


def test_parts_are_closed_in_the_order_of_what_needs_them(parts: Callable[[str], Parts]) -> None:
    made = parts("")
    asyncio.run(made.serve())
    assert tuple(made.closed) == ORDER


@pytest.mark.parametrize(
    ("broken", "closed"),
    [
        ("accounting", ()),
        ("responses", ("accounting",)),
        ("resume file", ORDER[4:9]),
        ("signer", ORDER[3:9]),
        ("audit", ORDER[3:9]),
        ("idle job", ORDER[3:]),
        ("application", (ORDER[1], *ORDER[3:])),
    ],
)
def test_what_is_open_is_closed_when_a_part_cannot_be_opened(
    parts: Callable[[str], Parts], broken: str, closed: tuple[str, ...]
) -> None:
    """And an end is noted only where a beginning was."""
    made = parts(broken)
    with pytest.raises(ConfigError, match=f"no {broken}"):
        asyncio.run(made.serve())
    assert tuple(made.closed) == closed
