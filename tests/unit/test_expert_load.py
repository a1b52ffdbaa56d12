"""What experts computed: summed over engines, told by them, written for others, drawn, and refused where damaged."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tokenmill.cli.expert_load import LoadWriter, draw_load, read_load, write_load
from tokenmill.cli.main import main
from tokenmill.cluster.totals import ExpertTotals
from tokenmill.control.observe.observers import Observers
from tokenmill.core.errors import ConfigError
from tokenmill.core.events import EngineStats, Ready
from tokenmill.core.experts import ExpertLoad, WeightReads, balancedness, num_unused, touched
from tokenmill.engine import background as telling

READY = Ready("m", 512, 100, (2,), "an id", 16, 64)


def load(*tokens: tuple[int, ...], steps: int = 0) -> ExpertLoad:
    return ExpertLoad((1, 3), tokens, steps)


def test_engines_add_up_from_where_they_joined_and_stay_counted() -> None:
    totals = ExpertTotals()
    totals.join(0, None)
    assert totals.load is None, "a dense model"
    totals.join(1, load((0, 0), (0, 0)))
    totals.join(2, load((100, 0), (0, 50), steps=9))
    totals.note(1, load((3, 1), (2, 2), steps=2))
    totals.note(2, load((101, 1), (0, 52), steps=10))
    totals.note(1, load((5, 1), (2, 4), steps=3))
    totals.leave(1)
    totals.note(1, load((9, 9), (9, 9)))  # has gone
    totals.note(2, load((102, 1), (0, 53), steps=12))
    assert totals.load == load((7, 2), (2, 7), steps=6)
    with pytest.raises(ValueError, match="other experts"):
        totals.note(2, ExpertLoad((1, 3), ((1, 2, 3), (1, 2, 3))))


def test_reads_of_weights_add_up() -> None:
    """Also of a dense model, and where one engine keeps weights on disk and another does not."""
    totals = ExpertTotals()
    totals.join(1, ExpertLoad((), (), reads=WeightReads(1, 2, 3, 4, 50, 0.5)))
    totals.join(2, ExpertLoad((), ()))
    totals.note(1, ExpertLoad((), (), reads=WeightReads(2, 4, 6, 8, 100, 1.5)))
    totals.note(2, ExpertLoad((), (), 3))
    totals.leave(1)
    assert totals.load == ExpertLoad((), (), 3, WeightReads(1, 2, 3, 4, 50, 1.0))


def test_what_is_said_of_a_layer() -> None:
    assert balancedness((2, 2, 2, 2)) == 1 and balancedness((0, 0, 8, 0)) == 0.25 and balancedness((0, 0)) == 1
    assert num_unused((1, 0, 0)) == 2
    assert touched(64, 8, 0) == 0 and touched(64, 8, 1) == pytest.approx(8)
    assert touched(64, 8, 16) == pytest.approx(64 * (1 - (7 / 8) ** 16)) and touched(4, 4, 3) == 4


def test_an_engine_tells_what_is_new_with_the_steps_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "TELL_S", 0.001)
    core, told, has_told = Mock(), [], asyncio.Event()
    core.state.counters.num_steps = 0
    counts = [load((0, 0), (0, 0))]

    async def send(message: ExpertLoad) -> None:
        told.append(message)
        has_told.set()

    async def story() -> None:
        task = asyncio.create_task(telling.send_expert_load(core, Mock(send=send), lambda: counts[0]))
        await asyncio.sleep(0.02)
        assert not told, "nothing has happened"
        core.state.counters.num_steps, counts[0] = 4, load((1, 0), (0, 1))
        async with asyncio.timeout(30):
            await has_told.wait()
        task.cancel()
        await telling.send_expert_load(core, Mock(send=send), lambda: None)  # dense: over at once

    asyncio.run(story())
    assert told == [load((1, 0), (0, 1), steps=4)]


def client(ready: Ready | None, steps: int = 0) -> Any:
    return Mock(observers=Observers(), ready=ready, stats=EngineStats(num_steps=steps))


def test_the_file_holds_what_was_counted_at_the_end_even_when_it_comes_late(tmp_path: Path) -> None:
    path, of = tmp_path / "load.json", client(READY, steps=3)
    writer = LoadWriter(str(path), "m", of, now=lambda: 0.0)
    experts = of.observers.experts
    experts.join(0, load((0, 0), (0, 0)))
    experts.note(0, load((1, 1), (2, 0), steps=2))
    writer.write()
    assert read_load(path).load == load((1, 1), (2, 0))

    async def story() -> None:
        finishing = asyncio.create_task(writer.finish())
        await asyncio.sleep(0.01)
        experts.note(0, load((1, 2), (3, 0), steps=3))
        of.ready = None  # the engine goes, its numerics id is known
        await finishing

    asyncio.run(story())
    found = read_load(path)
    assert found.load == load((1, 2), (3, 0)) and found[:3] == ("m", "an id", "1970-01-01T00:00:00Z")
    assert [each.name for each in tmp_path.iterdir()] == ["load.json"], "nothing is left beside it"


def test_a_file_that_cannot_be_or_has_no_subject_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        LoadWriter(str(tmp_path / "none" / "load.json"), "m", client(None))
    writer = LoadWriter(str(tmp_path / "load.json"), "m", client(READY))
    with pytest.raises(ConfigError, match="is none"):
        writer.check(READY)
    LoadWriter(None, "m", client(READY)).check(READY)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "other"}, "its kind"),
        ({"version": 2}, "version is 2"),
        ({"layers": [1]}, "not a file"),
        ({"layers": [3, 1]}, "not a file"),
        ({"tokens": [[1, 2], [3, -4]]}, "at least 0"),
        ({"tokens": [[1, 2], [3, 4.0]]}, "whole number"),
        ({"tokens": [[1, 2], 7]}, "not a file"),
        ({"num_experts": 3}, "experts it names"),
        ({"layers": [], "tokens": []}, "experts it names"),
        ({"model": None, "since": []}, ""),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(
    tmp_path: Path, change: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "load.json"
    write_load(path, "m", "id", 0.0, load((1, 2), (3, 4)))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    status = main(["inspect", "--expert-load", str(path)])
    assert status == (2 if why else 0) and why in capsys.readouterr().err


def test_the_map_shows_who_did_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "load.json"
    rows = (tuple([10] * 126 + [0, 0]), tuple([1] * 127 + [1000]))
    write_load(path, "some model", "id", 0.0, load(*rows))
    assert main(["inspect", "--expert-load", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = lines[-2:]
    assert "▄" * 63 + " " in first and "unused   2" in first and "even 0.98" in first
    assert second.count("█") == 1 and "most 127 (89%), 0 (0%), 1 (0%)" in second and "2 experts" in lines[-3]
    assert next(iter(draw_load(read_load(path)))) == f"{'model':<14} some model"
