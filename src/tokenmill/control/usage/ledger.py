"""Usage by time, in SQLite: journals are folded into sums of a minute, which become sums of an hour and of a day.

The place up to which a journal is folded is written in the transaction of the sums, so each record counts once,
whoever folds and whatever ends in between; several processes may fold the same files. A journal that is folded to its
end and that nobody writes any more is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...state.database import Schema, open_database, transaction
from .journal import MARK, SUFFIX, Account, Counts, Damaged, Record, is_over, records
from .question import Question, Sum

FILE = "usage.db"
DAY_S = 86400
MINUTES_FOR_S = 2 * DAY_S
HOURS_FOR_S = 60 * DAY_S
_ONCE_FOR_S = 8 * DAY_S
"""Work that may be told again is told within this time: longer than a batch may take."""

_BUSY_S = 10.0
_TABLES = """
CREATE TABLE IF NOT EXISTS usage (
    width_s INTEGER NOT NULL, bucket_s INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    calls INTEGER NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL,
    PRIMARY KEY (bucket_s, tenant, key, model, width_s)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS folded (name TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS once (
    name TEXT PRIMARY KEY, wall_s REAL NOT NULL, calls INTEGER NOT NULL, prompt INTEGER NOT NULL,
    cached INTEGER NOT NULL, output INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS once_age ON once (wall_s);
"""
SCHEMA = Schema(
    "--usage-dir", (0x746D5547, 1), _TABLES, ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL")
)
_ADD = (
    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, "
    "prompt = prompt + excluded.prompt, cached = cached + excluded.cached, output = output + excluded.output"
)
_log = logging.getLogger(__name__)

Sums = dict[tuple[int, Account], Counts]


class Ledger:
    """For one thread, which opens it. folder: of the journals and the database. kept_s: how long sums are kept; 0: for
    ever. Failures are sqlite3.Error and OSError."""

    def __init__(self, folder: Path, kept_s: float = 0.0) -> None:
        self._folder = folder
        self._kept_s = kept_s
        self._read_up_to: dict[str, tuple[int, dict[int, Account]]] = {}
        self._database = open_database(str(folder / FILE), SCHEMA, busy_s=_BUSY_S)

    def close(self) -> None:
        self._database.close()

    # ---- folding ----

    def fold(self) -> int:
        """Take up what has been written to the journals of the folder; how many bytes."""
        num_bytes = 0
        names = sorted(name for name in os.listdir(self._folder) if name.endswith(SUFFIX))
        for name in names:
            num_bytes += self._fold(name)
        for name in self._read_up_to.keys() - names:
            del self._read_up_to[name]
        return num_bytes

    def _fold(self, name: str) -> int:
        path = self._folder / name
        is_last = is_over(path)  # before it is read: all that it will ever have is there
        base, accounts = self._read_up_to.get(name, (0, {}))
        try:
            if not is_last and path.stat().st_size == base == self._folded(name):
                return 0
            with open(path, "rb") as file:
                file.seek(base)
                data = file.read()
        except FileNotFoundError:  # another process has just deleted it
            return 0
        sums: Sums = {}
        once: list[tuple[float, Account, Counts, str]] = []
        with self._writing():
            if not path.exists():  # another has folded it to its end, and deleted it before forgetting where that was
                self._read_up_to.clear()
                return 0
            begin = self._folded(name)
            end, is_damaged = _read(data, base, begin, accounts, sums, once)
            if end > begin:
                self._add(sums)
                for each in once:
                    self._add_once(*each)
                self._database.execute("INSERT OR REPLACE INTO folded VALUES (?, ?)", (name, end))
        self._read_up_to[name] = (end, accounts)
        if is_damaged:
            _log.error("The usage journal %s is damaged from byte %d on; it is kept as .damaged.", path, end)
            with contextlib.suppress(FileNotFoundError):  # another has just done it
                os.replace(path, path.with_suffix(".damaged"))
        elif is_last:
            if end < base + len(data):
                _log.warning("The last record of the usage journal %s was cut off, and what it told not sent.", path)
            path.unlink(missing_ok=True)
        if is_last or is_damaged:
            self._database.execute("DELETE FROM folded WHERE name = ?", (name,))
        return max(0, end - begin)

    def _folded(self, name: str) -> int:
        row = self._database.execute("SELECT size FROM folded WHERE name = ?", (name,)).fetchone()
        return 0 if row is None else int(row[0])

    def _add(self, sums: Sums) -> None:
        self._database.executemany(
            _ADD, [(60, bucket_s, *account, *counts) for (bucket_s, account), counts in sums.items()]
        )

    def _add_once(self, wall_s: float, account: Account, counts: Counts, name: str) -> None:
        """What is told again stands in place of what was told before."""
        before = self._database.execute(
            "SELECT wall_s, calls, prompt, cached, output FROM once WHERE name = ?", (name,)
        ).fetchone()
        if before is not None and before[0] > wall_s:
            return
        self._database.execute("INSERT OR REPLACE INTO once VALUES (?, ?, ?, ?, ?, ?)", (name, wall_s, *counts))
        told = Counts(*before[1:]) if before is not None else Counts()
        changes = Counts(*(new - old for new, old in zip(counts, told, strict=True)))
        if any(changes):
            self._add({(_minute(wall_s), account): changes})

    def last_minute_s(self) -> int:
        """From when on nothing is added up; 0: nothing is."""
        (last_s,) = self._database.execute("SELECT COALESCE(MAX(bucket_s), 0) FROM usage").fetchone()
        return int(last_s)

    # ---- growing old ----

    def coarsen(self, now_s: float) -> None:
        """Minutes become hours, hours days, and what is older than is kept goes."""
        database = self._database
        with self._writing():
            for width_s, wider_s, age_s in ((60, 3600, MINUTES_FOR_S), (3600, DAY_S, HOURS_FOR_S)):
                oldest_s = int(now_s - age_s) // wider_s * wider_s
                database.execute(
                    f"INSERT INTO usage SELECT {wider_s}, bucket_s / {wider_s} * {wider_s}, tenant, key, model, "
                    "SUM(calls), SUM(prompt), SUM(cached), SUM(output) FROM usage WHERE width_s = ? AND bucket_s < ? "
                    "GROUP BY 2, 3, 4, 5 ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, "
                    "prompt = prompt + excluded.prompt, cached = cached + excluded.cached, "
                    "output = output + excluded.output",
                    (width_s, oldest_s),
                )
                database.execute("DELETE FROM usage WHERE width_s = ? AND bucket_s < ?", (width_s, oldest_s))
            if self._kept_s:
                database.execute("DELETE FROM usage WHERE bucket_s + width_s <= ?", (int(now_s - self._kept_s),))
            database.execute("DELETE FROM once WHERE wall_s < ?", (now_s - _ONCE_FOR_S,))
        database.execute("PRAGMA incremental_vacuum").fetchall()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with transaction(self._database):
                yield
        except BaseException:
            self._read_up_to.clear()
            raise

    # ---- asking ----

    def ask(self, question: Question) -> list[Sum]:
        """In order of time, then of what is told apart."""
        names = [
            f"'' AS {column}" if column not in question.group_by else column for column in ("tenant", "key", "model")
        ]
        values: list[object] = [question.start_s, question.end_s]
        wanted = ""
        for column, allowed in question.wanted:
            assert column in ("tenant", "key", "model"), column
            wanted += f" AND {column} IN ({', '.join('?' * len(allowed))})"
            values += allowed
        width_s = int(question.width_s)
        found = self._database.execute(
            f"SELECT bucket_s / {width_s} * {width_s}, {', '.join(names)}, SUM(calls), SUM(prompt), SUM(cached), "
            f"SUM(output) FROM usage WHERE bucket_s >= ? AND bucket_s < ?{wanted} GROUP BY 1, 2, 3, 4 "
            "ORDER BY 1, 2, 3, 4",
            values,
        )
        return [Sum(*row) for row in found if any(row[4:])]


def _minute(wall_s: float) -> int:
    return int(wall_s) // 60 * 60


def _read(
    data: bytes,
    base: int,
    begin: int,
    accounts: dict[int, Account],
    sums: Sums,
    once: list[tuple[float, Account, Counts, str]],
) -> tuple[int, bool]:
    """Count the records behind `begin` of a journal, whose bytes from `base` on are `data`, and learn its accounts:
    (where the last whole record ends, whether what follows is damaged)."""
    if base == 0 and not data.startswith(MARK):
        return 0, True  # a journal gets its name after its mark is written
    end = max(base, len(MARK))
    try:
        for last, record in records(data, end - base):
            end = base + last
            accounts.update((number, Account(*rest)) for number, *rest in record.accounts)
            if end > begin:
                _count(record, accounts, sums, once)
    except Damaged as damaged:
        return base + damaged.offset, True
    return end, False


def _count(
    record: Record, accounts: dict[int, Account], sums: Sums, once: list[tuple[float, Account, Counts, str]]
) -> None:
    for number, *numbers, name in record.entries:
        counts, account = Counts(*numbers), accounts[number]
        if name:
            once.append((record.wall_s, account, counts, name))
            continue
        place = (_minute(record.wall_s), account)
        before: Sequence[int] = sums.get(place, Counts())
        sums[place] = Counts(*map(sum, zip(before, counts, strict=True)))
