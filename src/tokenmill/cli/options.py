"""Flags: how they are spelled, grouped and explained, and how a wrong one is answered.

Names follow vLLM's, with llama.cpp's short forms beside them; what else their users type is looked up in `foreign`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..core.errors import ConfigError
from ..core.units import parse_bytes
from ..node import foreign
from ..node.resolve import (
    BACKENDS,
    DTYPES,
    GENERATION_CONFIGS,
    KV_CACHE_DTYPES,
    POOLINGS,
    QUANTIZATIONS,
    RUNNERS,
    EngineOptions,
)
from .spelling import spell

DEFAULT_MODEL = "smollm2"

_COUNT = re.compile(r"(\d+|\d*\.\d+(?=[kmgt]))([kKmMgGtT]?)")
_NUMBERED = re.compile(r"-[A-Za-z]+=?\d.*")


class Parser(argparse.ArgumentParser):
    """One line and exit code 2 on a wrong command line, with the nearest known flag or command."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A mistyped command, like a mistyped flag, is told its nearest neighbour rather than all of them."""
        near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices or ()], n=1)
        if action.choices is not None and value not in action.choices and near:
            raise argparse.ArgumentError(action, f"there is no {value!r}; did you mean {near[0]}?")
        super()._check_value(action, value)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Short flags are whole words, unless a number follows at once: -t4 is -t 4, but -tp is not -t p."""
        return super()._get_option_tuples(option_string) if _NUMBERED.fullmatch(option_string) else []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reports unknown flags from the parser that met them: only it knows which flags are near."""
        if self._subparsers is None and args is not None:
            args = spell(args, self._option_string_actions.__contains__)
        namespace, extras = super().parse_known_args(args, namespace)
        if extras:
            flag = extras[0].split("=")[0]
            known = [option for option in self._option_string_actions if option.startswith("--")]
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unknown {'flag' if flag.startswith('-') else 'argument'} {flag}{hint}")
        return namespace, extras


class _Foreign(argparse.Action):
    """A flag of another server: refused by name, or accepted and said to have no effect."""

    def __init__(self, group: foreign.Group, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.group = group

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = [values] if isinstance(values, str) else []
        if self.group.asks_for_nothing(given):
            return
        if self.group.refused:
            parser.error(f"{' '.join([str(option_string), *given])}: {self.group.why}")
        print(f"tokenmill: {option_string} has no effect here: {self.group.why}.", file=sys.stderr)


class _Model(argparse.Action):
    """The model, as the first argument or by a flag, once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        known = getattr(namespace, "model_given", values)
        if known != values:
            parser.error(f"the model is named twice: {known} and {values}")
        namespace.model = namespace.model_given = values


def port_number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}.")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, got {text!r}.")


def lora_module(text: str) -> tuple[str, str]:
    """'name=path', or JSON with "name" and "path" as vLLM takes it."""
    name, equals, path = text.partition("=")
    if text.startswith("{"):
        with contextlib.suppress(ValueError, KeyError):
            given = json.loads(text)
            name, equals, path = str(given["name"]), "=", str(given["path"])
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}.")
    return name, path


def _count(text: str) -> int | None:
    """A number as vLLM and llama.cpp take it: 8192, 8k (8,000), 8K (8,192); auto and -1: None."""
    if text in ("auto", "-1"):
        return None
    match = _COUNT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number such as 8192 or 8K, or auto, got {text!r}.")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[2].isupper() else 1000) ** power)


def _seed(text: str) -> int | None:
    """-1 is llama.cpp's word for a fresh one."""
    with contextlib.suppress(ValueError):
        return None if int(text) == -1 else int(text)
    raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}.")


def _context(text: str) -> int | None:
    """As _count; 0 is llama.cpp's word for the model's own."""
    return _count(text) or None


def _size(text: str) -> int:
    try:
        return parse_bytes(text, "size")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message.removeprefix("size ")) from None


def _override(text: str) -> dict[str, Any]:
    from ..node.sampling import read_override

    try:
        return read_override(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message.removeprefix("--override-generation-config ")) from None


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(model=DEFAULT_MODEL)
    parser.add_argument(
        "model",
        nargs="?",
        action=_Model,
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="alias, .gguf file, folder in Hugging Face format, or hub name org/name[:quant] (default: smollm2)",
    )
    parser.add_argument(
        "--model", "-m", action=_Model, default=argparse.SUPPRESS, metavar="MODEL", help="the same, as a flag"
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_generation_config(group)
    group.add_argument(
        "--seed",
        "-s",
        type=_seed,
        metavar="N",
        help="requests that bring no seed draw theirs from this one, in order of arrival (default: fresh ones)",
    )
    group.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=port_number, default=8000, metavar="P", help="port; 0 picks a free one (default: 8000)"
    )
    group.add_argument(
        "--cors-origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin browsers may call from (repeatable)",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        type=lora_module,
        default=[],
        metavar="NAME=PATH",
        help="adapters to serve, each under a model name of its own (repeatable)",
    )
    group.add_argument(
        "--lora-dir", metavar="DIR", help="folder that /v1/load_lora_adapter may load from (default: it is refused)"
    )
    add_chat_template(group)
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring a chat_template of their own (default: it is refused)",
    )
    group.add_argument(
        "--max-body-bytes", type=_size, metavar="SIZE", help="largest request body accepted (default: 16MiB)"
    )
    group.add_argument(
        "--max-queue-s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="refuse a call (429, Retry-After) that would wait longer than this (default: 10)",
    )
    group.add_argument(
        "--max-priority",
        type=int,
        default=0,
        metavar="N",
        help="most urgent priority that a request may claim; lower is more urgent (default: 0)",
    )
    group.add_argument(
        "--trusted-proxies",
        nargs="+",
        action="extend",
        default=[],
        metavar="NETWORK",
        help="proxies whose X-Forwarded-For tells clients apart, such as 10.0.0.0/8, or * (default: none)",
    )
    group.add_argument(
        "--drain-s",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="on SIGTERM, let requests finish this long (default: 30)",
    )
    group.add_argument(
        "--engine-timeout-s",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="replace an engine that has work and makes no progress this long; 0: never (default: 60)",
    )
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: info)"
    )


