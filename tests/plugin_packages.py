"""Packages with plug-ins: the examples of docs/develop/plugins, installed by pip into a folder of a test's own, and
packages that a test makes up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tokenmill.plugins import load

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "develop" / "plugins"


def install_examples(folder: Path, only: str = "*") -> Path:
    """The folder for PYTHONPATH. only: one of them. A copy is built, so that nothing is left beside the sources."""
    built = shutil.copytree(EXAMPLES, folder / "sources")
    packages = [str(path.parent) for path in sorted(built.glob(f"{only}/pyproject.toml"))]
    assert packages
    site = folder / "site"
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", str(site), *packages], check=True)
    return site


def forget() -> None:
    """What was found is looked for again, as in a new process."""
    load._load.cache_clear()
    load._entry_points.cache_clear()


def make_package(folder: Path, group: str, name: str, code: str, package: str = "made-up") -> None:
    """As installed: a module with `code`, and its metadata. The entry point names `plugin` of it."""
    module = package.replace("-", "_")
    info = folder / f"{module}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n", "utf8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:plugin\n", "utf8")
    (folder / f"{module}.py").write_text(code, "utf8")
