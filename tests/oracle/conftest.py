"""The real model, loaded once for all oracle tests that ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill import LLM
from tokenmill.ops.native import available


@pytest.fixture(scope="session")
def llm(smollm2: Path) -> Iterator[LLM]:
    """SmolLM2 on the native backend; the numpy reference would need many minutes."""
    missing = available()
    if missing is not None:
        pytest.skip(f"the native backend is not available: {missing}")
    with LLM(str(smollm2), backend="native", kv_cache_memory_bytes=1 << 30) as model:
        yield model
