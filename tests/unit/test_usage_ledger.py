"""The usage journal and its ledger: each record counts once, whatever is killed, cut off or folded by whom."""

from __future__ import annotations

import os
import random
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clocks import ManualClock
from tokenmill.control.usage import ledger as ledger_module
from tokenmill.control.usage.journal import MARK, Account, Journal
from tokenmill.control.usage.ledger import DAY_S, HOURS_FOR_S, MINUTES_FOR_S, Ledger
from tokenmill.control.usage.question import Question, Sum, page, read_question
from tokenmill.core.errors import InvalidRequest
from tokenmill.state.database import transaction

NOW_S = 1_800_000_000.0
ALL = Question(0, 2_000_000_000 // DAY_S * DAY_S, DAY_S, ("model", "key", "tenant"), (), 0)


def opened(folder: Path, clock: ManualClock, max_bytes: int = 1 << 20) -> Journal:
    journal = Journal(folder, clock, max_bytes)
    journal.open()
    return journal


def put(journal: Journal, account: Account, *counts: int, once: str = "") -> None:
    journal.append([(journal.number_of(account), *counts, once)])


def sums(folder: Path, question: Question = ALL) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """By tenant, key and model, over all time, folded by a ledger of its own."""
    ledger = Ledger(folder)
    ledger.fold()
    found: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for each in ledger.ask(question):
        account = each[1:4]
        found[account] = tuple(map(sum, zip(found.get(account, (0, 0, 0, 0)), each[4:], strict=True)))
    ledger.close()
    return found


def test_random_records_of_several_journals_count_once(tmp_path: Path) -> None:
    """Sums equal what was appended, while journals rotate, two ledgers fold in turn and front ends come and go."""
    rng, clock = random.Random(5), ManualClock(NOW_S)
    accounts = [Account(f"t{number % 3}", f"k{number % 2}", f"m{number % 4}") for number in range(9)]
    expected: dict[Account, Counter[str]] = {account: Counter() for account in accounts}
    journals = [opened(tmp_path, clock, 400) for _ in range(2)]
    ledgers = [Ledger(tmp_path), Ledger(tmp_path)]
    for _ in range(600):
        clock.now_s += rng.random() * 30
        number = rng.randrange(2)
        chosen = rng.sample(accounts, rng.randint(1, 3))
        counts = [(rng.randrange(2), rng.randrange(99), rng.randrange(9), rng.randrange(99)) for _ in chosen]
        journal = journals[number]
        journal.append(
            [(journal.number_of(account), *count, "") for account, count in zip(chosen, counts, strict=True)]
        )
        for account, count in zip(chosen, counts, strict=True):
            expected[account].update(dict(zip(("calls", "prompt", "cached", "output"), count, strict=True)))
        if rng.random() < 0.05:
            rng.choice(ledgers).fold()
        if rng.random() < 0.02:
            journal.close()
            journals[number] = opened(tmp_path, clock, 400)
    for journal in journals:
        journal.close()
    for ledger in ledgers:
        ledger.close()
    found = sums(tmp_path)
    assert found == {
        tuple(account): (each["calls"], each["prompt"], each["cached"], each["output"])
        for account, each in expected.items()
    }
    assert not list(tmp_path.glob("*.journal")), "journals that are over and folded are deleted"


def test_a_record_is_counted_from_a_journal_that_is_still_written(tmp_path: Path) -> None:
    journal, account = opened(tmp_path, ManualClock(NOW_S)), Account("a", "", "m")
    put(journal, account, 1, 10, 0, 1)
    assert sums(tmp_path)[tuple(account)] == (1, 10, 0, 1)
    put(journal, account, 0, 0, 0, 5)
    assert sums(tmp_path)[tuple(account)] == (1, 10, 0, 6)
    assert list(tmp_path.glob("*.journal")), "it is still written"
    journal.close()


def test_a_record_that_was_cut_off_is_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever of the last record a dead process has written, what is before it counts."""
    account = Account("a", "", "m")
    journal = opened(tmp_path, ManualClock(NOW_S))
    put(journal, account, 1, 10, 0, 1)
    put(journal, account, 0, 0, 0, 1)
    (path,) = tmp_path.glob("*.journal")
    journal.close()
    data = path.read_bytes()
    last = len(data) - (len(data) - len(MARK)) // 3
    for cut in range(last, len(data)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / path.name).write_bytes(data[:cut])
        assert sums(folder)[tuple(account)] in ((1, 10, 0, 1), (1, 10, 0, 2))[: 1 + (cut == len(data))]
        assert not list(folder.glob("*.journal"))
    assert "cut off" in caplog.text


def test_a_damaged_journal_is_kept_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    account = Account("a", "", "m")
    journal = opened(tmp_path, ManualClock(NOW_S))
    for _ in range(3):
        put(journal, account, 1, 10, 0, 1)
    journal.close()
    (path,) = tmp_path.glob("*.journal")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert sums(tmp_path)[tuple(account)] == (2, 20, 0, 2)
    assert sums(tmp_path)[tuple(account)] == (2, 20, 0, 2)
    assert list(tmp_path.glob("*.damaged")) and "damaged from byte" in caplog.text
    (tmp_path / "0-0.journal").touch()  # none is made so
    assert sums(tmp_path)[tuple(account)] == (2, 20, 0, 2) and (tmp_path / "0-0.damaged").exists()


def test_what_ends_between_the_sums_and_the_deletion_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold that is followed by no deletion, as after a crash, is not made again."""
    account = Account("a", "", "m")
    journal = opened(tmp_path, ManualClock(NOW_S))
    put(journal, account, 1, 10, 0, 1)
    journal.close()

    def die(path: Path) -> bool:
        return False

    monkeypatch.setattr(ledger_module, "is_over", die)
    assert sums(tmp_path)[tuple(account)] == (1, 10, 0, 1)
    monkeypatch.undo()
    assert sums(tmp_path)[tuple(account)] == (1, 10, 0, 1)
    assert not list(tmp_path.glob("*.journal"))


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("damage", [b"", b"\xff" * 40], ids=["whole", "damaged"])
def test_what_another_folds_to_its_end_meanwhile_counts_once(tmp_path: Path, has_begun: bool, damage: bytes) -> None:
    """One ledger has read a journal that is over, and waits for the other, which then deletes the journal."""
    account = Account("t", "k", "m")
    journal = opened(tmp_path, ManualClock(NOW_S))
    put(journal, account, 1, 10, 0, 5)
    late, early = Ledger(tmp_path), Ledger(tmp_path)
    if has_begun:
        late.fold()
    put(journal, account, 1, 20, 0, 7)
    journal.close()
    (path,) = tmp_path.glob("*.journal")
    with open(path, "ab") as file:
        file.write(damage)
    real = late._database

    class Waiting:
        """The connection, but that the other ledger is served first."""

        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if statement == "BEGIN IMMEDIATE":
                early.fold()
            return real.execute(statement, *values)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    late._database = Waiting()  # type: ignore[assignment]
    assert late.fold() == 0
    real.close()
    early.close()
    assert sums(tmp_path) == {tuple(account): (2, 30, 0, 12)}
    assert len(list(tmp_path.glob("*.damaged"))) == bool(damage) and not list(tmp_path.glob("*.journal"))


def test_a_fold_that_fails_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account("a", "", "m")
    journal = opened(tmp_path, ManualClock(NOW_S))
    put(journal, account, 1, 10, 0, 1, once="line")
    put(journal, account, 1, 10, 0, 1)
    ledger = Ledger(tmp_path)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(ledger, "_add_once", fail)
    with pytest.raises(sqlite3.OperationalError):
        ledger.fold()
    monkeypatch.undo()
    assert ledger.ask(ALL) == []
    ledger.fold()
    assert ledger.ask(ALL)[0][4:] == (2, 20, 0, 2)
    ledger.close()
    journal.close()


def test_work_that_is_told_again_counts_as_told_last(tmp_path: Path) -> None:
    """A batch's line that a killed server has counted but not kept is answered, and counted, by the next."""
    clock, account = ManualClock(NOW_S), Account("a", "", "m")
    first = opened(tmp_path, clock)
    put(first, account, 1, 10, 0, 7, once="batch line")
    clock.now_s += 100
    second = opened(tmp_path, clock)
    put(second, account, 1, 10, 10, 4, once="batch line")
    first.close()
    second.close()
    assert sums(tmp_path)[tuple(account)] == (1, 10, 10, 4)
    clock.now_s -= 50
    late = opened(tmp_path, clock)
    put(late, account, 1, 10, 0, 7, once="batch line")
    late.close()
    assert sums(tmp_path)[tuple(account)] == (1, 10, 10, 4), "it was told before the last, and is folded after it"


def test_a_full_disk_loses_no_record_as_long_as_memory_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, account = opened(tmp_path, ManualClock(NOW_S)), Account("a", "", "m")
    write = os.write

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def half(file: int, data: bytes) -> int:
        return write(file, data[: len(data) // 2])

    for faulty in (full, half, full):
        monkeypatch.setattr(os, "write", faulty)
        put(journal, account, 1, 10, 0, 1)
        journal.retry()
    monkeypatch.undo()
    put(journal, account, 1, 10, 0, 1)
    journal.close()
    assert sums(tmp_path)[tuple(account)] == (4, 40, 0, 4)


def test_what_a_full_disk_has_refused_is_tried_again_by_retry_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever appends, the event loop, pays for one refused write and not for one with each record; what is appended
    while a retry writes comes behind it."""
    journal, account = opened(tmp_path, ManualClock(NOW_S)), Account("a", "", "m")
    write, calls, is_full = os.write, [], True

    def counted(file: int, data: bytes) -> int:
        calls.append(len(data))
        if is_full:
            raise OSError(28, "No space left on device")
        if len(calls) == 3:
            put(journal, account, 1, 10, 0, 1)  # as the event loop does, while a thread writes
        return write(file, data)

    monkeypatch.setattr(os, "write", counted)
    for _ in range(100):
        put(journal, account, 1, 10, 0, 1)
    assert len(calls) == journal.num_failures == 1
    journal.retry()
    assert len(calls) == journal.num_failures == 2 and calls[1] > 99 * calls[0] // 2
    is_full = False
    journal.retry()
    assert len(calls) == 4, "one for all that waited, one for what came meanwhile"
    put(journal, account, 1, 10, 0, 1)
    assert len(calls) == 5, "and again at once"
    assert sums(tmp_path)[tuple(account)] == (102, 1020, 0, 102)
    journal.close()


def test_calls_are_refused_before_memory_cannot_hold_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is open is still counted in what is left; with room on the disk again calls come in, and nothing is lost."""
    journal, account = opened(tmp_path, ManualClock(NOW_S)), Account("a", "", "m")
    number = journal.number_of(account)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        entries, num_records = [(number, 0, 0, 0, 1, "")] * 50_000, 0
        while not journal.why_not():
            journal.append(entries)
            num_records += 1
            assert num_records < 1000
        assert journal.why_not() == "No space left on device"
        journal.append(entries)
        journal.retry()
        assert journal.why_not() == "No space left on device"
    journal.retry()
    assert journal.why_not() == ""
    journal.close()
    assert sums(tmp_path)[tuple(account)][3] == 50_000 * (num_records + 1)


def test_old_sums_grow_coarse_and_keep_their_total(tmp_path: Path) -> None:
    """Minutes become hours and hours days at the ages that are stated; what is older than is kept goes."""
    clock, account = ManualClock(NOW_S), Account("a", "", "m")
    start_s = clock.now_s = NOW_S // DAY_S * DAY_S
    journal = opened(tmp_path, clock)
    for _ in range(26):
        put(journal, account, 1, 10, 5, 1)
        clock.now_s += 3600
    journal.close()
    ledger = Ledger(tmp_path, kept_s=100 * DAY_S)
    ledger.fold()

    def rows(width_s: int) -> list[Sum]:
        return ledger.ask(ALL._replace(width_s=width_s))

    minute = rows(60)
    assert len(minute) == 26 and minute[1].bucket_s == start_s + 3600
    ledger.coarsen(start_s + 26 * 3600)
    assert rows(60) == minute
    ledger.coarsen(start_s + MINUTES_FOR_S + 26 * 3600)
    assert len(rows(60)) == 26
    ledger.coarsen(start_s + HOURS_FOR_S + DAY_S)
    assert [each.calls for each in rows(60)] == [24, 1, 1]
    ledger.coarsen(start_s + HOURS_FOR_S + 2 * DAY_S)
    assert [(each.calls, each.prompt, each.cached, each.output) for each in rows(60)] == [
        (24, 240, 120, 24),
        (2, 20, 10, 2),
    ]
    ledger.coarsen(start_s + 101 * DAY_S)
    assert [each.calls for each in rows(60)] == [2]
    ledger.close()


def test_nobody_waits_while_journals_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of limits are written to the same file, by others: only the sums themselves are a transaction."""
    journal = opened(tmp_path, ManualClock(NOW_S))
    put(journal, Account("t", "k", "m"), 1, 2, 0, 3)
    ledger, other = Ledger(tmp_path), Ledger(tmp_path)
    read, is_read = ledger_module._read, False

    def reading(*given: Any) -> Any:
        nonlocal is_read
        other._database.execute("PRAGMA busy_timeout=0")
        with transaction(other._database):
            is_read = True
        return read(*given)

    monkeypatch.setattr(ledger_module, "_read", reading)
    assert ledger.fold() and is_read
    journal.close()
    for each in (ledger, other):
        each.close()


def test_sums_go_to_the_file_that_took_the_place_of_theirs(tmp_path: Path) -> None:
    """Journals are deleted for sums that somebody can find."""
    ledger = Ledger(tmp_path)
    (tmp_path / "new").mkdir()
    Ledger(tmp_path / "new").close()
    os.replace(tmp_path / "new" / "usage.db", tmp_path / "usage.db")
    journal = opened(tmp_path, ManualClock(NOW_S))
    put(journal, Account("t", "k", "m"), 1, 2, 0, 3)
    journal.close()
    ledger.fold()
    ledger.close()
    other = Ledger(tmp_path)
    assert other.last_minute_s() and not list(tmp_path.glob("*.journal"))
    other.close()


def ask(all_tenants: bool = False, **given: object) -> Question:
    def values_of(name: str) -> list[str]:
        value = given.get(name, [])
        return [str(each) for each in (value if isinstance(value, list) else [value])]

    return read_question(values_of, NOW_S, all_tenants=all_tenants)


def test_questions_name_what_is_wrong_with_them() -> None:
    bad: list[tuple[str, dict[str, object]]] = [
        ("bucket_width", {"bucket_width": "1w"}),
        ("start_time", {"start_time": "yesterday"}),
        ("end_time", {"start_time": 100, "end_time": 100}),
        ("limit", {"limit": 0}),
        ("limit", {"limit": 1441, "bucket_width": "1m"}),
        ("page", {"page": "page_x"}),
        ("group_by", {"group_by": ["user_id"]}),
        ("group_by", {"group_by": ["tenant_id"]}),
        ("models", {"models": ["m"] * 101}),
        ("start_time", {"start_time": ["1", "2"]}),
    ]
    for param, given in bad:
        with pytest.raises(InvalidRequest, match=param) as caught:
            ask(**given)
        assert caught.value.param == param
    assert ask(all_tenants=True, group_by=["tenant_id"]).group_by == ("tenant",)


def test_pages_lie_side_by_side_and_cover_the_time() -> None:
    start_s = int(NOW_S) // 3600 * 3600 - 50 * 3600
    given: dict[str, object] = {"start_time": start_s, "bucket_width": "1h", "limit": 24}
    seen: list[int] = []
    for _ in range(10):
        question = ask(**given)
        told = page(question, [])
        assert isinstance(told["data"], list)
        seen += [bucket["start_time"] for bucket in told["data"]]
        if not told["has_more"]:
            break
        given["page"] = told["next_page"]
    assert seen == list(range(start_s, int(NOW_S) + 1, 3600)) and not told["has_more"]
