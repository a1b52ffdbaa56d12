"""What the parsers of request bodies read: each field with its kind and range, noted while they read bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import msgspec

from tokenmill.api.call import Call
from tokenmill.api.endpoints import ENDPOINTS
from tokenmill.api.fields import Fields
from tokenmill.api.messages import parse as messages
from tokenmill.api.rules import Rules
from tokenmill.core import sampling
from tokenmill.core.tenant import ADAPTERS
from tokenmill.server.app import Resources, build_app
from tokenmill.server.config import ServerConfig
from tokenmill.server.openapi.document import EXAMPLES
from tokenmill.server.openapi.schemas import bound
from tokenmill.server.service import Service
from tokenmill.text.fim import FimTokens

KINDS = {
    "text": "string",
    "required_text": "string, not empty",
    "flag": "true or false",
    "object": "object",
    "array": "array",
    "integer": "integer",
    "number": "number",
    "any": "",
}
"""Methods of Fields, and what they read."""

REWRITING = (
    "ollama.parse.parse_chat",
    "ollama.parse.parse_completion",
    "llama.parse.parse_completion",
    "llama.parse.parse_embedding",
    "ids.parse.parse_completion",
)
"""What other APIs' parsers give rewritten bodies to. It reads nothing here: the fields would be those of OpenAI."""

_FIM = FimTokens("a", "b", "c")
_CALL = Call(model=None, sampling=sampling.SamplingParams())


def fields_of(endpoint: str) -> dict[str, str]:
    """Each field that an endpoint reads, with its kind and range; "": it is read whole."""
    found: dict[str, str] = {}
    with _watched(found), contextlib.ExitStack() as stack:
        for name in REWRITING:
            stack.enter_context(patch(f"tokenmill.api.{name}", return_value=(_CALL, [])))
        for body in EXAMPLES[endpoint]:
            ENDPOINTS[endpoint][0](body, Rules(vocab_size=10, fim=_FIM))
    return found


def adapter_fields(handler: Callable[[Any, Any], Any], body: dict[str, Any]) -> dict[str, str]:
    """Those of an endpoint that reads its body itself."""
    service = MagicMock(_config=SimpleNamespace(lora_dir="adapters", model_names=()))
    service._limits.body.return_value.__aenter__.return_value = msgspec.json.encode(body)
    service._client.adapters.load = service._client.adapters.keep = AsyncMock()
    found: dict[str, str] = {}
    with _watched(found):
        asyncio.run(handler(service, SimpleNamespace(state=SimpleNamespace(scopes=(ADAPTERS,)))))
    return found


def load_fields() -> dict[str, str]:
    return adapter_fields(Service.load_adapter, {"lora_name": "x", "lora_path": "x"})


def unload_fields() -> dict[str, str]:
    return adapter_fields(Service.unload_adapter, {"lora_name": "x"})


def routes() -> set[str]:
    """ "METHOD path" of everything that the application answers."""
    text = MagicMock(max_context=10)
    app = build_app(
        ServerConfig(model_names=("toy",)),
        text,
        MagicMock(),
        MagicMock(),
        Resources(clock=MagicMock(), new_seed=lambda: 1, new_id=str),
    )
    found = set()
    for route in app.routes:
        path = route.path.replace(":path", "")
        found |= {f"{method} {path}" for method in route.methods if method != "HEAD"}
    return found


@contextlib.contextmanager
def _watched(found: dict[str, str]) -> Iterator[None]:
    """While the block runs, `found` gets the name of each field that is read, and its kind."""
    depth = 0
    is_made = False

    def translated(original: Callable[..., Any]) -> Callable[..., Any]:
        """Of a body that was made of another, kinds are noted, but no fields."""

        def parse(*given: Any) -> Any:
            nonlocal is_made
            is_made = True
            try:
                return original(*given)
            finally:
                is_made = False

        return parse

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(fields: Fields, field: str, *bounds: int) -> Any:
            nonlocal depth
            if not depth and not found.get(fields.name(field)) and (not is_made or fields.name(field) in found):
                found[fields.name(field)] = KINDS[name] + _range(*bounds)
            depth += 1
            try:
                return original(fields, field, *bounds)
            finally:
                depth -= 1

        return read

    check = sampling.check_float

    def noting(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
        if found.get(name) == KINDS["number"]:
            found[name] += f", above {low:g}, to {high:g}" if low_open else f", {low:g} to {high:g}"
        check(name, value, low, high, low_open=low_open)

    with contextlib.ExitStack() as stack:
        for name in KINDS:
            stack.enter_context(patch.object(Fields, name, watched(name, getattr(Fields, name))))
        stack.enter_context(patch.object(sampling, "check_float", noting))
        stack.enter_context(patch.object(messages, "parse_chat", translated(messages.parse_chat)))
        yield
    unbounded = [name for name, kind in found.items() if kind == KINDS["number"]]
    assert not unbounded, f"numbers that nothing bounds: {unbounded}"


def _range(low: int | None = None, high: int | None = None) -> str:
    return "" if low is None or high is None else f", {bound(low)} to {bound(high)}"
