"""Usage by time, in the control file: journals are folded into sums of a minute, which become sums of an hour and of a
day.

The place up to which a journal is folded is written in the transaction of the sums, so each record counts once,
whoever folds and whatever ends in between; several processes may fold the same files. A journal that is folded to its
end and that nobody writes any more is deleted, once its sums are on the disk. What is read and added up is so before a
transaction begins, since counts of limits wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.errors import ConfigError
from ...state.control import CONTROL
from ...state.database import cannot_use, is_replaced, open_database, transaction
from .journal import MARK, SUFFIX, Account, Counts, Damaged, Record, is_over, records
from .question import Question, Sum

FLAG = "--usage-dir"
FILE = "usage.db"
"""Where the sums are of a folder that is named; others are in the control file."""

DAY_S = 86400
MINUTES_FOR_S = 2 * DAY_S
HOURS_FOR_S = 60 * DAY_S
_ONCE_FOR_S = 8 * DAY_S
"""Work that may be told again is told within this time: longer than a batch may take."""

_BUSY_S = 10.0
_ADD = (
    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, "
    "prompt = prompt + excluded.prompt, cached = cached + excluded.cached, output = output + excluded.output"
)
_log = logging.getLogger(__name__)

Sums = dict[tuple[int, Account], Counts]


class Journaled(NamedTuple):
    """What a journal says. end: of the last whole record; is_damaged: what follows is."""

    end: int
    is_damaged: bool
    sums: Sums
    once: list[tuple[float, Account, Counts, str]]


def cannot_open(folder: Path, path: str, error: Exception) -> ConfigError:
    """Why a Ledger of these cannot be used, and what can be done."""
    if path and isinstance(error, sqlite3.Error):
        return cannot_use(CONTROL.flag, path, error)
    return cannot_use(FLAG, folder, error)


class Ledger:
    """For one thread, which opens it. folder: of the journals. path: of the control file; "": one in the folder.
    kept_s: how long sums are kept; 0: for ever. Failures are sqlite3.Error and OSError."""

    def __init__(self, folder: Path, path: str = "", kept_s: float = 0.0) -> None:
        self._folder = folder
        self._path = path or str(folder / FILE)
        self._kept_s = kept_s
        self._read_up_to: dict[str, tuple[int, dict[int, Account]]] = {}
        self._open()

    def _open(self) -> None:
        self._database = open_database(self._path, CONTROL, busy_s=_BUSY_S)
        self._inode = os.stat(self._path).st_ino

    def close(self) -> None:
        self._database.close()

    # ---- folding ----

    def fold(self) -> int:
        """Take up what has been written to the journals of the folder; how many bytes."""
        if is_replaced(self._path, self._inode):
            self._database.close()
            self._read_up_to.clear()
            self._open()
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
        begin = self._folded(name)
        read = _read(data, base, begin, accounts)
        with self._writing(flushed=is_last or read.is_damaged):
            if not path.exists():  # another has folded it to its end, and deleted it before forgetting where that was
                self._read_up_to.clear()
                return 0
            if (folded := self._folded(name)) != begin:  # by another, in between
                begin = folded
                read = _read(data, base, begin, accounts)
            end, is_damaged, sums, once = read
            if end > begin or is_last or is_damaged:
                self._add(sums)
                for each in once:
                    self._add_once(*each)
                self._database.execute("INSERT OR REPLACE INTO folded VALUES (?, ?)", (name, max(begin, end)))
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
    def _writing(self, *, flushed: bool = False) -> Iterator[None]:
        try:
            with transaction(self._database, flushed=flushed):
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


def _read(data: bytes, base: int, begin: int, accounts: dict[int, Account]) -> Journaled:
    """Count the records behind `begin` of a journal, whose bytes from `base` on are `data`, and learn its accounts."""
    sums: Sums = {}
    once: list[tuple[float, Account, Counts, str]] = []
    if base == 0 and not data.startswith(MARK):
        return Journaled(0, True, sums, once)  # a journal gets its name after its mark is written
    end = max(base, len(MARK))
    try:
        for last, record in records(data, end - base):
            end = base + last
            accounts.update((number, Account(*rest)) for number, *rest in record.accounts)
            if end > begin:
                _count(record, accounts, sums, once)
    except Damaged as damaged:
        return Journaled(base + damaged.offset, True, sums, once)
    return Journaled(end, False, sums, once)


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
