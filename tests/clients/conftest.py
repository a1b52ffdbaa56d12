"""The servers that clients are tried on, and the environment of the clients' packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "live"))
from serving import Server

collect_ignore = ["scripts"]
"""They run in the clients' environment."""

ENVIRONMENT = Path(os.environ.get("TOKENMILL_CLIENTS_VENV", Path(__file__).parents[2] / ".venv-clients"))


@pytest.fixture(scope="session")
def clients_python() -> str:
    """The Python that has the clients' packages."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment of clients at {ENVIRONMENT}: make clients makes it")
    return str(python)


@pytest.fixture(scope="session")
def chat_server(smollm2: Path) -> Iterator[Server]:
    """The default model, with the settings that a newcomer gets."""
    with Server(model="smollm2") as server:
        yield server
