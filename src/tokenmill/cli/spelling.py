"""Command lines of other servers in this program's spelling: their names for its flags and for its values, underscores
for dashes, and `--flag.key value` for JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..core.sampling import SETTINGS

OPTIONAL_WORDS = {"-fa", "--flash-attn", "-fit", "--fit", "--log-colors"}
"""Flags without values here that may be followed by one of `WORDS`."""
WORDS = ("on", "off", "auto", "true", "false", "0", "1")

_SAMPLING = "--override-generation-config."
SPELLED: Mapping[str, tuple[str, ...]] = {
    "-hf": ("--model",),
    "-hfr": ("--model",),
    "--hf-repo": ("--model",),
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
    **{flag: {"-1": ()} for flag in ("-n", "--predict", "--n-predict")},
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
