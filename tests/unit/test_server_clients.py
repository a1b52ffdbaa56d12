"""Who a caller is: a key, a peer, or whom a trusted proxy says it is; and nobody else's word counts."""

from __future__ import annotations

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.server.config import ServerConfig
from tokenmill.server.connections import Clients


@pytest.mark.parametrize(
    ("trusted", "peer", "header", "name"),
    [
        ((), "10.0.0.1", "", "10.0.0.1"),
        ((), "10.0.0.1", "1.2.3.4", "10.0.0.1"),
        (("10.0.0.1",), "10.0.0.1", "1.2.3.4", "1.2.3.4"),
        (("10.0.0.0/8",), "10.0.0.1", "6.6.6.6, 1.2.3.4, 10.9.9.9", "1.2.3.4"),
        (("10.0.0.0/8",), "1.1.1.1", "6.6.6.6", "1.1.1.1"),
        (("10.0.0.0/8",), "10.0.0.1", "nonsense", "10.0.0.1"),
        (("10.0.0.0/8",), "10.0.0.1", "6.6.6.6, unknown", "10.0.0.1"),
        (("10.0.0.0/8",), "10.0.0.1", "1.2.3.4:5678", "1.2.3.4"),
        (("*",), "9.9.9.9", "6.6.6.6, 1.2.3.4", "1.2.3.4"),
        (("*",), "", "1.2.3.4", "1.2.3.4"),
        ((), "", "1.2.3.4", ""),
        (("::1",), "::1", "[2001:db8::1]:99", "2001:db8::/64"),
        ((), "2001:db8::ffff:1", "", "2001:db8::/64"),
        (("10.0.0.1",), "::ffff:10.0.0.1", "::ffff:1.2.3.4", "1.2.3.4"),
    ],
)
def test_who_calls(trusted: tuple[str, ...], peer: str, header: str, name: str) -> None:
    assert Clients(trusted).name(peer, header) == name


def test_a_bad_network_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="trusted-proxies"):
        ServerConfig(("m",), trusted_proxies=("10.0.0.0/99",))
