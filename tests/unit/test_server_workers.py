"""Workers as an operator sees and moves them: what becomes of each as engines come, leave and are lost."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from clocks import ManualClock
from tokenmill.control.workers.roster import KEPT_S, Roster
from tokenmill.core.errors import Forbidden, InvalidRequest, NotFound
from tokenmill.core.events import WorkerFacts
from tokenmill.core.tenant import ADMIN, OPERATOR
from tokenmill.server.admin.workers import _Views
from tokenmill.server.callers import require_local_admin


class Owner:
    def __init__(self) -> None:
        self.pool = "mixed"
        self.comes_back: bool | None = None

    def will_end(self, comes_back: bool) -> None:
        self.comes_back = comes_back


@pytest.fixture
def roster(clock: ManualClock) -> Roster:
    return Roster(clock)


def states(roster: Roster) -> dict[str, str]:
    return {each.facts.id: each.state for each in roster.shown()}


def facts(name: str, incarnation: str = "a", pool: str = "mixed") -> WorkerFacts:
    return WorkerFacts(name, incarnation, 7, pool)


def test_a_worker_of_this_machine_keeps_its_place_over_its_lives(roster: Roster, clock: ManualClock) -> None:
    owner = Owner()
    roster.start("w0", owner)
    roster.start("w1", Owner())
    assert states(roster) == {"w0": "starting", "w1": "starting"}
    clock.now_s = 101.0
    roster.come(0, facts("w0"), "")
    found = roster.find("w0")
    assert found is not None and (found.state, found.since_s, found.facts.pid) == ("ready", 101.0, 7)
    roster.pool(found, "decode")
    assert owner.pool == "decode"
    roster.go(0)
    assert states(roster)["w0"] == "lost" and found.link is None
    roster.lose("w0")
    roster.start("w0", owner)
    assert [each.facts.id for each in roster.shown()] == ["w0", "w1"] and states(roster)["w0"] == "starting"
    assert found.facts.pool == "decode", "the pool is that of the next life, too"
    clock.now_s += 10 * KEPT_S
    roster.lose("w1")
    clock.now_s += 10 * KEPT_S
    assert states(roster)["w1"] == "lost", "whoever started it starts it again"


def test_a_worker_from_elsewhere_is_forgotten_when_it_left_or_is_lost_for_long(
    roster: Roster, clock: ManualClock
) -> None:
    told: list[tuple[str, str]] = []
    roster.on_change = lambda change, facts: told.append((change, facts.id))
    roster.come(0, facts("far"), "10.0.0.2:41")
    roster.come(1, facts("farther"), "10.0.0.3:41")
    roster.leave(0)
    assert states(roster) == {"far": "draining", "farther": "ready"}
    roster.go(0)
    roster.go(1)
    assert states(roster) == {"farther": "lost"}
    assert told[2:] == [("draining", "far"), ("left", "far"), ("lost", "farther")]
    clock.now_s += KEPT_S + 1
    assert states(roster) == {} and roster.find("farther") is None


def test_the_end_of_an_old_link_does_not_touch_the_new_life(roster: Roster) -> None:
    roster.come(0, facts("far"), "x")
    roster.come(1, facts("far", "b"), "x")
    roster.go(0)
    found = roster.find("far")
    assert found is not None and (found.state, found.link) == ("ready", 1)


def request(path: dict[str, str], query: dict[str, str] | None = None, body: Any = None, **peer: Any) -> Any:
    state = SimpleNamespace(scopes=peer.get("scopes", (ADMIN,)))
    host = peer.get("host", "127.0.0.1")
    client = None if host is None else SimpleNamespace(host=host)
    return SimpleNamespace(
        path_params=path,
        query_params=query or {},
        state=state,
        client=client,
        headers=peer.get("headers", {}),
        data=body,
    )


class Limits:
    def body(self, request: Any) -> Any:
        class Body:
            async def __aenter__(self) -> bytes:
                return json.dumps(request.data).encode()

            async def __aexit__(self, *_: object) -> None:
                pass

        return Body()


class Client:
    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.done: list[tuple[Any, ...]] = []

    def drain(self, number: int) -> None:
        self.done.append(("drain", number))
        self.roster.leave(number)

    def put_into_pool(self, number: int, pool: str) -> None:
        self.done.append(("pool", number, pool))

    @property
    def gateway(self) -> Any:
        return SimpleNamespace(link=lambda number: None)


def answer(work: Any) -> Any:
    return json.loads(asyncio.run(work).body)


def test_draining_and_pools_are_refused_where_nobody_would_serve_or_nobody_is_meant(roster: Roster) -> None:
    client, owner = Client(roster), Owner()
    views = _Views(client, Limits())  # type: ignore[arg-type]
    roster.start("w0", owner)
    w0, far = {"worker": "w0"}, {"worker": "far"}
    with pytest.raises(InvalidRequest, match="is starting"):
        answer(views.drain(request(w0)))
    roster.come(3, facts("w0"), "")
    with pytest.raises(InvalidRequest, match="the only one"):
        answer(views.drain(request(w0)))
    with pytest.raises(NotFound, match="no worker 'far'"):
        answer(views.drain(request(far)))
    roster.come(4, facts("far"), "10.0.0.2:41")
    with pytest.raises(InvalidRequest, match="was not started by this server"):
        answer(views.drain(request(far, {"restart": "true"})))
    with pytest.raises(InvalidRequest, match="true or false"):
        answer(views.drain(request(w0, {"restart": "maybe"})))
    with pytest.raises(InvalidRequest, match="lower-case"):
        answer(views.pool(request(w0, body={"pool": "A b"})))
    with pytest.raises(InvalidRequest, match="not known"):
        answer(views.pool(request(w0, body={"pool": "a", "colour": 1})))
    assert not client.done
    assert answer(views.pool(request(w0, body={"pool": "decode"})))["pool"] == "decode"
    assert answer(views.drain(request(w0, {"restart": "true"})))["state"] == "draining"
    assert client.done == [("pool", 3, "decode"), ("drain", 3)] and owner.comes_back is True
    assert [each["id"] for each in answer(views.workers(request({}, scopes=(OPERATOR,))))["workers"]] == ["w0", "far"]


def test_without_keys_only_callers_of_this_machine_move_workers() -> None:
    for allowed in (
        request({}, host="10.0.0.9"),
        request({}, scopes=(OPERATOR,)),
        request({}, scopes=(OPERATOR,), host="::1"),
        request({}, scopes=(OPERATOR,), host=None),
    ):
        require_local_admin(allowed)
    for refused in (
        request({}, scopes=()),
        request({}, scopes=(OPERATOR,), host="10.0.0.9"),
        request({}, scopes=(OPERATOR,), headers={"x-forwarded-for": "10.0.0.9"}),
    ):
        with pytest.raises(Forbidden):
            require_local_admin(refused)
