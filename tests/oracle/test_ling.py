"""Ling 2 (BailingMoeV2), which transformers has no class for: what its published code computes is GLM-4.5 with norms of
heads, whose model of the same weights gives the same logits; its folder, config.json and GGUF file have names of their
own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import Case
from gguf_families import convert
from test_families import BACKENDS, LENGTH, TOLERANCE, make_model, our_logits, random_tokens, their_logits

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import config_from_checkpoint
from tokenmill.ops.reference import ReferenceOps

torch = pytest.importorskip("torch", reason="the oracle needs torch")
from safetensors.torch import load_file, save_file  # noqa: E402

_SHAPE = {
    "head_dim": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True,
}  # fmt: skip
_GLM = Case(
    "GLM-4.5", "Glm4Moe", _SHAPE | {"n_routed_experts": 8, "n_shared_experts": 2, "num_nextn_predict_layers": 0}
)
_RENAMED = {
    "model.embed_tokens.": "model.word_embeddings.", ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.", ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}  # fmt: skip
LING_MINI: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "attention_dropout": 0.0,
    "num_hidden_layers": 20, "hidden_size": 2048, "intermediate_size": 5120, "eos_token_id": 156892,
    "pad_token_id": 156892, "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 32768,
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_attention_heads": 16,
    "num_experts": 256, "num_key_value_heads": 4, "rope_theta": 600000, "rope_scaling": None,
    "tie_word_embeddings": False, "use_bias": False, "rms_norm_eps": 1e-6, "head_dim": 128, "num_shared_experts": 1,
    "use_qkv_bias": False, "embedding_dropout": 0.0, "vocab_size": 157184, "partial_rotary_factor": 0.5,
    "router_dtype": "fp32", "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4, "use_qk_norm": True, "score_function": "sigmoid", "moe_shared_expert_intermediate_size": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder as Ling's, and transformers' model of its weights."""
    glm, ling = tmp_path_factory.mktemp("glm"), tmp_path_factory.mktemp("ling")
    theirs = make_model(_GLM, glm)
    tensors = {}
    for name, tensor in load_file(glm / "model.safetensors").items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    for layer in range(theirs.config.num_hidden_layers):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{role}_proj.weight") for role in "qkv"]
        tensors[f"model.layers.{layer}.attention.query_key_value.weight"] = torch.cat(parts)
    save_file(tensors, ling / "model.safetensors")
    sizes = {key: getattr(theirs.config, key) for key in LING_MINI if hasattr(theirs.config, key)}
    own = LING_MINI | sizes | _SHAPE | {"num_experts": 8, "num_shared_experts": 2, "rope_theta": 10000.0}
    own |= {"architectures": LING_MINI["architectures"], "model_type": "bailing_moe_v2", "eos_token_id": 2}
    own |= {"moe_shared_expert_intermediate_size": 32}
    (ling / "config.json").write_text(json.dumps(own))
    return ling, theirs


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_logits(saved: tuple[Path, Any], make_ops: Any) -> None:
    folder, theirs = saved
    tokens = random_tokens(2, LENGTH)
    expected, ops = their_logits(theirs, tokens), make_ops()
    ours = our_logits(ops, folder, 64, tokens)
    ops.close()
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * np.abs(expected).max())


def test_logits_from_gguf(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, theirs = saved
    path = convert(folder, "BailingMoeV2", tmp_path / "model.gguf")
    tokens = random_tokens(2, LENGTH)
    expected = their_logits(theirs, tokens)
    ours = our_logits(ReferenceOps(exact_activations=True), path, 64, tokens)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * np.abs(expected).max())


def test_the_published_file() -> None:
    """What it says by keys that are not read is so anyway; what would choose experts in another way is refused by
    name."""

    def read(**changes: Any) -> Any:
        return config_from_checkpoint(Checkpoint("hf", Path("config.json"), LING_MINI | changes, {}))

    model = read()
    assert model.moe is not None and model.rotary_dim == 64
    assert (model.moe.shared_width, model.moe.routing.num_groups, model.moe.routing.scale) == (512, 8, 2.5)
    assert read(use_qk_norm=False).qk_norm == ""
    assert read(num_nextn_predict_layers=1).unread == ("model.layers.20.",)
    for changes, named in (
        ({"score_function": "softmax"}, "score_function"),
        ({"moe_shared_expert_intermediate_size": 256}, "moe_shared_expert_intermediate_size"),
        ({"architectures": ["BailingMoeForCausalLM"]}, "BailingMoeForCausalLM"),
    ):
        with pytest.raises(BadCheckpoint, match=named):
            read(**changes)
