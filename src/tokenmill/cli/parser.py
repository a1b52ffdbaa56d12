"""The parser: how flags are spelled, and how a wrong one is answered.

Names follow vLLM's, with llama.cpp's short forms beside them; what else their users type is looked up in `foreign`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..core.sampling import SETTINGS
from ..node import foreign
from ..plugins.load import OFF, ON, VARIABLE

OPTIONAL_WORDS = {"-fa", "--flash-attn", "-fit", "--fit", "--log-colors"}
"""Flags without values here that may be followed by one of `WORDS`."""
WORDS = ("on", "off", "auto", "true", "false", "0", "1")

LEVELS = ("true", "false", "low", "medium", "high")
"""Values of --think; without one, it means the first."""

_SAMPLING = "--override-generation-config."
_SPECULATION = "--speculative-config."
SPELLED: Mapping[str, tuple[str, ...]] = {
    "-hf": ("--model",),
    "-hfr": ("--model",),
    "--hf-repo": ("--model",),
    "-mu": ("--model",),
    "--model-url": ("--model",),
    "--model-name": ("--model",),
    "-a": ("--served-model-name",),
    "--alias": ("--served-model-name",),
    "-q": ("--quantization",),
    "-ctk": ("--kv-cache-dtype",),
    "--cache-type-k": ("--kv-cache-dtype",),
    "-ctv": ("--kv-cache-dtype",),
    "--cache-type-v": ("--kv-cache-dtype",),
    "-ub": ("--max-num-batched-tokens",),
    "--ubatch-size": ("--max-num-batched-tokens",),
    "--cache-prompt": ("--enable-prefix-caching",),
    "--no-cache-prompt": ("--no-enable-prefix-caching",),
    "--schedule-policy": ("--scheduling-policy",),
    "--radix-eviction-policy": ("--eviction-policy",),
    "--embedding": ("--runner", "pooling"),
    "--embeddings": ("--runner", "pooling"),
    "--rerank": ("--runner", "pooling"),
    "--reranking": ("--runner", "pooling"),
    "-v": ("--log-level", "debug"),
    "--verbose": ("--log-level", "debug"),
    "--log-verbose": ("--log-level", "debug"),
    "--log-disable": ("--log-level", "error"),
    "--ssl-key-file": ("--ssl-keyfile",),
    "--ssl-cert-file": ("--ssl-certfile",),
    "--chat-template-file": ("--chat-template",),
    **{
        flag: (f"{_SAMPLING}{name}[]" if isinstance(declared.default, tuple) else f"{_SAMPLING}{name}",)
        for name, declared in SETTINGS.items()
        for flag in declared.flags(name)
        if flag != "--repetition-penalty"  # no server has a flag of this name
    },
    **{
        flag: (f"{_SPECULATION}{key}",)
        for key, flags in {
            "method": "--spec-type",
            "model": "--spec-draft-model -md --model-draft --spec-draft-hf -hfd -hfrd --hf-repo-draft "
            "--speculative-model",
            "num_speculative_tokens": "--num-speculative-tokens --spec-draft-n-max --draft --draft-n --draft-max "
            "--spec-ngram-simple-size-m --spec-ngram-size-m --spec-ngram-mod-n-max",
            "n_min": "--spec-draft-n-min --draft-min --draft-n-min",
            "p_min": "--spec-draft-p-min --draft-p-min",
            "prompt_lookup_min": "--spec-ngram-simple-size-n --spec-ngram-size-n",
        }.items()
        for flag in flags.split()
    },
    "-n": (f"{_SAMPLING}max_tokens",),
    "--predict": (f"{_SAMPLING}max_tokens",),
    "--n-predict": (f"{_SAMPLING}max_tokens",),
}
"""A flag and what it is here; a value that follows it stays."""

SPELLED_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "--task": {
        "auto": (),
        "generate": ("--runner", "generate"),
        **dict.fromkeys(("embed", "embedding", "score", "classify", "reward"), ("--runner", "pooling")),
    },
    "--convert": {
        "auto": (),
        "none": (),
        **dict.fromkeys(("embed", "classify", "reward"), ("--runner", "pooling")),
    },
}
"""A flag with one of these values, and what both are here."""

SIZES: Mapping[str, tuple[str, str]] = {
    "--kv-offloading-size": ("--kv-host", "GiB"),
    "-cram": ("--kv-host", "MiB"),
    "--cache-ram": ("--kv-host", "MiB"),
}
"""A flag whose value is a number, what it is here, and the unit of the number; nothing where that is not above 0."""

_STORED = (
    "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4", "auto-round", "gguf",
    "None", "none",
)  # fmt: skip
OWN_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "--pooling": {"rank": ("--runner", "pooling")},
    "--quantization": dict.fromkeys(_STORED, ()),
}
"""The same for flags that are ours too. Formats of checkpoints are read from their files."""


def spell(argv: Sequence[str], knows: Callable[[str], bool]) -> list[str]:
    """The command line in this program's spelling: other servers' names for its flags, underscores for dashes, and
    `--flag.key value` for JSON. knows: whether the parser has a flag of its own, which is then left alone."""
    words = list(argv)
    spelled: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    while words:
        word = words.pop(0)
        if word == "--":
            return [*spelled, *_joined(objects), word, *words]
        if not word.startswith("-") or word == "-" or word[1].isdigit():
            spelled.append(word)
            continue
        name, equals, inline = word.partition("=")
        if name.startswith("--"):
            base, dot, rest = name.partition(".")
            name = base.replace("_", "-") + dot + rest
        if name == "--help":
            inline = equals = ""
        if word == "--think" and knows(word) and (not words or words[0] not in LEVELS):
            spelled.append(f"{word}={LEVELS[0]}")
            continue
        target, value_here = SPELLED.get(name, ()), []
        values = {} if knows(name) else SPELLED_VALUES.get(name, {})
        if target and not knows(name) and knows(target[0].partition(".")[0]):
            name, *value_here = target
        values = values or OWN_VALUES.get(name, {})
        given = inline if equals else words[0] if words else ""
        if given in values and all(knows(flag) for flag in values[given][:1]):
            spelled.extend(values[given])
            del words[: 0 if equals else 1]
            continue
        if name in SIZES and not knows(name) and knows(SIZES[name][0]) and re.fullmatch(r"-?\d+(\.\d+)?", given):
            flag, unit = SIZES[name]
            spelled += [f"{flag}={given}{unit}"] if float(given) > 0 else []
            del words[: 0 if equals else 1]
            continue
        base, dot, path = name.partition(".")
        if dot and not knows(name) and knows(base):
            has_value = equals or (words and not words[0].startswith("--"))
            value = inline if equals else words.pop(0) if has_value else "true"
            _put(objects.setdefault(base, {}), path, value)
            continue
        spelled.append(f"{name}={inline}" if equals else name)
        spelled.extend(value_here)
        if name in OPTIONAL_WORDS and words and words[0] in WORDS:
            del words[0]
    return [*spelled, *_joined(objects)]


def _joined(objects: Mapping[str, dict[str, Any]]) -> list[str]:
    return [word for base, value in objects.items() for word in (base, json.dumps(value))]


def _put(into: dict[str, Any], path: str, text: str) -> None:
    """into["a"]["b"] = text for the path a.b; a path that ends in + adds to a list, one that ends in [] adds a text."""
    *outer, last = path.split(".")
    for key in outer:
        into = into.setdefault(key, {})
    if last.endswith("+"):
        into.setdefault(last[:-1], []).extend(_value(part) for part in text.split(","))
    elif last.endswith("[]"):
        into[last[:-2]] = [*into.get(last[:-2], ()), *breakers([unescape(text)])]
    else:
        into[last] = _value(text)


def unescape(text: str) -> str:
    r"""As llama.cpp reads what is hard to type: \n, \r, \t, and any other character after a backslash as itself."""
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "r": "\r", "t": "\t"}.get(found[1], found[1]), text)


def breakers(texts: Iterable[str]) -> tuple[str, ...]:
    """Of DRY; "none" is llama.cpp's word for no text at all."""
    return tuple(text for text in texts if text != "none")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


