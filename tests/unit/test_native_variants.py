"""A program in C++ on the C interface runs every variant of the kernels and finds the same bytes: here, and
cross-compiled for ARM in an emulator, where both are installed."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.core.sampling import native_header
from tokenmill.ops.native import available
from tokenmill.ops.native.library import available_isas, library_path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "native/tests/variants_agree.cpp"
HOST_COMPILER = shutil.which("c++")
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
CMAKE = shutil.which("cmake")
NM = shutil.which("nm")

pytestmark = pytest.mark.exact


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.skipif(HOST_COMPILER is None, reason="no C++ compiler")
def test_variants_agree_here(tmp_path: Path) -> None:
    """A decoder layer of every weight kind, with attention, adapters and draws: all bytes equal the scalar kernels'."""
    library, program = library_path(), tmp_path / "variants_agree"
    assert HOST_COMPILER is not None
    (tmp_path / "sampling_columns.h").write_text(native_header())
    linked = [str(SOURCE), str(library), f"-Wl,-rpath,{library.parent}"]
    _run([HOST_COMPILER, "-std=c++17", f"-I{tmp_path}", *linked, "-o", str(program)])
    compared = [isa for isa in (*reversed(available_isas()), "amx") if isa != "scalar" and available_isas((isa,))]
    expected = "".join(f"{isa} compared\n" for isa in compared)
    said = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert (said.returncode, said.stdout) == (0 if expected else 1, expected), said


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.skipif(sys.platform != "linux" or NM is None, reason="no nm that reads the library")
def test_the_library_shows_its_interface_only() -> None:
    """The C++ runtime linked into it meets no other in the process."""
    assert NM is not None
    shown = [line.split()[-1] for line in _run([NM, "--dynamic", "--defined-only", str(library_path())]).splitlines()]
    assert "tm_abi_version" in shown and not [name for name in shown if not name.startswith("tm_")]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() == "aarch64", reason="the other tests run the ARM kernels themselves")
@pytest.mark.skipif(COMPILER is None, reason="no compiler for ARM (aarch64-linux-gnu-g++)")
@pytest.mark.skipif(EMULATOR is None, reason="no emulator of ARM (qemu-aarch64)")
@pytest.mark.skipif(CMAKE is None, reason="no cmake")
def test_variants_agree_under_emulation(tmp_path: Path) -> None:
    """The same on ARM, with both kinds of dot product; a processor without them runs neither variant."""
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
    assert CMAKE is not None and EMULATOR is not None
    _run([CMAKE, "-S", str(ROOT), "-B", str(tmp_path), *system, *flags])
    _run([CMAKE, "--build", str(tmp_path), "--target", "variants_agree", "--parallel", "2"])
    libraries = Path("/usr/aarch64-linux-gnu")
    emulate = [EMULATOR, "-L", str(libraries), "-cpu"]
    said = _run([*emulate, "max", str(tmp_path / "variants_agree")])
    assert said.split("\n")[:2] == ["neon compared", "neoni8mm compared"], said
    old = subprocess.run([*emulate, "cortex-a57", str(tmp_path / "variants_agree")], capture_output=True, timeout=60)
    assert (old.returncode, old.stdout) == (1, b""), old


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
