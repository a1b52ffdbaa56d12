"""The audit log as the server writes it: entries in the order in which they were noted, by a thread of its own.

The event loop only queues (a microsecond an entry). The thread writes what is queued, forces it to the disk once a
second and before each head, and signs a head every 100 entries or 10 seconds. Nothing is dropped: while the log cannot
be written, or too much is queued, `why_not` says why, and who asks refuses further calls. Heads also go to syslog (RFC
5424) as datagrams: what another machine keeps, nobody rewrites here.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...core.errors import ConfigError
from ...core.masking import Mask
from ...core.units import MiB
from ..observe.class_metrics import LABELS
from ..signing import Signer
from .chain import Damaged, Segments, Tip, head_of, line_after, tip_of

_PRIORITY = 10 * 8 + 5  # authpriv, notice
_log = logging.getLogger(__name__)


class Syslog:
    """Sends to a Unix socket, where `address` is a path, or by UDP to HOST:PORT. What cannot be sent is counted."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._host = socket.gethostname()
        self._num_sent = self._num_lost = 0
        if address.startswith("/"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._target: Any = address
        else:
            self._socket, self._target = _udp(address)
        self._socket.setblocking(False)

    def send(self, head: dict[str, Any]) -> None:
        text = "head={seq}:{hash} key={key} signature={signature}".format(**head)
        line = f"<{_PRIORITY}>1 {head['time']} {self._host} tokenmill {os.getpid()} audit-head - {text}"
        try:
            self._socket.sendto(line.encode(), self._target)
            self._num_sent += 1
        except OSError as error:
            if not self._num_lost:
                _log.warning("The audit log's head cannot be sent to syslog at %s: %s.", self._address, error.strerror)
            self._num_lost += 1

    def status(self) -> dict[str, Any]:
        return {"address": self._address, "sent": self._num_sent, "lost": self._num_lost}

    def close(self) -> None:
        self._socket.close()


def _udp(address: str) -> tuple[socket.socket, Any]:
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--audit-syslog must be a path, HOST:PORT or off, got {address!r}.", param="audit_syslog"
        ) from error
    return socket.socket(family, kind), target


HEAD_ENTRIES = 100
HEAD_S = 10.0
SYNC_S = 1.0
MAX_PENDING = 65_536
_RETRY_S = 1.0

Event = Mapping[str, Any]
STOPPED: Event = {"action": "server.stop", "outcome": "done"}


