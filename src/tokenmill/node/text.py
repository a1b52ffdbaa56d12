"""The text side of a model as it was asked for: tokenizer, chat template, and what requests sample with by default."""

from __future__ import annotations

import os
from dataclasses import replace

from ..core.errors import ConfigError
from ..formats.checkpoint import Checkpoint
from ..text.chat_template import MAX_TEMPLATE_CHARS
from ..text.text_model import TextModel, load_text
from .options import TextOptions
from .sampling import SamplingChoice, choose_sampling


def load_text_model(checkpoint: Checkpoint, options: TextOptions) -> tuple[TextModel, SamplingChoice]:
    """And why it samples as it does. Raises ConfigError and BadCheckpoint."""
    sampling = choose_sampling(checkpoint, options.generation_config, options.override_generation_config)
    text = load_text(
        checkpoint,
        _read_template(options.chat_template),
        tool_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )
    guard = {"loop_guard": True} if options.loop_guard else {}
    return replace(text, sampling_defaults=sampling.defaults | guard), sampling


def _read_template(given: str | None) -> str | None:
    """What --chat-template names: a file, or, as it holds a brace, the template itself. Raises ConfigError."""
    if given is None:
        return None
    if "{" in given and not os.path.exists(given):
        return given
    try:
        with open(given, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_TEMPLATE_CHARS + 1)
    except OSError as error:
        raise ConfigError(f"--chat-template {given} cannot be read: {error}.", param="chat_template") from None
