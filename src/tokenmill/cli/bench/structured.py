"""`bench structured`: hands the bench room the text side of a model, without its weights."""

from __future__ import annotations

import argparse

from ...bench.structured.command import run
from ...formats.checkpoint import open_text
from ...formats.hub import resolve_model
from ...text.text_model import TextModel, load_text
from ..models import progress_bar


def structured(args: argparse.Namespace) -> int:
    def load() -> TextModel:
        with progress_bar(f"fetching {args.model}") as progress:
            return load_text(open_text(resolve_model(args.model, progress=progress).path))

    return run(args, load)
