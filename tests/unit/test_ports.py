"""Ports that tests give to servers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import ports


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nobody listens yet on the one that was given."""
    first, second = ports.free_port(), ports.free_port()
    monkeypatch.setattr(ports, "_given", set(), raising=False)
    draws = iter([first, first, second])
    monkeypatch.setattr(ports.random, "SystemRandom", lambda: SimpleNamespace(randrange=lambda *_: next(draws)))
    assert [ports.free_port(), ports.free_port()] == [first, second]
