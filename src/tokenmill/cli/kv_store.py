"""The process of a KV store, started by the one whose engines use it (see kv.store.child)."""

from __future__ import annotations

import signal
import sys

from ..core.errors import TokenmillError
from ..kv.store.child import report
from ..kv.store.process import StoreLaunch
from ..net.system import run_event_loop
from .logs import set_up_logging


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = StoreLaunch.from_json(sys.stdin.buffer.read())
    set_up_logging(launch.log_level, launch.log_format)
    # Imported here so that what it is told does not wait for the slow imports.
    from ..kv.store.process import keep_store

    try:
        run_event_loop(keep_store(launch))
    except TokenmillError as error:
        report(launch.report_fd, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
