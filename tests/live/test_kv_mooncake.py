"""A Mooncake Store as a remote tier, in a network namespace of its own. Skipped, with the reason, where Mooncake is not
installed or no namespace can be had."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mooncake_kv.py")


def namespace() -> list[str]:
    """The command that runs another in a network of its own."""
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("no network namespace can be had here, and Mooncake listens on all addresses")


@pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None,
    reason="Mooncake is not installed (pip install 'tokenmill[kv-mooncake]')",
)
def test_blocks_are_kept_in_a_mooncake_store() -> None:
    """Saved, found and loaded by another process' tier; spoilt, full, fenced, dead: misses."""
    script = f"ip link set lo up && exec {sys.executable} {SCRIPT}"
    done = subprocess.run([*namespace(), "bash", "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout[-2000:] + done.stderr[-4000:]
