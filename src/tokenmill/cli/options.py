"""Flags from declarations (core/options.py), and back: what was given, as the object that its user reads.

Adding an option is a field of that object: EngineOptions or TextOptions (node/options.py), ServerConfig
(server/config.py), ServeOptions or HttpOptions (serve_options.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, make_dataclass
from typing import Any, TypeVar

from ..core.errors import ConfigError
from ..core.options import Option, option, options_of
from ..core.sampling import SETTINGS, Setting
from ..kv.store.options import TierOptions
from ..node.options import EngineOptions, TextOptions, count
from .parser import breakers, unescape

T = TypeVar("T")
Group = argparse.ArgumentParser | argparse._ArgumentGroup

SHAPE = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "quantization", "kv_cache_dtype", "block_size"),
    *("mamba_block_size", "kv_cache_memory_bytes", "enable_lora", "max_loras", "max_lora_rank", "speculative_config"),
)
"""Of EngineOptions, what decides how much memory a model takes."""


def add_options(group: Group, kind: type, only: Collection[str] = ()) -> None:
    """A flag for each option of the dataclass `kind`, or for `only` these. The namespace has what is given under the
    field's name."""
    for name, (declared, default, written) in options_of(kind).items():
        if not only or name in only:
            group.add_argument(*declared.flags(name), dest=name, **_how(declared, default, written))


def _how(declared: Option, default: Any, written: str) -> dict[str, Any]:
    """The arguments of add_argument."""
    how: dict[str, Any] = {"default": default, "help": declared.help.replace("%", "%%")}
    if written == "bool":
        has_no = default or declared.has_no
        return {**how, "action": argparse.BooleanOptionalAction if has_no else "store_true"}
    if declared.takes_own:
        how["metavar"] = f"{{{','.join(declared.choices)},FILE.py}}"  # what it names is looked up by who has it
    elif declared.choices:
        how["choices"] = declared.choices
    if declared.read is not None:
        how["type"] = argument_type(declared.read)
    elif written.startswith(("int", "float")):
        how["type"] = int if written.startswith("int") else float
    if declared.several:
        how |= {"action": "append"} if declared.several == "each" else {"nargs": "+", "action": "extend"}
        how["default"] = None if default is None else list(default)
    if declared.metavar is not None:
        how["metavar"] = declared.metavar
    return how


def argument_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read` as argparse wants it: what it says of a wrong text is what the user is told."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message) from None
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def given_options(kind: type[T], args: argparse.Namespace, **more: Any) -> T:
    """The flags of `kind` as an object of it, with `more` fields; what the parser has no flag for is left as it is by
    default. Raises ConfigError for a value out of range."""
    values = {name: getattr(args, name) for name in options_of(kind) if hasattr(args, name)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return kind(**{**values, **more})


def flags_of(given: Any) -> list[str]:
    """What says of a command line what `given` says, where that is not the default: the other way round."""
    flags: list[str] = []
    for name, (declared, default, _) in options_of(type(given)).items():
        value = getattr(given, name)
        flag = declared.flags(name)[0]
        if value == default or value is None:
            continue
        assert not declared.several and isinstance(value, bool | int | float | str | dict), name
        if isinstance(value, dict):
            flags.append(f"{flag}={json.dumps(value)}")
        elif isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            flags.append(f"{flag}={value}")
    return flags


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """--enable-lora is what every flag that names adapters means."""
    named = any(getattr(args, name, None) for name in ("enable_lora", "lora", "lora_modules", "lora_dir"))
    return given_options(EngineOptions, args, enable_lora=named)


def read_seed(text: str) -> int | None:
    """-1 is llama.cpp's word for a fresh one."""
    try:
        return None if int(text) == -1 else int(text)
    except ValueError:
        raise ValueError(f"must be an integer, got {text!r}.") from None


def _sampling_flag(name: str, declared: Setting) -> tuple[str, str, Any]:
    """A field of SamplingOptions: None for the model's own."""
    kind = type(declared.default)
    texts: dict[str, Any] = {"read": unescape, "several": "each"} if kind is tuple else {}
    also, flag = " ".join(declared.also), declared.flag
    made = option(None, declared.help or "", flag=flag, also=also, metavar=declared.metavar, **texts)
    return name, f"{kind.__name__} | None", made


SamplingOptions = make_dataclass(
    "SamplingOptions",
    [
        (
            "max_tokens",
            "int | None",
            option(
                None,
                "most tokens to produce; -1: the rest of the context (default: 4096 in chat, 256 in generate)",
                also="-n",
                read=count,
                metavar="N",
            ),
        ),
        *(_sampling_flag(name, declared) for name, declared in SETTINGS.items() if declared.help is not None),
        (
            "seed",
            "int | None",
            option(None, "same seed, same answer (default: a fresh one)", also="-s", read=read_seed, metavar="N"),
        ),
        ("stop", "tuple", option((), "end before this text (repeatable)", several="each", metavar="TEXT")),
    ],
    frozen=True,
    kw_only=True,
)
"""Fields of SamplingParams that `chat` and `generate` have flags for; None: the model's own."""


def sampling_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What the user set, as SamplingParams fields; everything else stays the model's default."""
    given = asdict(given_options(SamplingOptions, args))
    if given["dry_sequence_breakers"] is not None:
        given["dry_sequence_breakers"] = breakers(given["dry_sequence_breakers"])
    return {name: value for name, value in given.items() if value is not None or name == "max_tokens"}


def llm_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM()."""
    given = (given_options(TextOptions, args), engine_options(args), given_options(TierOptions, args))
    return {name: value for each in given for name, value in asdict(each).items()}
