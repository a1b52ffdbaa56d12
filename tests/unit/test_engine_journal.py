"""A journal as text: it says all, an old one can be read by a later build, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tokenmill.core.block import full_groups, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import (
    DropAdapter,
    Event,
    FetchBlocks,
    FindBlocks,
    JobEnded,
    PrepareGrammar,
    Relax,
    SaveBlocks,
    StepFailed,
    StoreOpened,
)
from tokenmill.core.embeds import Embeds
from tokenmill.core.events import Abort, Drain, ForgetTenants, LoadAdapter, SetPool, ShowCache, Submit, UnloadAdapter
from tokenmill.core.kv_events import KeepKV, PromoteKV, WatchKV
from tokenmill.core.moves import Continue, EndMove, KVSource, Offer, Prefetch, PullBlocks, Release, SendBlocks, Yield
from tokenmill.core.request import PoolingParams, Request, SamplingParams
from tokenmill.core.step import Drafts, Introduction, PlanRow, RowResult, StepPlan, StepResult, TokenLogprob
from tokenmill.core.tiers import WatchTiers
from tokenmill.engine.core import EngineCore
from tokenmill.engine.journal import Committed, Entry, Handled, Planned, entry_line, header_line, read_journal
from tokenmill.engine.replay import replay
from tokenmill.sim import run

CONFIG = EngineConfig(groups=(*full_groups(64), window_group(32, 7)), max_model_len=64, scheduling_policy="fcfs")
SAMPLING = SamplingParams(max_tokens=3, temperature=0.1, stop=("\n", "ü"), logit_bias={5: -0.1}, bad_words=["x"])
GRAMMATICAL = SamplingParams(max_tokens=3, grammar="{}")
REQUEST = Request("a", (1, 2, 3), SAMPLING, 3, 2**64 - 1, 1, (9,), bad_words=((1, 2), (3,)), arrival_s=0.1 + 0.2)
POOLED = Request("v", (1,), SamplingParams(max_tokens=1), 1, 0, pooling=PoolingParams("mean", 3, "unit"))
INTRO = Introduction((1, 2, 3), (), GRAMMATICAL, 7, 0, (9,), PoolingParams("last"), "digest", ((1, 2), (3,)), (5,), 0.1)
SOURCE = KVSource("w1", "life", "/kv", "host", "ticket")
SEEN = Request("e", (1, 2), SAMPLING, 3, 1, embeds=(Embeds(1, 1, b"digest", ((0, 2),)),))
MOVING = Request("m", (1, 2), SAMPLING, 3, 1, source=SOURCE, yields="ticket")
ENTRIES: list[Entry] = [
    Handled(Submit((REQUEST, POOLED)), 1 / 3),
    Handled(Abort(("a", "b")), 0.0),
    Handled(Drain(), 0.5),
    Handled(LoadAdapter(1, "/somewhere", "/"), 1.0),
    Handled(UnloadAdapter("digest"), 1.0),
    Handled(ShowCache(1, 200), 1.0),
    Handled(SetPool("prefill", 3), 1.0),
    Handled(WatchKV(True), 1.0),
    Handled(WatchTiers(True), 1.0),
    Handled(KeepKV(b"\x00" * 16, 9.0, "a"), 1.0),
    Handled(PromoteKV(b"\x00" * 16), 1.0),
    Handled(ForgetTenants(("ann", "bob")), 1.0),
    Handled(JobEnded(ForgetTenants(("ann", "bob"))), 1.0),
    Handled(JobEnded(DropAdapter("digest"), "digest"), 1.0),
    Handled(JobEnded(LoadAdapter(1, "/somewhere"), error="no", error_kind="kind", error_param="path"), 1.0),
    Handled(StoreOpened(((b"\x00" * 16, b"\xff" * 16), ())), 1.0),
    Handled(JobEnded(FetchBlocks(0, ((1, b"key", 7),)), error="lost", error_kind="kind"), 1.0),
    Handled(JobEnded(SaveBlocks(1, ((0, b"\x80", 3),), ((1, b"\x80", 4),))), 1.0),
    Handled(JobEnded(FindBlocks(2, ((0, b"\x80"), (1, b"\x80"))), "10"), 1.0),
    Handled(JobEnded(PrepareGrammar("{}"), error="no", error_kind="kind", error_param="grammar"), 1.0),
    Handled(Submit((MOVING, SEEN)), 1.0),
    Handled(Offer("ticket", "a", (b"\x00" * 16,)), 1.0),
    Handled(Yield("ticket", "a", 1), 1.0),
    Handled(Continue("m", 1, (3, 4)), 1.0),
    Handled(Release("ticket"), 1.0),
    Handled(Prefetch(1, (b"\x00" * 16,), SOURCE), 1.0),
    Handled(JobEnded(PullBlocks(0, SOURCE, 1, ((3, -1), (4, 5)), True), error="lost", error_kind="kind"), 1.0),
    Handled(JobEnded(SendBlocks(0, "ticket", ((0, 1, 2),), 20, True)), 1.0),
    Handled(JobEnded(EndMove("ticket")), 1.0),
    Handled(Relax(1 << 20, True), 1.0),
    Handled(StepFailed(3, "on fire"), 1.0),
    Planned(None, 2.0),
    Planned(
        StepPlan(4, (PlanRow(0, 0, (1, 2), blocks=(3, 4), intro=INTRO, score=True), PlanRow(1, 5, (), 3)), (2,)), 2.0
    ),
    Committed(
        StepResult(4, (RowResult(0, (1,), (TokenLogprob(1, -1e-30, 2, ((1, -0.5),)),), (), b"\x00\xff"),), 0.1), 3.0
    ),
    Committed(StepResult(5, (RowResult(0, is_corrupted=True), RowResult(1, error="why"))), 3.0),
]


def lines(entries: list[Entry], config: EngineConfig = CONFIG) -> list[str]:
    return [header_line(config) + "\n", *(entry_line(entry) + "\n" for entry in entries)]


def test_what_is_read_is_what_was_written() -> None:
    """Settings and every kind of entry, with all their fields, to the last bit of a float."""
    config, entries = read_journal(lines(ENTRIES))
    assert config == CONFIG and list(entries) == ENTRIES
    assert {type(entry.event) for entry in ENTRIES if isinstance(entry, Handled)} == set(get_args(Event))


def test_a_half_line_at_the_end_is_left_out() -> None:
    """An engine that is killed leaves one."""
    text = lines(ENTRIES)
    text[-1] = text[-1][:20]
    assert list(read_journal(text)[1]) == ENTRIES[:-1]


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", "no JSON", '{"type":"Drain"}', '{"type":"Handled","event":{"type":"Ready"},"now":0}',
     '{"type":"Handled","event":{"type":"Abort","ids":["a"]},"now":0}', '{"type":"Handled","now":"x"}',
     '{"type":"Planned","plan":{"type":"StepPlan","step":0,"rows":[["a",0,[1]]]},"now":0}'],
)  # fmt: skip
def test_what_is_no_journal_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(ValueError, match="Line 3 is not of a journal"):
        list(read_journal([*lines(ENTRIES[:1]), line + "\n"])[1])
    with pytest.raises(ValueError, match="Line 1 is not of a journal"):
        read_journal([line + "\n"])


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 7; this build reads version 1"):
        read_journal([header_line(CONFIG).replace('"version":1', '"version":7')])


def record_run() -> list[str]:
    """Two requests whose plans differ under another order of service."""
    journal: list[Entry] = []
    config = EngineConfig(full_groups(64), max_model_len=64, max_num_batched_tokens=8, block_size=4)
    core = EngineCore(config, journal.append)
    sampling = SamplingParams(max_tokens=2)
    long, short = (Request(name, tuple(range(1, n)), sampling, 2, 0) for name, n in (("long", 30), ("short", 4)))
    core.handle(Submit((long, short)), 0.0)
    while core.has_work:
        plan = core.plan(1.0)
        assert plan is not None
        rows = tuple(RowResult(row.seq, (7,) if row.sample else ()) for row in plan.rows)
        core.commit(StepResult(plan.step, rows), 2.0)
    return lines(journal, config)


def test_what_makes_a_core_fail_is_the_last_entry_of_its_story() -> None:
    """It is recorded before it takes effect, so that a replay fails in the same way."""
    journal: list[Entry] = []
    core = EngineCore(CONFIG, journal.append)
    core.handle(Submit((REQUEST,)), 0.0)
    assert core.plan(0.0) is not None
    with pytest.raises(AssertionError, match="step 7 ended before step 0"):
        core.commit(StepResult(7, ()), 1.0)
    config, entries = read_journal(lines(journal))
    with pytest.raises(AssertionError, match="step 7 ended before step 0"):
        replay(config, entries)


def replay_text(text: list[str], folder: Path) -> int | str | None:
    """The exit code of a replay."""
    (folder / "journal").write_text("".join(text))
    with pytest.raises(SystemExit) as ended:
        run.main(["--replay", str(folder / "journal")])
    return ended.value.code


def test_a_replay_finds_a_changed_policy_and_shows_both_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another order of service in its header, the same story parts at the first step."""
    text = record_run()
    assert replay_text(text, tmp_path) == 0
    assert "steps are planned as recorded" in capsys.readouterr().out
    text[0] = text[0].replace('"scheduling_policy":"short-prompts-first"', '"scheduling_policy":"fcfs"')
    assert replay_text(text, tmp_path) == 1
    said = capsys.readouterr().out
    assert "step 0 differs" in said
    assert "recorded  PlanRow(seq=1" in said and "replayed  PlanRow(seq=0" in said


