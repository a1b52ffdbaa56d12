"""What a sentence-transformers folder says beside its model: how hidden states become one vector, and what is put
before a text.

    modules.json                        the steps after the model; only pooling and normalising are known here
    1_Pooling/config.json               which pooling
    sentence_bert_config.json           max_seq_length
    config_sentence_transformers.json   prompts by name, and the one used where none is asked for
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint
from .safetensors import read_json, read_json_value

MODULES_NAME = "modules.json"

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_BY_NAME = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_IGNORED_MODULES = ("Transformer", "Dropout")


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """pooling "last", "cls" or "mean". normalize: vectors are scaled to length 1. max_length: tokens of an input, or
    None. prompts: name -> text put before an input; default_prompt: the name used where none is given, or ""."""

    pooling: str
    normalize: bool
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""


def read_sentence_config(folder: Path) -> SentenceConfig | None:
    """None where `folder` is none of sentence-transformers'. Raises BadCheckpoint, naming the module or key."""
    path = folder / MODULES_NAME
    if not path.is_file():
        return None
    pooling, normalize = "mean", False
    for module in _modules(folder):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(_inside(folder, module) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind not in _IGNORED_MODULES:
            raise BadCheckpoint(f"{path}: the module {kind!r} is not supported (supported: Pooling, Normalize).")
    prompts, default_prompt = _prompts(folder / "config_sentence_transformers.json")
    return SentenceConfig(
        pooling, normalize, _max_length(folder / "sentence_bert_config.json"), prompts, default_prompt
    )


def module_configs(folder: Path) -> list[str]:
    """Where the settings of the folder's modules are, relative to it. Raises BadCheckpoint."""
    paths = (_inside(folder, module).relative_to(folder) for module in _modules(folder))
    return [(path / "config.json").as_posix() for path in paths if path.parts]


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = read_json_value(folder / MODULES_NAME)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise BadCheckpoint(f"{folder / MODULES_NAME} must be a list of modules.")
    return modules


def _inside(folder: Path, module: dict[str, Any]) -> Path:
    path = module.get("path")
    if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
        raise BadCheckpoint(f"{folder / MODULES_NAME}: {path!r} is not a folder inside this one.")
    return folder / path


def _pooling(path: Path) -> str:
    config = read_json(path)
    by_name = config.get("pooling_mode")
    chosen = [by_name] if isinstance(by_name, str) else [key for key, on in config.items() if _is_mode(key) and on]
    known = {**_POOLINGS, **_BY_NAME}
    if len(chosen) != 1 or chosen[0] not in known:
        raise BadCheckpoint(
            f"{path}: pooling by {' and '.join(chosen) or 'nothing'} is not supported (cls, mean, last)."
        )
    if config.get("include_prompt") is False:
        raise BadCheckpoint(f"{path}: include_prompt = false is not supported.")
    return known[chosen[0]]


def _is_mode(key: str) -> bool:
    return key.startswith("pooling_mode_")


def _max_length(path: Path) -> int | None:
    length = read_json(path).get("max_seq_length") if path.is_file() else None
    if length is not None and (type(length) is not int or length < 1):
        raise BadCheckpoint(f"{path}: max_seq_length must be a positive integer, got {length!r}.")
    return length


def _prompts(path: Path) -> tuple[dict[str, str], str]:
    config = read_json(path) if path.is_file() else {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BadCheckpoint(f"{path}: prompts must be texts by name.")
    if default and default not in prompts:
        raise BadCheckpoint(f"{path}: default_prompt_name is {default!r}, which is none of its prompts.")
    return prompts, str(default)
