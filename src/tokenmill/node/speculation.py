"""Reads what is asked of speculative decoding: vLLM's --speculative-config, whose keys flags of llama-server stand for,
too (cli/parser.py). What changes nothing here is accepted and said; what is not here is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..core.config import QUANTIZATIONS, check_keys, check_name
from ..core.errors import ConfigError
from ..core.speculation import (
    BY_FILE,
    BY_MODEL,
    DRAFT_MODEL,
    EAGLE3,
    METHODS,
    MTP,
    NGRAM,
    SUFFIX,
    CorpusConfig,
    SpeculationConfig,
    wrong,
)

_OURS = {
    **{name: name for name in METHODS},
    "[ngram]": NGRAM,
    "ngram_gpu": NGRAM,
    "ngram-simple": NGRAM,
    "ngram-mod": SUFFIX,
    "draft-simple": DRAFT_MODEL,
    "draft-mtp": MTP,
    "eagle": EAGLE3,
    "draft-eagle3": EAGLE3,
}
"""Methods of vLLM, and types of llama-server, and what drafts here."""

_MTP_NAMES = ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp")
"""What vLLM also calls it for models that load here."""

_NOT_BUILT = {
    "mlp_speculator", "dflash", "dspark", "custom_class", "draft-dflash", "draft-dspark",
    "ngram-map-k", "ngram-map-k4v", "ngram-cache",
}  # fmt: skip

_WITHOUT_EFFECT = (
    "draft_sample_method", "draft_tensor_parallel_size", "enforce_eager", "disable_padded_drafter_batch",
    "disable_by_batch_size", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification",
)  # fmt: skip
"""Keys of vLLM's that belong to drafters with a model, or that set what is measured here."""

_OF_THE_MODEL = ("model", "quantization")
_NOT_OF_THE_MODEL = ("max_model_len", "revision", "code_revision", "parallel_drafting")
"""What vLLM lets one say of a model that drafts, and what has no meaning here."""

_NO_MODELS = (NGRAM, "[ngram]", SUFFIX)
"""What vLLM also takes by the key of a model."""

_OFF = ("none", "")

EVERYONE = "*"
"""In place of tenants. No tenant is called that."""


def read_json(text: str) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _no_object(text)
    read_speculation(value)
    return value


def _no_object(given: str) -> ConfigError:
    return ConfigError(
        f'speculative_config must be an object such as {{"method": "suffix"}}, got {given[:100]!r}.',
        param="speculative_config",
    )


def read_speculation(given: Mapping[str, Any] | None) -> tuple[SpeculationConfig | None, tuple[str, ...]]:
    """What `given` asks for, None where nothing drafts; and the keys of it that have no effect. Raises ConfigError."""
    if given is None:
        return None, ()
    if not isinstance(given, Mapping):
        raise _no_object(str(given))
    settings = {each.name for each in fields(SpeculationConfig)} - {"methods"}
    known = settings | {"method", "rejection_sample_method", *_WITHOUT_EFFECT, *_NOT_OF_THE_MODEL}
    check_keys(given, known, "speculative_config")
    exact = given.get("rejection_sample_method", "standard")
    if exact != "standard":
        raise wrong("rejection_sample_method", "standard, since drafts never change an answer here", exact)
    methods = _methods(given)
    for name in _NOT_OF_THE_MODEL:
        if given.get(name):
            raise ConfigError(
                f"{name} of speculative_config is not for here: a draft model is as its files say. Leave it out.",
                param="speculative_config",
            )
    if methods is None:
        return None, ()
    values = {name: given[name] for name in settings if given.get(name) is not None}
    if "corpora" in values:
        values["corpora"] = _corpora(values["corpora"])
    store = values.get("suffix_decoding_store", "")
    if not isinstance(store, str):
        raise wrong("suffix_decoding_store", "the name of a file", store)
    if values.get("model") in _NO_MODELS:
        del values["model"]
    _check_model(values, next((name for name in methods if name in BY_FILE), ""))
    lookup = [values[name] for name in ("prompt_lookup_max", "prompt_lookup_min") if name in values]
    if len(lookup) == 1:  # as there
        values |= {"prompt_lookup_max": lookup[0], "prompt_lookup_min": lookup[0]}
    return SpeculationConfig(methods, **values), tuple(name for name in _WITHOUT_EFFECT if name in given)


def _corpora(given: Any) -> tuple[CorpusConfig, ...]:
    """Tenants are named, or all are: how fast an answer comes tells who may ask that a text is in a corpus."""
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise wrong("corpora", 'a list such as [{"path": "laws.index", "tenants": ["acme"]}]', given)
    found = []
    for each in given:
        check_keys(each, {"path", "tenants"}, "corpora of speculative_config")
        path, tenants = each.get("path"), each.get("tenants")
        if not isinstance(path, str) or not path:
            raise wrong("path of corpora", "the file that `tokenmill draft index` has written", path)
        is_list = isinstance(tenants, list) and all(isinstance(name, str) and name for name in tenants)
        if tenants != EVERYONE and (not tenants or not is_list):
            raise wrong("tenants of corpora", f'a list of ids of tenants, or "{EVERYONE}" for all', tenants)
        found.append(CorpusConfig(path, None if tenants == EVERYONE else tuple(tenants)))
    return tuple(found)


def without_models(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What is left of it where no model is to draft, nor a layer of the model itself, nor corpora, which are of another
    tokenizer; None: nothing drafts. Raises ConfigError."""
    speculation, _ = read_speculation(given)
    methods = () if speculation is None else tuple(name for name in speculation.methods if name not in BY_MODEL)
    if given is None or not methods:
        return None
    return {name: value for name, value in given.items() if name not in (*_OF_THE_MODEL, "corpora")} | {
        "method": ",".join(methods)
    }


def _check_model(values: dict[str, Any], method: str) -> None:
    """Brings the quantisation to the name that kernels have for it. method: that of a model in a file of its own, or
    "". Raises ConfigError."""
    model, quantization = (values.get(name) for name in _OF_THE_MODEL)
    if method and not (isinstance(model, str) and model):
        raise wrong("model", f"the name or the path of what drafts, for {method}", model)
    if not method and (model is not None or quantization is not None):
        asked = "model" if model is not None else "quantization"
        raise ConfigError(
            f"{asked} of speculative_config is for a model that drafts; name {' or '.join(BY_FILE)} as method, too.",
            param="speculative_config",
        )
    if quantization is not None:
        check_name(quantization, QUANTIZATIONS, "speculative_config", "quantization of speculative_config")
        values["quantization"] = QUANTIZATIONS[quantization]


def _methods(given: Mapping[str, Any]) -> tuple[str, ...] | None:
    """None: nothing is to draft."""
    asked = given.get("method")
    if asked is None:
        model = given.get("model")
        asked = model if model in _NO_MODELS else DRAFT_MODEL if model else SUFFIX
    names = asked.split(",") if isinstance(asked, str) else asked
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise wrong("method", f"one or several of {', '.join(METHODS)}", asked)
    names = [name.strip() for name in names]
    if all(name in _OFF for name in names):
        return None
    names = [MTP if name in _MTP_NAMES else name for name in names]
    for name in names:
        if name in _NOT_BUILT or name.endswith("_mtp"):
            raise ConfigError(
                f"Nothing drafts by {name} yet; the methods of speculative_config are {' and '.join(METHODS)}.",
                param="speculative_config",
            )
    return tuple(dict.fromkeys(_OURS.get(name, name) for name in names))