def test_a_replay_of_what_is_no_journal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_text(["prompt\n"], tmp_path) == 2
    assert "Line 1 is not of a journal" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(["--replay", str(tmp_path / "nowhere")])
    assert "No such file" in capsys.readouterr().err


def test_drafts_are_written_where_there_are_some() -> None:
    """Eight values of a plan's row and eleven of a result's; those with drafts have one more."""
    plain, drafted = PlanRow(1, 5, (7,), sample=True), PlanRow(2, 5, (7,), sample=True, drafts=(8, 9))
    entry = Planned(StepPlan(4, (plain, drafted)), 2.0)
    line = entry_line(entry)
    assert "[1,5,[7],-1,[],null,true,false],[2,5,[7],-1,[],null,true,false,[8,9]]" in line
    proposed = Drafts((3,), "ngram", (0.5,))
    result = Committed(StepResult(4, (RowResult(1, (7,)), RowResult(2, (8, 9, 1), drafts=proposed))), 3.0)
    lines = entry_line(result)
    assert '[1,[7],[],[],"",false,"",false,0.0,false,0.0],[2,[8,9,1],[],[],"",false,"",false,0.0,false,0.0,[' in lines
    assert list(read_journal(map("{}\n".format, (header_line(CONFIG), line, lines)))[1]) == [entry, result]