class AuditLog:
    """Between `open` and `close`, `note` may be called by any thread. `syslog`: heads go there too; `mask`: of what no
    entry has."""

    def __init__(
        self,
        path: str,
        signer: Signer,
        *,
        syslog: Syslog | None = None,
        max_bytes: int = 64 * MiB,
        mask: Mask | None = None,
    ) -> None:
        self.mask = mask or Mask()
        self.before_close: list[Callable[[], None]] = []
        """Called before the last entry: by whom something is still to be noted."""
        self._path = Path(path)
        self._signer = signer
        self._syslog = syslog
        self._max_bytes = max_bytes
        self._pending: deque[tuple[float, Event | Callable[[], Event]]] = deque()
        self._woken = threading.Condition()
        self._segments: Segments | None = None
        self._thread: threading.Thread | None = None
        self._is_idle = self._is_closing = False
        self._failure = ""
        self._head: dict[str, Any] = {}
        self._head_seq = 0
        self._head_due_s = self._sync_due_s = float("inf")

    def open(self) -> None:
        """Find the log's end and start to write. Raises ConfigError for a log that cannot be gone on with."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            segments = Segments(self._path, self._max_bytes)
            with segments.held():
                segments.find_end()
                segments.check_heads()
        except OSError as error:
            raise ConfigError(f"The audit log {self._path} cannot be written: {error.strerror}.") from error
        except Damaged as error:
            raise ConfigError(
                f"The audit log cannot be gone on with. {error} Look at it with tokenmill audit verify, then move it "
                "and its heads away."
            ) from error
        self._segments = segments
        self._head_seq = segments.tip.seq
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def note(self, event: Event | Callable[[], Event]) -> None:
        """What happened, or what gives that when it is written. Its time is now."""
        self._pending.append((time.time(), event))
        if self._is_idle:
            with self._woken:
                self._woken.notify()

    @property
    def why_not(self) -> str:
        """Why no further call may be let in; "": it may."""
        if self._failure:
            return self._failure
        return "it cannot keep up" if len(self._pending) > MAX_PENDING else ""

    def status(self) -> dict[str, Any]:
        assert self._segments is not None
        tip = self._segments.tip
        return {
            "object": "audit.status",
            "file": str(self._path),
            "seq": tip.seq,
            "hash": tip.hash,
            "pending": len(self._pending),
            "failure": self.why_not or None,
            "head": self._head or None,
            "key": self._signer.key_id,
            "syslog": None if self._syslog is None else self._syslog.status(),
        }

    def close(self) -> None:
        """Write all that is noted, and sign the head."""
        for finish in self.before_close:
            finish()
        with self._woken:
            self._is_closing = True
            self._woken.notify()
        if self._thread is not None:
            self._thread.join()
        if self._segments is not None:
            self._segments.close()
        if self._syslog is not None:
            self._syslog.close()

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            with self._woken:
                self._is_idle = True  # before the look at what is pending: `note` looks in the other order
                while not (self._pending or self._is_closing) and time.monotonic() < self._due_s():
                    left_s = self._due_s() - time.monotonic()
                    self._woken.wait(left_s if left_s < float("inf") else None)
                self._is_idle = False
                is_last = self._is_closing
            try:
                while self._write_some():
                    pass
                if is_last or time.monotonic() >= self._due_s():
                    self._settle(must_sign=is_last)
                self._recovered()
            except (OSError, Damaged) as error:
                self._fail(error)
                if is_last:
                    return
                time.sleep(_RETRY_S)
                continue
            if is_last and not self._pending:
                return

    def _due_s(self) -> float:
        return min(self._head_due_s, self._sync_due_s)

    def _write_some(self) -> bool:
        """Write entries up to where the next head is due. Whether there were any."""
        segments = self._segments
        assert segments is not None
        if not self._pending:
            return False
        with segments.held():
            segments.find_end()
            if segments.mended is not None:
                self._pending.appendleft((time.time(), {"action": "log.mend", "outcome": "done", **segments.mended}))
                segments.mended = None
            if segments.is_full():
                name = segments.rotate()
                self._pending.appendleft((time.time(), {"action": "log.rotate", "object": name, "outcome": "done"}))
            self._head_seq = min(self._head_seq, segments.tip.seq)
            num = max(1, min(len(self._pending), HEAD_ENTRIES - (segments.tip.seq - self._head_seq)))
            tip, lines = segments.tip, []
            for index in range(num):
                time_s, event = self._pending[index]
                line = _line(tip, time_s, event, self.mask)
                tip = tip_of(tip.seq + 1, line)
                lines.append(line)
            segments.append(lines, tip)
            for _ in range(num):
                self._pending.popleft()
            now = time.monotonic()
            self._sync_due_s = min(self._sync_due_s, now + SYNC_S)
            self._head_due_s = min(self._head_due_s, now + HEAD_S)
            if tip.seq - self._head_seq >= HEAD_ENTRIES:
                self._sign()
        return True

    def _settle(self, *, must_sign: bool) -> None:
        assert self._segments is not None
        with self._segments.held():
            self._segments.find_end()
            if (must_sign or time.monotonic() >= self._head_due_s) and self._segments.tip.seq > self._head_seq:
                self._sign()
            self._segments.sync()
            self._sync_due_s = float("inf")

    def _sign(self) -> None:
        segments = self._segments
        assert segments is not None
        segments.sync()
        head = head_of(segments.tip, time.time(), self._signer)
        segments.append_head(head)
        self._head, self._head_seq = head, segments.tip.seq
        self._head_due_s = self._sync_due_s = float("inf")
        if self._syslog is not None:
            self._syslog.send(head)

    def _fail(self, error: Exception) -> None:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        if not self._failure:
            _log.error("The audit log %s cannot be written: %s. Calls are refused until it can.", self._path, reason)
        self._failure = reason

    def _recovered(self) -> None:
        if self._failure:
            _log.warning("The audit log %s is written again.", self._path)
            self._failure = ""


def _line(tip: Tip, time_s: float, event: Event | Callable[[], Event], mask: Mask) -> bytes:
    """Masked before it is chained. A bug in what makes an entry must not end the log."""
    try:
        return line_after(tip, time_s, mask.deep(event() if callable(event) else event))
    except Exception as error:
        _log.exception("An entry of the audit log could not be made.")
        return line_after(tip, time_s, {"action": "log.bug", "outcome": type(error).__name__})


def started(version: str, **facts: Any) -> Event:
    """The entry of a server that begins to serve."""
    return {"action": "server.start", "object": f"pid {os.getpid()}", "outcome": "done", "version": version, **facts}


class AuditMetrics:
    """A collector. `status`: of an audit log that is open."""

    def __init__(self, model_name: str, status: Callable[[], Mapping[str, Any]]) -> None:
        self._labels = (model_name, "0")
        self._status = status

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        entries = CounterMetricFamily("tokenmill:audit_entries", "Entries of the audit log", labels=LABELS)
        entries.add_metric(self._labels, float(status["seq"]))
        yield entries
        for name, text, value in (
            ("tokenmill:audit_pending", "Entries that are not written yet", status["pending"]),
            ("tokenmill:audit_failing", "1 while the audit log cannot be written", status["failure"] is not None),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, float(value))
            yield gauge
