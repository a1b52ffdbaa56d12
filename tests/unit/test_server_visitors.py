"""Which pages may call, decided by headers alone, and how places are shared over addresses."""

from __future__ import annotations

import socket

import pytest
from starlette.datastructures import Headers

from tokenmill.core.errors import Forbidden
from tokenmill.server.callers import Visitors
from tokenmill.server.connections import Peers, address_group


def may(visitors: Visitors, method: str = "POST", **headers: str) -> bool:
    try:
        visitors.check(method, Headers({name.replace("_", "-"): value for name, value in headers.items()}))
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.", True),
        ("127.0.0.1:8000", True),
        ("192.168.0.7", True),
        ("[::1]:8000", True),
        ("[fe80::1%25eth0]", True),
        ("a.localhost:1", True),
        ("printer.local", True),
        ("host.docker.internal:8000", True),
        ("api.example.com", True),
        ("x.y.example.org", True),
        ("example.org", False),
        ("evil.com", False),
        ("evil.com:8000", False),
        ("127.0.0.1.evil.com", False),
        ("localhost.evil.com", False),
        ("notlocal", False),
        ("2130706433", False),
        ("[evil]", False),
        ("\xff", False),
    ],
)
def test_names_that_host_may_be_where_only_this_machine_connects(host: str, known: bool) -> None:
    visitors = Visitors(("api.example.com:443", "*.example.org"), ())
    assert may(visitors, "GET", host=host) == may(visitors, host=host) == known
    assert may(Visitors(None, ()), host=host) and may(Visitors(("*",), ()), host=host)


def test_the_own_name_and_a_request_without_host_are_known() -> None:
    assert may(Visitors((), ()), host=socket.gethostname()) and may(Visitors((), ()))


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://LOCALHOST:8000", "localhost:8000", True),
        ("http://localhost", "localhost:80", True),
        ("https://api.example.com", "api.example.com", True),  # a proxy has taken TLS off
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://127.0.0.1:8000", "localhost:8000", False),
        ("https://evil.com", "localhost:8000", False),
        ("null", "localhost:8000", False),
        ("file://", "localhost", False),
        ("", "localhost", False),
        ("http://[", "localhost", False),
        ("http://localhost:99999999", "localhost", False),
    ],
)
def test_a_page_of_another_origin_may_look_but_not_act(origin: str, host: str, own: bool) -> None:
    visitors = Visitors(("api.example.com",), ("http://allowed.example/",))
    assert may(visitors, host=host, origin=origin) == own
    assert all(may(visitors, method, host=host, origin=origin) for method in ("GET", "HEAD", "OPTIONS"))
    assert may(visitors, host=host, origin="http://Allowed.example", sec_fetch_site="cross-site")
    assert may(Visitors(None, ("*",)), host=host, origin=origin)


def test_without_an_origin_only_what_a_browser_calls_cross_site_is_refused() -> None:
    visitors = Visitors((), ())
    assert not may(visitors, host="localhost", sec_fetch_site="cross-site")
    assert all(may(visitors, host="localhost", sec_fetch_site=site) for site in ("same-origin", "none", "same-site"))
    assert may(visitors, "GET", host="localhost", sec_fetch_site="cross-site")


class Place:
    """A connection that notes that it had to go."""

    def __init__(self, peers: Peers, address: str) -> None:
        self.peers, self.address, self.is_gone = peers, address, False
        assert peers.enter(address)
        peers.waits(address, self)

    def give_way(self) -> None:
        self.is_gone = True
        self.peers.leave(self.address, self)


def test_the_address_with_most_gives_up_the_one_that_has_waited_longest() -> None:
    peers = Peers(6, 100)
    many = [Place(peers, "a") for _ in range(4)]
    few = [Place(peers, "b") for _ in range(2)]
    peers.busy("a", many[0])
    Place(peers, "c")
    assert [place.is_gone for place in (*many, *few)] == [False, True, False, False, False, False]
    Place(peers, "a")  # its own oldest
    assert many[2].is_gone and not many[3].is_gone and peers.num_open == 6


def test_nobody_gives_way_to_an_address_that_has_more() -> None:
    peers = Peers(4, 100)
    busy = [Place(peers, "a") for _ in range(3)]
    for place in busy:
        peers.busy("a", place)
    idle = Place(peers, "b")
    assert not peers.enter("a") and not idle.is_gone
    assert peers.enter("c") and idle.is_gone
    peers.leave("a", busy[0])
    assert peers.enter("a") and peers.num_open == 4


def test_the_pot_gives_what_it_has_and_takes_back() -> None:
    peers = Peers(1, 100)
    assert peers.take(60) and not peers.take(41) and peers.take(40) and not peers.take(1)
    peers.give(100)
    assert peers.take(100)


def test_addresses_of_one_network_count_as_one() -> None:
    assert address_group("10.0.0.1") == address_group("::ffff:10.0.0.1") != address_group("10.0.0.2")
    assert address_group("2001:db8:1:2::5") == address_group("2001:db8:1:2:ffff::1") != address_group("2001:db8:1:3::5")
    assert address_group("fe80::1%eth0") == address_group("fe80::2%eth1") and address_group("") == ""