def add_shape_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """What decides how much memory a model takes."""
    parser.add_argument(
        "--max-model-len",
        "-c",
        "--ctx-size",
        type=_context,
        metavar="TOKENS",
        help="longest sequence (default: the model's own, as far as its KV fits; in bench what it needs)",
    )
    parser.add_argument(
        "--max-num-seqs",
        "-np",
        "--parallel",
        type=_count,
        metavar="N",
        help="most sequences at once (default: 256; in bench what it needs)",
    )
    parser.add_argument(
        "--quantization",
        choices=tuple(QUANTIZATIONS),
        help="turn matrices stored in 16 or 32 bits into this at load (default: as stored; q4 is q4_1, q8 is q8_0)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=tuple(KV_CACHE_DTYPES),
        default="auto",
        metavar="TYPE",
        help="how keys and values are kept: f16, bf16, f32, or int8 in half the memory (default: auto, which is f16,"
        " or bf16 where there is a matrix unit)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add_shape_options(group)
    group.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default="auto",
        help="type of matrices stored in 16 or 32 bits, where --quantization names none; all is computed in 32 bits"
        " (default: auto, as stored)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_count,
        metavar="N",
        help="most tokens of a step (default: 576, or what the model needs)",
    )
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens per KV block (default: 16)")
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=_size,
        metavar="SIZE",
        help="KV pool, such as 2GiB (default: 40%% of free memory)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share KV of equal prefixes (default: on)",
    )
    group.add_argument("--threads", "-t", type=_count, metavar="N", help="kernel threads (default: one per usable CPU)")
    group.add_argument("--enable-lora", action="store_true", help="take LoRA adapters (PEFT format)")
    group.add_argument("--max-loras", type=int, metavar="N", help="most adapters loaded at once (default: 4)")
    group.add_argument("--max-lora-rank", type=int, metavar="R", help="highest rank of an adapter (default: 16)")
    group.add_argument(
        "--runner",
        choices=RUNNERS,
        default="auto",
        help="generate: the model gives tokens; pooling: vectors or scores (default: what the model was made for)",
    )
    group.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="how hidden states become one vector; implies --runner pooling (default: as the model says)",
    )
    group.add_argument("--backend", choices=BACKENDS, default="auto", help="kernels (default: native if it loads)")


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Those of other servers that the parser has not got by now."""
    for group in foreign.GROUPS:
        flags = [flag for flag in group.flags.split() if flag not in parser._option_string_actions]
        if flags:
            parser.add_argument(
                *flags,
                action=_Foreign,
                group=group,
                nargs=None if group.num_values else 0,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=args.enable_prefix_caching,
        threads=args.threads,
        backend=args.backend,
        quantization=args.quantization,
        dtype=args.dtype,
        enable_lora=args.enable_lora or any(getattr(args, name, None) for name in ("lora", "lora_modules", "lora_dir")),
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        runner=args.runner,
        pooling=args.pooling,
    )


def add_generation_config(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        default="auto",
        help="sampling where none is asked for: auto, what the model recommends; vllm, temperature 1 (default: auto)",
    )
    parser.add_argument(
        "--override-generation-config",
        type=_override,
        metavar="JSON",
        help='settings where none are asked for, such as {"temperature": 0.7}; before --generation-config',
    )


def add_chat_template(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja2 template to use instead of the model's own, or the template itself",
    )
    parser.add_argument(
        "--allow-special-in-content",
        action="store_true",
        help="special tokens that messages spell count as such (default: they are plain text)",
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    add_generation_config(group)
    limit = "rest of the context" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens",
        "-n",
        type=_count,
        default=max_tokens,
        metavar="N",
        help=f"most tokens to produce (default: {limit})",
    )
    group.add_argument(
        "--temperature", "--temp", type=float, metavar="T", help="0 is greedy (default: the model's own)"
    )
    group.add_argument("--top-p", type=float, metavar="P", help="nucleus (default: the model's own)")
    group.add_argument("--top-k", type=int, metavar="K", help="most likely K only (default: the model's own)")
    group.add_argument("--min-p", type=float, metavar="P", help="least share of the best token's probability")
    group.add_argument("--repetition-penalty", "--repeat-penalty", type=float, metavar="X", help="above 1 discourages")
    group.add_argument("--seed", "-s", type=_seed, metavar="N", help="same seed, same answer (default: a fresh one)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")


def sampling_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """What the user set, as SamplingParams fields; everything else stays the model's default."""
    names: Sequence[str] = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return {**given, "max_tokens": args.max_tokens, "stop": tuple(args.stop)}
