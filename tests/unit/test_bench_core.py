"""`bench core`: every part is measured over steps in which all rows decode, and nothing is left running."""

from __future__ import annotations

import json

import pytest

from tokenmill.bench.core import PARTS
from tokenmill.cli import main as cli


def test_every_part_of_every_width_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "core", "--rows", "1", "3", "--steps", "30", "--json", "-"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [(one["rows"], one["part"]) for one in plain["parts"]] == [(rows, part) for rows in (1, 3) for part in PARTS]
    assert all(0 < one["low"] <= one["median"] <= one["high"] for one in plain["parts"])
    by_part = {(one["rows"], one["part"]): one["low"] for one in plain["parts"]}
    assert by_part[3, "with shell"] > max(by_part[3, "plan"], by_part[3, "commit"])


def test_too_few_steps_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured where the first sequences end before the last are in."""
    assert cli.main(["bench", "core", "--rows", "64", "--steps", "5"]) == 2
    assert "5 --steps are too few for 64 --rows" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--steps", "-1"], ["--rows", "x"]])
def test_numbers_out_of_range_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "core", *flags])
    assert ended.value.code == 2 and "must be a number from 1 to 100000" in capsys.readouterr().err
