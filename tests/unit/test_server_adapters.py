"""The front end's registry of adapters: names, digests, and what a new engine is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest

from tokenmill.core.errors import BadCheckpoint, InvalidRequest, ModelNotFound, Unavailable
from tokenmill.core.events import AdapterLoaded, LoadAdapter, UnloadAdapter
from tokenmill.core.tenant import ADAPTERS
from tokenmill.server.adapters import AdapterRegistry, ServedAdapter
from tokenmill.server.service import Service


class FakeEngine:
    """Answers loads at once, with the content that its folders have; `counts`: loads by digest."""

    def __init__(self, **folders: str) -> None:
        self.folders = folders
        self.counts: dict[str, int] = {}
        self.number = 0
        self.other: FakeEngine | None = None  # another engine of the same registry
        self.registry: AdapterRegistry | None = None
        self.is_silent = False

    def send(self, message: LoadAdapter | UnloadAdapter, link: int) -> None:
        if link != self.number:
            assert self.other is not None
            return self.other.send(message, link)
        if isinstance(message, UnloadAdapter):
            self.counts[message.digest] -= 1
            return
        digest = self.folders.get(message.path)
        answer = AdapterLoaded(message.number, digest or "", "" if digest else "no such folder", BadCheckpoint.kind)
        if digest:
            self.counts[digest] = self.counts.get(digest, 0) + 1
            answer = AdapterLoaded(message.number, digest)
        if not self.is_silent:
            assert self.registry is not None
            asyncio.get_running_loop().call_soon(self.registry.answer, answer)


def run(
    script: Callable[[AdapterRegistry, FakeEngine], Awaitable[None]], *wanted: ServedAdapter, **folders: str
) -> None:
    async def main() -> None:
        engine = FakeEngine(**folders)
        engine.registry = AdapterRegistry(engine.send, lambda digest: False, wanted)
        if not wanted:
            engine.registry.join(0)
        await script(engine.registry, engine)

    asyncio.run(main())


def names(registry: AdapterRegistry) -> list[tuple[str, str]]:
    return [(adapter.name, adapter.digest) for adapter in registry]


def test_a_name_is_given_once() -> None:
    async def script(registry: AdapterRegistry, engine: FakeEngine) -> None:
        await registry.load(ServedAdapter("x", "one"))
        with pytest.raises(InvalidRequest, match="loaded already"):
            await registry.load(ServedAdapter("x", "two"))
        both = asyncio.gather(registry.load(ServedAdapter("y", "two")), registry.load(ServedAdapter("y", "one")))
        with pytest.raises(InvalidRequest, match="loaded already"):
            await both
        await asyncio.sleep(0)
        assert names(registry) == [("x", "1"), ("y", "2")]

    run(script, one="1", two="2")


def test_replacing_and_unloading_give_every_load_back() -> None:
    """Two names of one content are two loads of it."""

    async def script(registry: AdapterRegistry, engine: FakeEngine) -> None:
        await registry.load(ServedAdapter("x", "one"))
        await registry.load(ServedAdapter("y", "one"))
        await registry.load(ServedAdapter("x", "two"), replace_loaded=True)
        assert names(registry) == [("x", "2"), ("y", "1")] and engine.counts == {"1": 1, "2": 1}
        registry.unload("x"), registry.unload("y")
        assert not names(registry) and engine.counts == {"1": 0, "2": 0}
        with pytest.raises(ModelNotFound):
            registry.unload("x")

    run(script, one="1", two="2")


def test_a_failed_load_leaves_no_name_behind() -> None:
    async def script(registry: AdapterRegistry, engine: FakeEngine) -> None:
        with pytest.raises(InvalidRequest, match="no such folder"):
            await registry.load(ServedAdapter("x", "nothing"))
        engine.is_silent = True
        loading = asyncio.create_task(registry.load(ServedAdapter("x", "one")))
        await asyncio.sleep(0)
        assert registry.get("x") is None
        registry.lose(0, Unavailable("The engine is down."))
        with pytest.raises(Unavailable):
            await loading
        registry.join(0)
        engine.is_silent = False
        assert (await registry.load(ServedAdapter("x", "one"))).digest == "1"

    run(script, one="1")


def test_a_new_engine_gets_the_same_content_or_none() -> None:
    """What has changed on disk, or gone from it, is served no more; what is wanted at the start must load."""

    async def script(registry: AdapterRegistry, engine: FakeEngine) -> None:
        await registry.restore(0)
        registry.join(0)
        assert names(registry) == [("x", "1")]
        await registry.load(ServedAdapter("y", "two"))
        await registry.load(ServedAdapter("z", "three"))
        engine.counts.clear()
        registry.lose(0, Unavailable("The engine is down."))
        engine.folders |= {"two": "changed"}
        del engine.folders["three"]
        await registry.restore(0)
        assert names(registry) == [("x", "1")] and engine.counts == {"1": 1, "changed": 0}

    run(script, ServedAdapter("x", "one"), one="1", two="2", three="3")

    async def failing(registry: AdapterRegistry, engine: FakeEngine) -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="no such folder"):
                await registry.restore(0)

    run(failing, ServedAdapter("x", "nothing"))


def second(engine: FakeEngine, **folders: str) -> FakeEngine:
    engine.other = FakeEngine(**folders)
    engine.other.number, engine.other.registry = 1, engine.registry
    return engine.other


def test_an_adapter_that_one_engine_cannot_load_stays_in_none() -> None:
    async def script(registry: AdapterRegistry, engine: FakeEngine) -> None:
        other = second(engine, two="another 2")
        registry.join(1)
        with pytest.raises(InvalidRequest, match="no such folder"):
            await registry.load(ServedAdapter("x", "one"))
        with pytest.raises(Unavailable, match="different files"):
            await registry.load(ServedAdapter("x", "two"))
        assert engine.counts == {"1": 0, "2": 0} and other.counts == {"another 2": 0}

    run(script, one="1", two="2")


def test_a_load_that_nobody_waits_for_any_more_is_given_back() -> None:
    async def script(registry: AdapterRegistry, engine: FakeEngine) -> None:
        loading = asyncio.create_task(registry.load(ServedAdapter("x", "one")))
        await asyncio.sleep(0)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await asyncio.sleep(0)
        assert engine.counts == {"1": 0} and not names(registry)

    run(script, one="1")


def test_a_new_engine_gets_an_adapter_that_others_have_loaded_meanwhile() -> None:
    async def script(registry: AdapterRegistry, engine: FakeEngine) -> None:
        other = second(engine, one="1", two="2")
        await registry.load(ServedAdapter("x", "one"))
        other.is_silent = True
        restoring = asyncio.create_task(registry.restore(1))
        await asyncio.sleep(0)
        await registry.load(ServedAdapter("y", "two"))
        other.is_silent = False
        registry.answer(AdapterLoaded(1, "1"))  # of the load that has waited
        await restoring
        assert other.counts == {"1": 1, "2": 1}

    run(script, one="1", two="2")


@pytest.mark.parametrize("handler", [Service.load_adapter, Service.unload_adapter])
def test_unknown_fields_are_told(handler: Callable[..., Awaitable[object]]) -> None:
    service = MagicMock(_config=SimpleNamespace(lora_dir="adapters", model_names=()))
    body = b'{"lora_name": "x", "lora_path": "x", "load_inplace": true, "rank": 1}'
    service._limits.body.return_value.__aenter__.return_value = body
    service._client.adapters.load = service._client.adapters.keep = AsyncMock()
    asyncio.run(handler(service, SimpleNamespace(state=SimpleNamespace(scopes=(ADAPTERS,)))))
    (unknown,) = service._generation.log_unknown.call_args.args
    assert unknown[-1] == "rank"


def test_what_an_earlier_process_had_loaded_is_loaded_again_where_it_is_the_same() -> None:
    """One outside the folder is not taken up; one whose files have changed is not served."""
    kept: dict[str, object] = {}

    async def keep(name: str, what: dict[str, object] | None) -> None:
        kept.pop(name, None)
        if what is not None:
            kept[name] = what

    async def main() -> None:
        engine = FakeEngine(**{"/loras/a": "A", "/loras/b": "B"})
        registry = AdapterRegistry(engine.send, lambda digest: False)
        engine.registry, registry.keep = registry, keep
        registry.join(0)
        await registry.load(ServedAdapter("a", "/loras/a", "/loras"))
        await registry.load(ServedAdapter("b", "/loras/b", "/loras"))
        assert kept == {"a": {"path": "/loras/a", "digest": "A"}, "b": {"path": "/loras/b", "digest": "B"}}

        engine = FakeEngine(**{"/loras/a": "A", "/loras/b": "changed", "/else/c": "C"})
        registry = AdapterRegistry(engine.send, lambda digest: False, [ServedAdapter("flag", "/else/c")])
        engine.registry = registry
        registry.take_up([*kept.items(), ("c", {"path": "/else/c", "digest": "C"})], "/loras")  # type: ignore[list-item]
        assert registry.is_loading("flag") and not registry.is_loading("c") and not registry.is_loading("a")
        await registry.restore(0)
        registry.join(0)
        assert sorted((each.name, each.digest) for each in registry) == [("a", "A"), ("flag", "C")]
        assert not registry.is_loading("flag")

    asyncio.run(main())


def test_flags_win_over_what_an_earlier_process_had_kept_of_their_names() -> None:
    """The flag's own folder is loaded, or the start fails; once it is loaded, nothing else is kept by its name."""
    forgotten: list[tuple[str, object]] = []

    async def keep(name: str, what: object) -> None:
        forgotten.append((name, what))

    def registry_of(engine: FakeEngine) -> AdapterRegistry:
        registry = AdapterRegistry(engine.send, lambda digest: False, [ServedAdapter("sql", "/loras/sql")])
        engine.registry, registry.keep = registry, keep
        registry.take_up([("sql", {"path": "/loras/v2", "digest": "2"})], "/loras")
        return registry

    async def main() -> None:
        with pytest.raises(InvalidRequest, match="no such folder"):
            await registry_of(FakeEngine(**{"/loras/v2": "2"})).restore(0)
        assert not forgotten
        registry = registry_of(FakeEngine(**{"/loras/sql": "1", "/loras/v2": "2"}))
        assert registry.is_loading("sql") and registry.get("sql") is None
        await registry.restore(0)
        assert names(registry) == [("sql", "1")] and forgotten == [("sql", None)]

    asyncio.run(main())


def test_what_cannot_be_loaded_again_can_be_unloaded_for_good() -> None:
    registry = AdapterRegistry(MagicMock(), lambda digest: False)
    registry.keep = AsyncMock()
    service = MagicMock(_config=SimpleNamespace(lora_dir="/loras"), _client=SimpleNamespace(adapters=registry))
    service._limits.body.return_value.__aenter__.return_value = b'{"lora_name": "gone"}'
    with pytest.raises(ModelNotFound):
        asyncio.run(Service.unload_adapter(service, MagicMock(state=SimpleNamespace(scopes=(ADAPTERS,)))))
    registry.keep.assert_awaited_once_with("gone", None)
