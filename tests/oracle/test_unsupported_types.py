"""What is said of every type of transformers: those in our tables load, by the defaults of their classes, and each
other one is refused in one line that tells what is missing."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.config_keys import ARCHITECTURES, CONFIG_KEYS
from tokenmill.formats.encoder_keys import ENCODER_TYPES
from tokenmill.models import missing
from tokenmill.models.families import HF_FAMILIES
from tokenmill.models.summary import shape_of

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto", reason="the oracle needs transformers")

LIKELY = {"head_dim": 128, "num_key_value_heads": 8}
"""In place of nulls that a class leaves to its files."""

DEFAULTS = {
    "bamba": {"attn_layer_indices": [0]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "electra": {"embedding_size": 256},
    "falcon_h1": {"mamba_n_heads": 32, "mamba_d_head": 32},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
"""What a class leaves to its files, or has a default for that no model has."""


def described(kind: str, architecture: str) -> dict[str, Any]:
    """config.json of the class's defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = transformers.AutoConfig.for_model(kind).to_dict()
    for key, likely in LIKELY.items():
        if key in CONFIG_KEYS.get(kind, {}) and given.get(key, 0) is None and not CONFIG_KEYS[kind][key].nullable:
            given[key] = likely
    return copy.deepcopy(given) | {"model_type": kind, "architectures": [architecture]} | DEFAULTS.get(kind, {})


def shape_from(config: dict[str, Any]) -> Any:
    return shape_of(Checkpoint("hf", Path("x"), config, {}))


def test_every_type_in_our_tables_loads() -> None:
    named = {**ARCHITECTURES, **{kind: f"{name}Model" for name, kind in ENCODER_TYPES.items()}}
    wrong = []
    for kind in named.keys() & {*transformers.CONFIG_MAPPING}:  # others are published with code of their own
        try:
            shape_from(described(kind, named[kind]))
        except BadCheckpoint as error:
            wrong.append(f"{kind}: {error.message}")
    assert not wrong, "\n".join(wrong)
    assert len(named) >= 65


def others() -> dict[str, str]:
    """Types of language models that are not in our tables -> what transformers calls their class."""
    maps = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    found = {kind: name for each in maps for kind, name in each.items()}
    return {kind: name for kind, name in found.items() if kind not in ARCHITECTURES and name not in HF_FAMILIES}


def test_every_other_type_is_refused_in_one_line() -> None:
    wrong = []
    for kind, name in others().items():
        try:
            config = described(kind, name)
        except Exception:  # some need settings to be made
            config = {"model_type": kind, "architectures": [name]}
        try:
            shape_from(config)
            wrong.append(f"{kind}: taken")
        except BadCheckpoint as error:
            said = error.message
            told = any(
                part in said for part in ("it needs ", "nearest is ", "around a language model", "not supported")
            )
            if "\n" in said or len(said) > 500 or not told:
                wrong.append(f"{kind}: {said}")
    assert not wrong, "\n".join(wrong)


def test_what_is_missing_is_told_of_types_that_exist_and_are_not_read() -> None:
    known = {*transformers.CONFIG_MAPPING, *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OWN}
    spelled = {kind.replace("_", "-") for kind in known}
    kinds = [kind for each in missing._NEEDS.values() for kind in each]
    assert set(kinds) <= spelled, set(kinds) - spelled
    assert not {kind.replace("_", "-") for kind in ARCHITECTURES} & set(kinds)
    assert missing.what_is_missing("RwkvForCausalLM", {}) == "it needs the recurrent state of RWKV"
    assert missing.what_is_missing("GPTNeoForCausalLM", {}) == "it needs learned positions"
    assert missing.what_is_missing("", {"general.architecture": "bert", "model_type": "bert"}) == ""


OWN = {"rwkv6", "rwkv7", "starcoder", "gpt_sw3"}
"""Names of GGUF files and repositories."""