DEFAULT_MODEL = "smollm2"

_NUMBERED = re.compile(r"-[A-Za-z]+=?\d.*")


class Parser(argparse.ArgumentParser):
    """One line and exit code 2 on a wrong command line, with the nearest known flag or command."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.rest = ""
        """The argument that has all further words, also those behind flags, which argparse finds no place for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A mistyped command, like a mistyped flag, is told its nearest neighbour rather than all of them."""
        near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices or ()], n=1)
        if action.choices is not None and value not in action.choices and near:
            raise argparse.ArgumentError(action, f"there is no {value!r}; did you mean {near[0]}?")
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices and self.prog == "tokenmill":
            raise argparse.ArgumentError(action, f"there is no {value!r}; `tokenmill run MODEL` talks with a model")
        super()._check_value(action, value)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Short flags are whole words, unless a number follows at once: -t4 is -t 4, but -tp is not -t p."""
        return super()._get_option_tuples(option_string) if _NUMBERED.fullmatch(option_string) else []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reports unknown flags from the parser that met them: only it knows which flags are near."""
        if self._subparsers is None and args is not None:
            args = spell(args, self._option_string_actions.__contains__)
        namespace, extras = super().parse_known_args(args, namespace)
        if self.rest and not any(word.startswith("-") for word in extras):
            setattr(namespace, self.rest, [*getattr(namespace, self.rest), *extras])
            extras = []
        if extras:
            flag = extras[0].split("=")[0]
            known = [option for option in self._option_string_actions if option.startswith("--")]
            near = difflib.get_close_matches(flag, known, n=3)
            near.sort(key=lambda each: sorted(each) != sorted(flag))  # swapped letters are the likeliest slip
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


class _ModelOrURL(_Model):
    """An address of a server is --url, not a model."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not is_server(values):
            super().__call__(parser, namespace, values, option_string)
        elif getattr(namespace, "url", None) not in (None, values):
            parser.error(f"the server is named twice: {namespace.url} and {values}")
        else:
            namespace.url = values


