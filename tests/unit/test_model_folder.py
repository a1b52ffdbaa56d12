"""What --models-dir lists, what a call may ask of it, and who waits when a client leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from tokenmill.api.ollama.parse import asks_nothing, keep_alive_s, read_keep_alive
from tokenmill.cli.hosting import _sharing
from tokenmill.cli.upstream_options import UpstreamOptions
from tokenmill.cluster.on_demand import Rules, State
from tokenmill.control.models.on_demand import Listed, OnDemand
from tokenmill.control.models.registry import ModelRegistry
from tokenmill.core.errors import ConfigError, Infeasible, InvalidRequest, Unavailable
from tokenmill.formats.models_dir import list_folder
from tokenmill.net.system import MonotonicClock
from tokenmill.node.machine import MachineFacts
from tokenmill.node.options import EngineOptions

GiB = 1 << 30


def test_what_a_folder_lists(tmp_path: Path) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    outside.mkdir()
    (outside / "x.gguf").touch()
    for name in ("one", "big", "sub/hidden", "vision", "two-in-it", "config"):
        (folder / name).mkdir(parents=True)
    for name in (
        "plain.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-f16.gguf", ".secret.gguf",
        "notes.txt", "one/config.json", "vision/vision-q8.gguf", "vision/mmproj-vision.gguf", "two-in-it/a.gguf",
        "two-in-it/b.gguf", "sub/hidden/deep.gguf",
    ):  # fmt: skip
        (folder / name).touch()
    (folder / "out.gguf").symlink_to(outside / "x.gguf")
    (folder / "inside.gguf").symlink_to(folder / "plain.gguf")
    found, left_out = list_folder(folder)
    assert {name: str(path.relative_to(folder.resolve())) for name, path in found.items()} == {
        "big": "big-00001-of-00002.gguf",
        "inside": "inside.gguf",
        "one": "one",
        "plain": "plain.gguf",
        "vision": "vision/vision-q8.gguf",
    }
    assert len(left_out) == 1 and "out.gguf leads out of" in left_out[0]
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").touch()
    assert "has the name of" in list_folder(folder)[1][1]
    with pytest.raises(ConfigError):
        list_folder(tmp_path / "none")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None), (True, None), (0, 0.0), (90, 90.0), (-1, -1.0), (1.5, 1.5), ("5m", 300.0), ("1h30m", 5400.0),
        ("300ms", 0.3), ("-1s", -1.0), ("0", 0.0), ("-1", -1.0), ("0.0s", 0.0),
    ],
)  # fmt: skip
def test_how_long_a_call_wants_its_model_kept(given: Any, meant: float | None) -> None:
    assert keep_alive_s(given) == pytest.approx(meant)


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", [5], {}, "5m" * 100])
def test_what_is_no_time(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive"):
        keep_alive_s(given)


def test_who_asks_for_nothing() -> None:
    assert asks_nothing("/api/generate", b'{"model": "a"}') and asks_nothing("/api/chat", b'{"messages": []}')
    assert not asks_nothing("/api/generate", b'{"prompt": "x"}') and not asks_nothing("/api/embed", b"{}")
    assert read_keep_alive(b"") is None and read_keep_alive(b'"5m"') == 300


def test_flags_of_a_folder_need_one() -> None:
    with pytest.raises(ConfigError, match="--models-max needs --models-dir"):
        UpstreamOptions(models_max=2)


def test_a_large_model_takes_all_that_is_left_or_waits_for_others_to_go() -> None:
    left, options = MachineFacts(2, None, 16 * GiB, None), EngineOptions()
    assert _sharing(Listed("small", "", GiB, 0.0), options, left, 4) == 4
    assert _sharing(Listed("large", "", 5 * GiB, 0.0), options, left, 4) == 1
    with pytest.raises(Infeasible):
        _sharing(Listed("huge", "", 12 * GiB, 0.0), options, left, 4)
    with_pool = EngineOptions(kv_cache_memory_bytes=GiB)
    assert _sharing(Listed("large", "", 12 * GiB, 0.0), with_pool, left, 4) == 1


class Rig:
    """One model of a folder, whose load ends when the test says so."""

    def __init__(self, **rules: Any) -> None:
        self.go_on = asyncio.Event()
        self.num_loads = 0
        models = ModelRegistry(("own",))
        listed = {"a": Listed("a", "/models/a", 1, 0.0)}
        self.on_demand = OnDemand(Rules(**rules), models, lambda: listed, self.load, Mock(), MonotonicClock())
        self.on_demand.take(listed)
        models.on_demand = self.on_demand
        self.models = models

    async def load(self, listed: Listed, num_sharing: int) -> Any:
        self.num_loads += 1
        await self.go_on.wait()
        model = Mock(num_open=0, kind="local")
        model.name = listed.name
        model.close = AsyncMock()
        return model


def test_a_client_that_leaves_while_it_waits_takes_no_place() -> None:
    async def run() -> None:
        rig = Rig(idle_s=0.0)
        gone, stays = (asyncio.create_task(rig.on_demand.enter("a")) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert rig.on_demand.schedule.num_waiting == 1
        rig.go_on.set()
        await stays
        assert rig.models.find("a") is not None and rig.num_loads == 1
        rig.on_demand.leave("a", None)
        assert rig.on_demand.state("a") is State.UNLOADING
        while rig.on_demand.state("a") is not State.SLEEPING:
            await asyncio.sleep(0)
        assert rig.models.find("a") is None and rig.models.names() == ["a"]
        await rig.models.close()

    asyncio.run(run())


def test_a_client_that_leaves_as_its_model_is_loaded_keeps_no_place() -> None:
    async def run() -> None:
        rig = Rig()
        gone = asyncio.create_task(rig.on_demand.enter("a"))
        await asyncio.sleep(0)
        rig.go_on.set()
        while rig.on_demand.state("a") is State.LOADING:
            gone.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(gone, return_exceptions=True)
        assert rig.on_demand.schedule.models["a"].num_open == 0
        await rig.models.close()

    asyncio.run(run())


def test_calls_that_wait_hear_that_the_server_stops_and_when_it_took_too_long() -> None:
    async def run() -> None:
        rig = Rig()
        waits = asyncio.create_task(rig.on_demand.enter("a"))
        await asyncio.sleep(0)
        await rig.models.close()
        with pytest.raises(Unavailable, match="shutting down"):
            await waits
        slow = Rig(max_wait_s=0.01)
        with pytest.raises(Unavailable, match="could not be loaded within"):
            await slow.on_demand.enter("a")
        await slow.models.close()

    asyncio.run(run())
