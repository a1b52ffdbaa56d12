"""Ports for what must know its port before it listens."""

from __future__ import annotations

import random
import socket

LOWEST, BEYOND = 20_000, 32_000
"""Below those that the system hands out itself: nobody who asks it for any port gets one of these meanwhile."""
_given: set[int] = set()


def free_port() -> int:
    """One of loopback, on which nobody listens now, and which this process was not given before."""
    rng = random.SystemRandom()
    while True:
        port = rng.randrange(LOWEST, BEYOND)
        if port in _given:
            continue
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                _given.add(port)
                return port
