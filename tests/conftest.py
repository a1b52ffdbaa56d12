"""Fixtures for every kind of test. Being here, it also puts tests/ on the import path (tiny.py, ports.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from browser import Browser, chromium
from clocks import ManualClock
from sampling import Sample, tree
from tokenmill.core.errors import FetchError
from tokenmill.formats.hub import resolve_model

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("any-speed", settings(), deadline=None)
settings.load_profile("any-speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        metavar="SEED",
        help="of the tests marked `sampled`, run a sample only; the seed 'commit' stands for what the commit contains",
    )


def pytest_configure(config: pytest.Config) -> None:
    """xdist hands its workers the options as they are here: all have one seed, whatever is committed meanwhile."""
    if config.option.sample == "commit":
        config.option.sample = tree()
    if config.option.sample is not None:
        config.pluginmanager.register(Sample(config.option.sample))


@pytest.fixture(scope="session", autouse=True)
def private_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers of tests keep for their user is no user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, through the product's own cache; skips where it cannot be fetched."""
    try:
        return resolve_model("smollm2").path
    except FetchError as error:
        pytest.skip(f"the default model cannot be fetched: {error.message}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium; skips where none is installed."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium): the console's pages are not tried")
    with Browser(program) as running:
        yield running
