"""Ports for what must know its port before it listens."""

from __future__ import annotations

import random
import socket

LOWEST, BEYOND = 20_000, 32_000
"""Below those that the system hands out itself: nobody who asks it for any port gets one of these meanwhile."""


def free_port() -> int:
    """One of loopback, on which nobody listens now."""
    rng = random.SystemRandom()
    while True:
        port = rng.randrange(LOWEST, BEYOND)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
