"""Settings of draws are declared once: what follows from the table is there; a library of another table is refused."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokenmill.api.llama.settings import settings
from tokenmill.cli.options import SamplingOptions
from tokenmill.cli.parser import SPELLED
from tokenmill.core import sampling
from tokenmill.core.sampling import COLUMNS, FILTERS, SAMPLERS, SETTINGS, SamplingParams
from tokenmill.ops.draws import SampleBatch
from tokenmill.ops.native import available, library

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture
def fresh_library():
    library._load.cache_clear()
    yield
    library._load.cache_clear()


def test_columns_of_a_step_are_in_the_order_of_the_native_struct() -> None:
    """Whatever filters a step has."""
    count = 3
    own = [np.full(count, place) for place in range(len(COLUMNS) - len(FILTERS))]
    last = list(FILTERS)[-1]
    how = SampleBatch(*own, filters={last: np.full(count, 99)})
    found = [None if column is None else int(column[0]) for column in how.columns()]
    assert found == [*range(len(own)), *[None] * (len(FILTERS) - 1), 99]
    assert how.filter(last, 0) == 99 and how.filter(next(iter(FILTERS)), 0) == SETTINGS[next(iter(FILTERS))].default


def test_each_setting_is_reached_by_its_flags_and_told_to_others() -> None:
    own = {each.name for each in fields(SamplingOptions)}
    told = settings(SamplingParams(), seed=None, max_tokens=None)
    for name, declared in SETTINGS.items():
        assert (name in own) == (declared.help is not None), name
        known = [flag for flag in declared.flags(name) if flag != "--repetition-penalty"]
        assert known and all(SPELLED[flag][0].removesuffix("[]").endswith(f".{name}") for flag in known), name
        assert name in told or declared.names[0] in told, name
        assert declared.sampler in ("", *SAMPLERS), name
    assert {declared.sampler for declared in SETTINGS.values()} - {""} == set(SAMPLERS)


def test_a_header_that_says_the_same_is_left_as_it_is(tmp_path: Path) -> None:
    """So the build, which looks at times, compiles nothing for it; one that says something else is written."""
    header = tmp_path / "made" / "sampling_columns.h"
    write = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).parents[2] / "native" / "write_sampling_columns.py"),
        str(header),
    ]
    subprocess.run(write, check=True)
    assert header.read_text() == sampling.native_header()
    os.utime(header, ns=(1, 1))
    subprocess.run(write, check=True)
    assert header.stat().st_mtime_ns == 1
    header.write_text("another table's")
    subprocess.run(write, check=True)
    assert header.read_text() == sampling.native_header()


@needs_native
def test_a_library_of_another_table_is_refused(fresh_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks is named, and what to do."""
    known = sampling.native_layout
    monkeypatch.setattr(library, "native_layout", lambda members: f"{known(members)}float brand_new;")
    reason = available()
    assert reason is not None and "(float brand_new)" in reason and "build it again" in reason, reason


@pytest.mark.parametrize(("version", "said"), [(14, "speaks version 14"), (library.ABI_VERSION, "is older")])
@needs_native
def test_an_older_library_is_refused(
    fresh_library: None, monkeypatch: pytest.MonkeyPatch, version: int, said: str
) -> None:
    """One of another border, and one that does not tell its columns."""

    def old(path: str) -> Any:
        return SimpleNamespace(tm_abi_version=lambda: version)

    monkeypatch.setattr(ctypes, "CDLL", old)
    reason = available()
    assert reason is not None and said in reason and "build it again" in reason, reason
