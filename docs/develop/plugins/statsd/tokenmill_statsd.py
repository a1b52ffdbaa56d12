"""An observer: sends what happens to a StatsD daemon, or what speaks its protocol, by UDP: counts and times of
requests, the state of engines after their steps. STATSD_HOST and STATSD_PORT say where (default: 127.0.0.1:8125)."""

import os
import socket

from tokenmill.control.observe.plugin_observers import PluginObserver, RequestEnded, StepDone
from tokenmill.plugins.groups import Plugin


class StatsD(PluginObserver):
    def __init__(self) -> None:
        self._address = (os.environ.get("STATSD_HOST", "127.0.0.1"), int(os.environ.get("STATSD_PORT", "8125")))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def request_ended(self, event: RequestEnded) -> None:
        self._send(f"requests.{event.reason}:1|c")
        self._send(f"output_tokens:{event.num_output_tokens}|c")
        if event.ttft_s >= 0:
            self._send(f"ttft:{1000 * event.ttft_s:.1f}|ms")
        self._send(f"e2e:{1000 * event.e2e_s:.1f}|ms")

    def step_done(self, event: StepDone) -> None:
        self._send(f"running:{event.num_running}|g")
        self._send(f"kv_usage:{event.kv_usage:.4f}|g")

    def close(self) -> None:
        self._socket.close()

    def _send(self, metric: str) -> None:
        self._socket.sendto(f"tokenmill.{metric}".encode(), self._address)


plugin = Plugin(interface=1, provides=StatsD)
