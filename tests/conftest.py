"""Fixtures for every kind of test. Being here, it also puts tests/ on the import path (tiny.py, solo.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.core.errors import FetchError
from tokenmill.formats.hub import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, through the product's own cache; skips where it cannot be fetched."""
    try:
        return resolve_model("smollm2").path
    except FetchError as error:
        pytest.skip(f"the default model cannot be fetched: {error.message}")
