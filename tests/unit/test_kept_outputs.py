"""Outputs in a file: what a drafter knew it knows after a restart, and nothing that is wrong with the file, or in it,
keeps a worker from starting."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.core.request import SamplingParams
from tokenmill.core.speculation import SpeculationConfig, draft_scope, tenant_digest
from tokenmill.core.step import Introduction, RowResult
from tokenmill.ops.native import available
from tokenmill.ops.native.drafter import NativeDrafter
from tokenmill.ops.reference_drafts import ReferenceDrafter
from tokenmill.worker import kept_outputs
from tokenmill.worker.drafters import Drafters
from tokenmill.worker.kept_outputs import KEPT_S, KeptOutputs, prepare_outputs

ONE, OTHER = "11" * 32, "22" * 32
ANN, BOB = draft_scope("ann", "pepper"), draft_scope("bob", "")
native = pytest.mark.skipif(available() is not None, reason=str(available()))
both = pytest.mark.parametrize("make", [ReferenceDrafter, pytest.param(NativeDrafter, marks=native)])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kept" / "outputs.db")


def keep(path: str, *outputs: tuple[str, list[int]], tokenizer: str = ONE, wall_s: float = 1e9) -> None:
    kept = KeptOutputs(path, tokenizer, lambda: wall_s)
    kept.open(10)
    for scope, tokens in outputs:
        kept.add(scope, tokens)
    kept.close()


def read(path: str, most: int = 100, tokenizer: str = ONE, wall_s: float = 1e9) -> list[tuple[str, list[int]]]:
    kept = KeptOutputs(path, tokenizer, lambda: wall_s)
    found = kept.open(most)
    kept.close()
    return found


def test_what_is_kept_is_read_in_order_by_its_user_alone_and_names_nobody(path: str) -> None:
    outputs = [(ANN, [1, 2, 2**31 - 1]), (BOB, [5] * 5000), ("", [7, 8]), (ANN, [3, 4])]
    keep(path, *outputs)
    assert read(path) == outputs and read(path, most=2) == outputs[2:]
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    there = b"".join(each.read_bytes() for each in Path(path).parent.iterdir())
    assert tenant_digest("ann").encode() in there
    assert not any(name in there for name in (b"ann", b"bob", b"pepper"))


def test_what_a_killed_process_has_written_is_there_and_two_may_write(path: str) -> None:
    """Neither of two is closed before a third reads."""
    one, other = KeptOutputs(path, ONE), KeptOutputs(path, ONE)
    assert one.open(10) == other.open(10) == []
    one.add(ANN, [1, 2])
    other.add(BOB, [3, 4])
    for each in (one, other):
        each._file.ask(lambda: None)
    assert sorted(read(path)) == sorted([(ANN, [1, 2]), (BOB, [3, 4])])
    one.close()
    other.close()
    one.add(ANN, [5, 6])  # late
    assert len(read(path)) == 2


def test_outputs_of_another_tokenizer_stay_and_are_not_read(path: str) -> None:
    keep(path, (ANN, [1, 2]))
    keep(path, (ANN, [3, 4]), tokenizer=OTHER, wall_s=1e9 + 1)
    assert read(path) == [(ANN, [1, 2])] and read(path, tokenizer=OTHER) == [(ANN, [3, 4])]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE kept SET body = CAST(substr(body, 1, 40) || x'7f' || substr(body, 42) AS BLOB) WHERE {}",
        "UPDATE kept SET body = substr(body, 1, length(body) - 4) WHERE {}",
        "UPDATE kept SET body = x'' WHERE {}",
        "UPDATE kept SET body = CAST(zeroblob(60) AS TEXT) WHERE {}",
        "UPDATE kept SET key = CAST(key || x'01' AS BLOB) WHERE {}",
        "UPDATE kept SET key = 'text' WHERE {}",
    ],
)
def test_an_output_that_is_not_as_it_was_written_is_passed_over(path: str, damage: str) -> None:
    keep(path, (ANN, [1, 2]), (ANN, [3, 4, 5]), (BOB, [6, 7]))
    with closing(sqlite3.connect(path)) as database, database:
        changed = database.execute(damage.format("length(body) = (SELECT max(length(body)) FROM kept)"))
        assert changed.rowcount == 1
    assert read(path) == [(ANN, [1, 2]), (BOB, [6, 7])]


def test_too_much_goes_from_who_has_most_and_all_of_it_after_a_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_outputs, "_KIND", kept_outputs._KIND._replace(max_bytes=4000))
    keep(path, (BOB, [100, 101]), *((ANN, [number] * 100) for number in range(30)))
    found = read(path)
    assert found[0] == (BOB, [100, 101]) and 5 < len(found) < 10
    assert [tokens[0] for _, tokens in found[1:]] == [*range(30)][1 - len(found) :]
    assert read(path, wall_s=1e9 + KEPT_S - 1) == found and read(path, wall_s=1e9 + KEPT_S + 1) == []


@pytest.mark.parametrize("damage", ["cut", "zeros", "text", "empty"])
def test_a_damaged_file_is_set_aside_and_begun_anew(path: str, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """By the process that loads; one that finds it so later keeps nothing, and says so."""
    keep(path, *((ANN, [number] * 2000) for number in range(20)))
    file = Path(path)
    content = file.read_bytes()
    cut = len(content) // 2
    spoiled = {"cut": content[:cut], "zeros": bytes(4096) + content[4096:], "text": b"notes" * 1000, "empty": b""}
    file.write_bytes(spoiled[damage])
    late = KeptOutputs(path, ONE)
    assert late.open(10) == [] and "Earlier answers will not be remembered" in caplog.text
    late.add(ANN, [1, 2])
    late.close()
    prepare_outputs(path)
    assert "is damaged" in caplog.text
    (aside,) = file.parent.glob("*.damaged-*")
    assert aside.read_bytes() == spoiled[damage]
    assert read(path) == []
    keep(path, (ANN, [1, 2]))
    assert read(path) == [(ANN, [1, 2])]


def test_what_is_another_state_or_no_file_is_refused_in_a_line(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE mine (value)")
    before = other.read_bytes()
    for path, why in ((other, "belongs to another program"), (tmp_path, "cannot be used")):
        with pytest.raises(ConfigError, match=rf"suffix_decoding_store of speculative_config, {path}, .*{why}"):
            prepare_outputs(str(path))
    assert other.read_bytes() == before and not [*tmp_path.glob("*.damaged-*")]


def test_of_deleted_tenants_nothing_is_on_disk(path: str) -> None:
    """Neither in the file nor beside it, while another process has it open, and whatever they put out since."""

    def is_there(tokens: list[int]) -> bool:
        packed = np.array(tokens, "<i4").tobytes()
        return any(packed in each.read_bytes() for each in Path(path).parent.iterdir())

    salted = draft_scope("ann", "salt")
    outputs = [(ANN, [*range(100, 150)]), (salted, [*range(3000, 5000)]), (BOB, [*range(200, 250)])]
    one, other = KeptOutputs(path, ONE), KeptOutputs(path, OTHER)
    assert one.open(10) == other.open(10) == []
    for scope, tokens in outputs:
        one.add(scope, tokens)
    other.add(ANN, [*range(300, 350)])
    for each in (one, other):
        each._file.ask(lambda: None)
    assert is_there([*range(100, 150)]) and is_there([*range(4000, 4100)]) and is_there([*range(300, 350)])
    one.forget([tenant_digest("ann"), tenant_digest("nobody")])
    one.add(salted, [*range(400, 450)])
    one._file.ask(lambda: None)
    for begin in (100, 3000, 4000, 4900, 300, 400):
        assert not is_there([*range(begin, begin + 20)]), begin
    assert is_there([*range(200, 250)]) and read(path) == [outputs[2]]
    one.close()
    other.close()


def intro(prompt: list[int], output: tuple[int, ...] = (), scope: str = ANN) -> Introduction:
    params = SamplingParams(temperature=0)
    return Introduction(tuple(prompt), output, params, 11, 0, (40,), draft_scope=scope)


@both
def test_a_worker_drafts_from_what_the_one_before_put_out(make, path: str) -> None:  # type: ignore[no-untyped-def]
    """From ended outputs at once, of the rest when it is closed; each once, for its own scope, and no prompt."""

    def start() -> Drafters:
        kept = KeptOutputs(path, ONE)
        drafters = Drafters(make(SpeculationConfig(), 10**6), most=8, overlap=24, kept=kept)
        drafters.recall(kept.open(100))
        return drafters

    def drafts(drafters: Drafters, seq: int, *tokens: int) -> tuple[int, ...]:
        (result,) = drafters.propose(0, [RowResult(seq, tokens)])
        return result.drafts.tokens if result.drafts else ()

    drafters = start()
    drafters.introduce(0, 7, intro([1, 2, 3]))
    drafts(drafters, 7, 50, 51, 52, 53)
    assert drafts(drafters, 7, 40) == drafts(drafters, 7, 99) == ()
    assert drafters._kept is not None
    drafters._kept._file.ask(lambda: None)
    assert read(path) == [(ANN, [50, 51, 52, 53, 40])], "while the sequence is not yet released"
    drafters.introduce(0, 6, intro([4], scope=draft_scope("eve", "")))
    drafts(drafters, 6, 70, 71)
    drafters.forget_tenants(["eve"])
    drafts(drafters, 6, 72, 40)
    drafters.introduce(0, 8, intro([4], (60, 61), scope=BOB))
    drafts(drafters, 8, 62, 63)
    drafters.release(7)
    drafters.close()
    assert read(path) == [(ANN, [50, 51, 52, 53, 40]), (BOB, [60, 61, 62, 63])]
    drafters = start()
    for scope, drawn, follows in (
        (ANN, (50, 51), (52, 53)),
        (BOB, (50, 51), ()),
        (BOB, (60, 61), (62, 63)),
        (ANN, (1,), ()),
    ):
        drafters.introduce(0, 9, intro([9], scope=scope))
        assert drafts(drafters, 9, *drawn)[:2] == follows, (scope, drawn)
        drafters.release(9)
    drafters.close()
    assert len(read(path)) == 5, "what this one has put out, too, but for an output of one token"
