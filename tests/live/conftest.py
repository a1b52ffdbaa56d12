"""The real model for live tests, fetched through the product's own cache; without a network they are skipped."""

from __future__ import annotations

import pytest

from tokenmill.core.errors import FetchError
from tokenmill.formats.hub import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The default model's path."""
    try:
        return str(resolve_model("smollm2").path)
    except FetchError as error:
        pytest.skip(f"the default model cannot be fetched: {error.message}")
