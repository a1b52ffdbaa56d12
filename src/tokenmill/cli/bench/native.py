"""What `bench kernels` and `bench profile` both begin with: the model's file and the native kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.errors import ConfigError
from ...formats.hub import resolve_model
from ...node.machine import read_machine
from ...ops.native import NativeOps
from ...ops.select import select_ops
from ..models import progress_bar


def open_native(args: argparse.Namespace, what_for: str) -> tuple[Path, NativeOps]:
    """The path of `args.model`, fetched if need be, and the kernels, which the caller closes. Raises ConfigError, with
    `what_for` ("bench kernels measures"), where another backend is asked for or they cannot run."""
    with progress_bar(f"fetching {args.model}") as progress:
        path = resolve_model(args.model, progress=progress).path
    ops = select_ops(args.backend, args.threads or read_machine().usable_cpus)
    if not isinstance(ops, NativeOps):
        raise ConfigError(f"{what_for} the native kernels, which are not to be had here.", param="backend")
    return path, ops
