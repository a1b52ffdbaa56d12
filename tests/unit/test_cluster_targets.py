"""The front end's order of calls with targets: the same as the engine's, on the same clock."""

from __future__ import annotations

from tokenmill.cluster.request_queue import RequestQueue
from tokenmill.cluster.slots import Room
from tokenmill.core.cost import Costs
from tokenmill.core.events import EngineStats
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import USUAL, Terms


def _request(name: str, num_prompt: int, terms: Terms = USUAL) -> Request:
    return Request(name, (7,) * num_prompt, SamplingParams(), 4, 0, terms=terms)


def _order(*requests: Request, is_measured: bool = True) -> list[str]:
    """In which calls that came together are submitted, where one fits at a time."""
    request_queue = RequestQueue()
    request_queue.share(Room(1, 512))
    if is_measured:
        request_queue.step(
            EngineStats(num_steps=1, last_step_tokens=512, last_step_s=0.3, costs=Costs(0.01, 0.0, 0.0005)), 0.0
        )
    held = [_request("held-0", 1), _request("held-1", 1)]
    for request in (*held, *requests):
        request_queue.join([request], "me")
    found: list[str] = []
    started: list[Request] = []
    while len(found) < len(requests) + 2:
        while (request := request_queue.choose()) is not None:
            found.append(request.id)
            started.append(request)
        request_queue.end(started.pop(0), 1, "stop")
    return [name for name in found if not name.startswith("held")]


def test_targets_order_what_waits_in_front_of_the_engine() -> None:
    """By slack among those with a target, which pass longer waits without one; a late one passes nobody."""
    requests = (
        _request("plain", 900),
        _request("loose", 400, Terms(ttft_s=3.0)),
        _request("tight", 400, Terms(ttft_s=0.6)),
        _request("late", 1200, Terms(ttft_s=0.1)),
        _request("short", 3),
    )
    assert _order(*requests) == ["short", "tight", "loose", "plain", "late"]


def test_without_measures_targets_change_nothing() -> None:
    """Before the first step all are ordered by their prompts."""
    requests = (_request("long", 400, Terms(ttft_s=0.5)), _request("brief", 20))
    assert _order(*requests, is_measured=False) == ["brief", "long"]
