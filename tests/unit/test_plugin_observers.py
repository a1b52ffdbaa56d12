"""Observers of plug-ins: what they are told, and that nothing waits for them or depends on them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plugin_packages import forget, make_package
from tokenmill.cli.serve_options import ServeOptions
from tokenmill.cluster.events import Ended
from tokenmill.control.observe import plugin_observers
from tokenmill.control.observe.plugin_observers import (
    Event,
    Feed,
    PluginEvents,
    PluginObserver,
    RequestEnded,
    RequestOpened,
    StepDone,
    make_feed,
)
from tokenmill.core.errors import ConfigError
from tokenmill.core.events import EngineStats, Output, StepOutputs, Timing
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import Terms
from tokenmill.plugins.load import VARIABLE

REQUEST = Request("r", (1, 2, 3), SamplingParams(), 9, 0, terms=Terms(tenant="t"), arrival_s=10.0)
OPENED = RequestOpened("m", "r", "t", 3, 9)
STEP = StepDone("m", 5, 0.25, 2, 1, 0.5)


class Listener(PluginObserver):
    """go: when it listens; then: what it does with each event."""

    def __init__(self, then: Callable[[Event], None] = lambda event: None) -> None:
        self.go = threading.Event()
        self.heard: list[Event | str] = []
        self._then = then

    def hear(self, event: Event) -> None:
        assert self.go.wait(30)
        self.heard.append(event)
        self._then(event)

    request_opened = request_ended = step_done = hear

    def close(self) -> None:
        self.heard.append("close")


def tell_all(observer: PluginEvents) -> None:
    observer.opened([REQUEST], "somebody")
    stats = EngineStats(num_running=2, num_waiting=1, kv_usage=0.5, last_step_tokens=5, last_step_s=0.25)
    observer.sending((Output("r", (7,)),), StepOutputs((Output("r", (7,)),), stats, 11.0))
    observer.sending((Output("r", (7,)),), None)
    output = Output("r", finish_reason="length", num_output=4, num_cached=2, timing=Timing(10.0, 10.5, 11.0, 12.0))
    observer.ended(Ended(REQUEST, output, "stop", 12.0, 12.5))
    observer.ended(Ended(replace(REQUEST, id="never"), None, "abort", -1.0, 13.0))


def test_an_observer_is_told_in_order_and_of_no_text() -> None:
    listener = Listener()
    listener.go.set()
    feed = Feed("mine", listener)
    feed.start()
    tell_all(PluginEvents("m", [feed]))
    feed.close()
    ended = RequestEnded("m", "r", "t", "stop", 3, 2, 4, 0.5, 1.0, 2.5)
    never = RequestEnded("m", "never", "t", "abort", 3, 0, 0, -1.0, -1.0, 3.0)
    assert listener.heard == [OPENED, STEP, ended, never, "close"]
    assert (feed.num_told, feed.num_dropped) == (4, 0)


def test_nobody_waits_for_a_slow_observer() -> None:
    """What it has no room for is dropped and counted; others are told all the same."""
    slow, quick = Listener(), Listener()
    quick.go.set()
    feeds = [Feed("slow", slow, most_waiting=2), Feed("quick", quick)]
    for feed in feeds:
        feed.start()
    for _ in range(50):
        tell_all(PluginEvents("m", feeds))  # returns though one is not listening
    assert feeds[0].num_dropped >= 200 - 3  # one that it is at, and two that wait
    slow.go.set()
    for feed in feeds:
        feed.close()
    assert feeds[0].num_told + feeds[0].num_dropped == feeds[1].num_told == 200
    assert quick.heard[-1] == slow.heard[-1] == "close"


def test_one_that_raises_is_logged_once_and_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ValueError("no")

    listener = Listener(fail)
    listener.go.set()
    feed = Feed("bad", listener)
    feed.start()
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            tell_all(PluginEvents("m", [feed]))
        feed.close()
    assert [record.getMessage() for record in caplog.records] == ["The observer bad failed: it is told nothing more."]
    assert listener.heard == [OPENED] and (feed.num_told, feed.num_dropped) == (0, 20)


def test_a_server_that_stops_does_not_wait_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin_observers, "CLOSE_S", 0.05)
    listener = Listener()
    feed = Feed("hangs", listener, most_waiting=1)
    feed.start()
    tell_all(PluginEvents("m", [feed]))
    feed.close()
    assert not listener.heard and "The observer hangs does not end" in caplog.text
    listener.go.set()


STATES = "from tokenmill.plugins.groups import Plugin\nfrom tokenmill.control.observe.plugin_observers import *\n"
BAD = {
    "no observer": ("plugin = Plugin(1, dict)", "dict does not derive from tokenmill.control.observe."),
    "not made": (
        "class A(PluginObserver):\n def __init__(self): raise OSError('no disk')\nplugin = Plugin(1, A)",
        "A() failed: OSError: no disk",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    code, why = BAD[what]
    make_package(tmp_path, "tokenmill.observers", "mine", STATES + code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    forget()
    try:
        with pytest.raises(ConfigError) as told:
            make_feed(ServeOptions(observers=("mine",)).observers[0])
    finally:
        forget()
    message = told.value.message
    assert message.startswith(f"The plug-in 'mine' of tokenmill.observers cannot be used: {why}"), message
    assert "\n" not in message


def test_one_that_is_not_there_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    with pytest.raises(ConfigError, match="--observer other: no plug-in has this name; installed are: "):
        ServeOptions(observers=("other",))
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(ConfigError, match="--observer other: no plug-in has this name; plug-ins are off"):
        ServeOptions(observers=("other",))
