"""A batch's lines: how they are read in parts, and what is taken as done after a crash."""

from __future__ import annotations

import json
from pathlib import Path

from tokenmill.server.files.lines import Line, Place, answered, mend, read_lines, survey, unanswered

URL = "/v1/completions"


def line(name: str, **body: object) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body}).encode()


def test_lines_are_read_in_parts_whatever_ends_them(tmp_path: Path) -> None:
    """A mark at the start, blank lines, both line ends, and none at the last line; numbers are those of the file."""
    names = [f"n{number}" for number in range(150)]
    data = b"\xef\xbb\xbf" + b"\r\n\n".join(line(name, model="m" if name == "n3" else None) for name in names)
    path = tmp_path / "in"
    path.write_bytes(data)
    assert survey(path, URL, 1000)[:2] == (150, {"m": 7})
    found: list[Line] = []
    place = Place()
    while True:
        some, place = read_lines(path, place, 1000)
        found += some
        if not some:
            break
        assert len(some) <= 64
    assert [each.custom_id for each in found] == names
    assert [each.number for each in found] == list(range(1, 300, 2))


def test_large_lines_are_read_few_at_once(tmp_path: Path) -> None:
    """Very many blank lines between them are no end."""
    path = tmp_path / "in"
    path.write_bytes(b"".join(line(f"n{number}", x="y" * 400_000) + b"\n" * 1_200_000 for number in range(8)))
    place, names = Place(), []
    while True:
        some, place = read_lines(path, place, 1_000_000)
        if not some:
            break
        assert len(some) <= 3
        names += [each.custom_id for each in some]
    assert names == [f"n{number}" for number in range(8)]


def test_a_line_that_is_too_long_is_told_and_passed_over(tmp_path: Path) -> None:
    """It is one line with one fault, however long it is, and the next one is read."""
    path = tmp_path / "in"
    path.write_bytes(line("a", x="y" * 3_000_000) + b"\n" + line("b") + b"\n" + b"nothing\n")
    found = survey(path, URL, 1000)
    assert [(fault.code, fault.line) for fault in found.faults] == [("line_too_long", 1), ("invalid_json_line", 3)]


def test_a_torn_line_is_no_answer(tmp_path: Path) -> None:
    """What is whole stays, what is not goes, and what was not there is empty."""
    path = tmp_path / "out"
    whole = answered("r1", "a", 200, "r1", b'{"x":1}') + unanswered("r2", "b", "batch_expired", "late")
    torn = answered("r3", "c", 200, "r3", b'{"x":2}')
    for cut in (1, len(torn) // 2, len(torn) - 1):
        path.write_bytes(whole + torn[:cut])
        assert mend(path) == ({"a", "b"}, len(whole))
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0" * 4096 + torn + torn)  # a disk that had lost its power
    assert mend(path) == ({"a", "b"}, len(whole))
    assert mend(tmp_path / "nothing") == (set(), 0) and not (tmp_path / "nothing").exists()
    told = [json.loads(each) for each in whole.splitlines()]
    assert told[0]["response"] == {"status_code": 200, "request_id": "r1", "body": {"x": 1}}
    assert told[1]["error"] == {"code": "batch_expired", "message": "late"} and told[1]["response"] is None
