"""`pull`, `list`, `rm` and `search`: the models that there are, here and elsewhere, from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import ConfigError
from ..core.units import format_bytes, format_count, visible
from ..formats import hub
from ..formats.hub_client import search_models
from ..formats.model_names import KnownModel, find_known, known_models
from ..node.machine import read_machine

Progress = Callable[[int, int], None]

_SHARE = 0.75
"""Of the bandwidth that is measured, what one stream reads weights at (README's tables: 72 to 91 %)."""
_PROBE_THREADS = 16


@contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Progress | None]:
    """Gives a callback(done_bytes, total_bytes) that draws a bar on standard error from its first call, or says what
    begins, where that is no terminal."""
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield _once(title)
    else:
        with _drawn(title) as show:
            yield show


def _once(title: str) -> Progress:
    told: list[int] = []

    def tell(done: int, total: int) -> None:
        if not told:
            told.append(total)
            size = f": {format_bytes(total)}" if total else ""
            print(f"tokenmill: {title}{size}", file=sys.stderr, flush=True)

    return tell


@contextmanager
def _drawn(title: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"))
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(title, start=False, total=None, size="")

    def show(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
            bar.reset(task, completed=done, total=total or None)  # what an earlier download left counts as no speed
        size = format_bytes(done) + (f" of {format_bytes(total)}" if total else "")
        if speed := bar.tasks[task].speed:
            size += f", {format_bytes(speed)}/s"
        bar.update(task, completed=done, total=total or None, size=size)

    try:
        yield show
    finally:
        bar.stop()


def resolve_model(name: str, quiet: bool = False) -> hub.ResolvedModel:
    """The model on disk, fetched first where it is not cached."""
    if not quiet:
        _tell_if_large(name)
    told: list[str] = []
    room = hub.Room(_usable_memory, told.append)
    with progress_bar(f"fetching {name}", quiet) as progress:
        found = hub.resolve_model(name, progress=progress, room=room)
    for line in () if quiet else told:
        print(f"tokenmill: {line}", file=sys.stderr)
    return found


def _usable_memory() -> int:
    """Bytes."""
    return read_machine().usable_memory


def _tell_if_large(name: str) -> None:
    """Before it is fetched."""
    known = find_known(name)
    if known is None or hub.cached_path(name) is not None:
        return
    usable = _usable_memory()
    if known.memory_bytes > usable:
        print(
            f"tokenmill: note: {name} takes about {format_bytes(known.memory_bytes)} to run, and "
            f"{format_bytes(usable)} of memory are free here.",
            file=sys.stderr,
        )


def pull(args: argparse.Namespace) -> int:
    model = resolve_model(args.model, args.quiet)
    print(model.path)
    if args.verify:
        for file, digest in hub.verify_model(args.model, model.path):
            print(f"intact: sha256 {digest}  {file}")
    return 0


def list_models(args: argparse.Namespace) -> int:
    models = hub.list_models()
    if args.available:
        _list_known({model.name for model in models})
        return 0
    if not models:
        print("No model is cached. Fetch one with: tokenmill pull smollm2 (tokenmill list --available names others)")
    else:
        print(f"{'name':<32} {'file size':>10}  path")
    for model in models:
        print(f"{model.name:<32} {format_bytes(model.size_bytes):>10}  {model.path}")
    return 0


def _list_known(cached: set[str]) -> None:
    from ..bench.machine import read_bandwidth  # numpy, which nothing else here needs

    machine = read_machine()
    usable, bandwidth = machine.usable_memory, 1e9 * read_bandwidth(min(machine.usable_cores, _PROBE_THREADS))
    print(f"{format_bytes(usable)} of memory are free here; `memory` is for one conversation of 4,096 tokens.")
    print(
        f"Memory is read at {bandwidth / 1e9:.0f} GB/s just now; `tokens/s` is what one stream gets of {_SHARE:.0%} of"
        " that, as it reads the weights of each token once.\n"
    )
    heads = f"{'name':<22} {'parameters':>10} {'download':>10} {'memory':>10} {'tokens/s':>8}"
    print(f"{heads}  {'fits':<4} {'licence':<11} for")
    for model in known_models().values():
        fits = "yes" if model.memory_bytes <= usable else "no"
        state = " (cached)" if model.name in cached else ""
        speed = _shown_speed(_SHARE * bandwidth / model.bytes_per_token) if model.task in ("chat", "code") else "-"
        columns = f"{_known_columns(model)} {format_bytes(model.memory_bytes):>10} {speed:>8}"
        print(f"{columns}  {fits:<4} {_purpose(model)}{state}")
    print("\nFetch one with: tokenmill pull NAME. Others of the hub: tokenmill search WORD.")


def _shown_speed(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"


def _known_columns(model: KnownModel) -> str:
    return f"{model.name:<22} {format_count(model.parameters):>10} {format_bytes(model.size_bytes):>10}"


def _purpose(model: KnownModel) -> str:
    first = f", first choice for {' and '.join(model.recommended)}" if model.recommended else ""
    return f"{model.licence:<11} {model.task}{first}"


def search(args: argparse.Namespace) -> int:
    """Known models first; of the hub's, what their architecture means here."""
    from ..models.families import GGUF_FAMILIES

    if not 1 <= args.limit <= 100:
        raise ConfigError(f"--limit must be from 1 to 100, got {args.limit}.", param="limit")
    for model in known_models().values():
        if all(word.lower() in " ".join((model.name, *model.aliases)) for word in args.words):
            print(f"{_known_columns(model)}  {_purpose(model)}")
    found = search_models(" ".join(args.words), args.limit)
    if not found:
        print("The hub has none with GGUF files.")
        return 0
    print(f"{'of the hub':<52} {'parameters':>10} {'downloads':>10}  runs here")
    for each in found:
        runs = "yes" if each.architecture in GGUF_FAMILIES else f"no ({visible(each.architecture) or 'not said'})"
        gated = ", after its licence is accepted there" if each.is_gated else ""
        counts = f"{format_count(each.parameters):>10} {format_count(each.num_downloads):>10}"
        print(f"{visible(each.repository):<52} {counts}  {runs}{gated}")
    print("Fetch one with: tokenmill pull NAME, or NAME:Q8_0 for that quantisation.")
    return 0


def remove(args: argparse.Namespace) -> int:
    removed = hub.remove_model(args.model)
    print(f"removed {removed.name} ({format_bytes(removed.size_bytes)})")
    return 0
