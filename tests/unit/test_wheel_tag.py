"""The wheel's platform tag: the oldest glibc that has what the library needs, or none that it does not deserve."""

from __future__ import annotations

import base64
import hashlib
import runpy
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "tag_wheel"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="the scripts of CI are not here")


def names(*words: str) -> bytes:
    """A string table."""
    return b"\x7fELF\0" + b"\0".join(word.encode() for word in words) + b"\0"


@pytest.mark.parametrize(
    ("table", "arch", "tag"),
    [
        (names("libc.so.6", "libm.so.6", "GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_2.9"), "x86_64", "manylinux_2_17_x86_64"),
        (names("libc.so.6", "GLIBC_2.2.5"), "x86_64", "manylinux_2_5_x86_64"),
        (names("libc.so.6", "GLIBC_2.17", "libmine.so"), "aarch64", "manylinux_2_17_aarch64"),
        (names("libc.so.6", "libgomp.so.1", "GLIBC_2.17"), "x86_64", None),
        (names("libc.musl-x86_64.so.1"), "x86_64", None),
        (names("libstdc++.so.6", "GLIBC_2.17", "GLIBCXX_3.4.29"), "x86_64", None),
        (names("libc.so.6", "GLIBC_2.27"), "riscv64", None),
    ],
)
def test_the_tag_is_what_the_library_needs(table: bytes, arch: str, tag: str | None) -> None:
    assert runpy.run_path(str(SCRIPT))["manylinux"]([table], arch) == tag


def test_a_wheel_is_renamed_with_its_record(tmp_path: Path) -> None:
    old = tmp_path / "tokenmill-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(old, "w") as archive:
        archive.writestr("tokenmill/lib.so", names("libc.so.6", "GLIBC_2.31"))
        archive.writestr("tokenmill-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n")
        archive.writestr("tokenmill-0.1.0.dist-info/RECORD", "stale")
    new = runpy.run_path(str(SCRIPT))["tag"](old)
    assert new.name == "tokenmill-0.1.0-py3-none-manylinux_2_31_x86_64.whl" and not old.exists()
    with zipfile.ZipFile(new) as archive:
        assert archive.read("tokenmill-0.1.0.dist-info/WHEEL").endswith(b"Tag: py3-none-manylinux_2_31_x86_64\n")
        record = archive.read("tokenmill-0.1.0.dist-info/RECORD").decode().splitlines()
        for line in record:
            name, digest, size = line.split(",")
            data = archive.read(name)
            if name.endswith("RECORD"):
                assert not digest and not size
                continue
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(data))
    assert runpy.run_path(str(SCRIPT))["tag"](new) == new


def test_a_wheel_without_a_library_keeps_its_name(tmp_path: Path) -> None:
    wheel = tmp_path / "tokenmill-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tokenmill-0.1.0.dist-info/RECORD", "")
    assert runpy.run_path(str(SCRIPT))["tag"](wheel) == wheel and wheel.exists()
