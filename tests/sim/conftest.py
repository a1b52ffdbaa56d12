"""Injected failures are expected here: their log lines are left out."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def without_step_failures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="tokenmill.engine.shell")
