"""What a sentence-transformers folder says beside its model: how hidden states become one vector or one score, and what
is put before a text.

    modules.json                        the steps after the model
    1_Pooling/config.json               which pooling
    2_Dense/config.json                 a linear behind it, whose weights lie beside
    1_LogitScore/config.json            the tokens whose logits score a pair of texts
    sentence_bert_config.json           max_seq_length, and how its chat template is to be called
    config_sentence_transformers.json   prompts by name, the one used where none is asked for, and what is put behind a
                                        score
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
_LOGIT_MODULES = ("LogitScore", "CausalScoreHead")
_SUPPORTED = ("Pooling", "Dense", "Normalize", _LOGIT_MODULES[0])
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh"}
_CALLS = ("add_generation_prompt", "restore_suffix")
"""How a chat template may be called; the second has to do with texts that are cut."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear behind the pooling. folder: where its weights are. activation: "" or "tanh"."""

    folder: Path
    in_width: int
    out_width: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class LogitScore:
    """A score is the logit of one token behind the text, less that of another if there is one."""

    true_token: int
    false_token: int | None


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """pooling         "last", "cls" or "mean"
    normalize       vectors are scaled to length 1
    max_length      tokens of an input, or None
    prompts         name -> text put before an input
    default_prompt  the name used where none is given, or ""
    dense           linears between pooling and vector, in their order
    logit_score     what makes a score of a language model's logits, or None
    activation      class of what is put behind a score, or ""
    opens_answer    whether the chat template, where one is made for pairs of texts, goes on to an answer
    """

    pooling: str
    normalize: bool
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dense: tuple[DenseModule, ...] = ()
    logit_score: LogitScore | None = None
    activation: str = ""
    opens_answer: bool = False


def read_sentence_config(folder: Path) -> SentenceConfig | None:
    """None where `folder` is none of sentence-transformers'. Raises BadCheckpoint, naming the module or key."""
    path = folder / MODULES_NAME
    if not path.is_file():
        return None
    pooling, normalize, logit_score = "mean", False, None
    dense: list[DenseModule] = []
    for module in _modules(folder):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(_inside(folder, module) / "config.json")
        elif kind == "Dense" and not normalize:
            dense.append(_dense(_inside(folder, module)))
        elif kind == "Normalize":
            normalize = True
        elif kind in _LOGIT_MODULES:
            logit_score = _logit_score(_inside(folder, module) / "config.json")
        elif kind not in _IGNORED_MODULES:
            raise BadCheckpoint(
                f"{path}: the module {kind!r} is not supported there (supported: {', '.join(_SUPPORTED)})."
            )
    settings = _settings(folder / "config_sentence_transformers.json")
    prompts, default_prompt = _prompts(settings, folder / "config_sentence_transformers.json")
    calls = _settings(folder / "sentence_bert_config.json")
    return SentenceConfig(
        pooling,
        normalize,
        _max_length(calls, folder / "sentence_bert_config.json"),
        prompts,
        default_prompt,
        tuple(dense),
        logit_score,
        str(settings.get("activation_fn") or ""),
        _opens_answer(calls, folder / "sentence_bert_config.json"),
    )


def module_folders(folder: Path) -> list[str]:
    """Where the settings and weights of the folder's modules are, relative to it. Raises BadCheckpoint."""
    paths = (_inside(folder, module).relative_to(folder) for module in _modules(folder))
    return [path.as_posix() for path in paths if path.parts]


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


def _dense(folder: Path) -> DenseModule:
    path = folder / "config.json"
    config = read_json(path)
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise BadCheckpoint(f"{path}: activation_function {name} is not supported ({', '.join(_ACTIVATIONS)}).")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise BadCheckpoint(f"{path}: {key} = {config[key]!r} is not supported.")
    sizes: list[Any] = [config.get(key) for key in ("in_features", "out_features")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise BadCheckpoint(f"{path}: in_features and out_features must be positive integers.")
    return DenseModule(folder, sizes[0], sizes[1], config.get("bias", True) is True, _ACTIVATIONS[name])


def _logit_score(path: Path) -> LogitScore:
    config = read_json(path)
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if type(true) is not int or not (false is None or type(false) is int) or min(true, false or 0) < 0:
        raise BadCheckpoint(f"{path}: true_token_id must be a token id, and false_token_id one or null.")
    return LogitScore(true, false)


def _is_mode(key: str) -> bool:
    return key.startswith("pooling_mode_")


def _settings(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _max_length(config: dict[str, Any], path: Path) -> int | None:
    length = config.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise BadCheckpoint(f"{path}: max_seq_length must be a positive integer, got {length!r}.")
    return length


def _opens_answer(config: dict[str, Any], path: Path) -> bool:
    processing = config.get("processing_kwargs") or {}
    calls = processing.get("chat_template", {}) if isinstance(processing, dict) else {}
    unknown = [key for key in calls if key not in _CALLS]
    if unknown:
        raise BadCheckpoint(f"{path}: chat templates with {', '.join(unknown)} are not supported.")
    return calls.get("add_generation_prompt") is True


def _prompts(config: dict[str, Any], path: Path) -> tuple[dict[str, str], str]:
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BadCheckpoint(f"{path}: prompts must be texts by name.")
    if default and default not in prompts:
        raise BadCheckpoint(f"{path}: default_prompt_name is {default!r}, which is none of its prompts.")
    return prompts, str(default)