def is_server(name: str) -> bool:
    """Whether it is an address, but not one that a model is fetched from."""
    host = urllib.parse.urlsplit(name).netloc if name.startswith(("http://", "https://")) else ""
    return bool(host) and not name.endswith(".gguf") and host not in _HUBS


_HUBS = ("huggingface.co", "www.huggingface.co", "hf.co", "ollama.com")


def add_model(parser: argparse.ArgumentParser, *, takes_url: bool = False) -> None:
    """takes_url: it may be the address of a server instead."""
    parser.set_defaults(model=DEFAULT_MODEL)
    parser.add_argument(
        "model",
        nargs="?",
        action=_ModelOrURL if takes_url else _Model,
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="name (tokenmill list --available), .gguf file or its address, folder in Hugging Face format, or "
        "repository of the hub org/name[:quant] (default: smollm2)",
    )
    parser.add_argument(
        "--model", "-m", action=_Model, default=argparse.SUPPRESS, metavar="MODEL", help="the same, as a flag"
    )
    add_plugins(parser)


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """What it says is put in the environment, for processes that are started too (plugins/load.py)."""
    parser.add_argument_group("plug-ins").add_argument(
        "--plugins",
        choices=(ON, OFF),
        help="whether plug-ins that a setting or the checkpoint names may be loaded; off: none is looked at"
        f" (default: on, or what {VARIABLE} says)",
    )


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
