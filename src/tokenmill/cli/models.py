"""`pull`, `list` and `rm`: the model cache from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.units import format_bytes
from ..formats import hub

Progress = Callable[[int, int], None]


@contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Progress | None]:
    """Gives a callback(done_bytes, total_bytes) that draws a bar on a terminal's standard error from its first call."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(title, start=False, total=None)

    def show(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
            bar.start_task(task)
        bar.update(task, completed=done, total=total or None)

    try:
        yield show
    finally:
        bar.stop()


def resolve_model(name: str, quiet: bool = False) -> hub.ResolvedModel:
    """The model on disk, fetched first where it is not cached."""
    with progress_bar(f"fetching {name}", quiet) as progress:
        return hub.resolve_model(name, progress=progress)


def pull(args: argparse.Namespace) -> int:
    model = resolve_model(args.model, args.quiet)
    print(model.path)
    if args.verify:
        for file, digest in hub.verify_model(args.model, model.path):
            print(f"intact: sha256 {digest}  {file}")
    return 0


def list_cached(args: argparse.Namespace) -> int:
    models = hub.list_models()
    if not models:
        print("No model is cached. Fetch one with: tokenmill pull smollm2")
    for model in models:
        print(f"{model.name:<32} {format_bytes(model.size_bytes):>10}  {model.path}")
    return 0


def remove(args: argparse.Namespace) -> int:
    removed = hub.remove_model(args.model)
    print(f"removed {removed.name} ({format_bytes(removed.size_bytes)})")
    return 0
