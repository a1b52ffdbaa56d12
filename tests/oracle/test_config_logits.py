"""Files whose config.json leaves keys out, sets them to null, or contradicts their tensors: the logits of transformers.

Small random models, saved by transformers, of whose config.json something is then changed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import DIVISORS, LONGROPE, SLIDING, Case
from test_families import LENGTH, TOLERANCE, make_model, our_logits, random_tokens, their_logits

from tokenmill.ops.reference import ReferenceOps

transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

DROP = object()
_OWN_HEAD = {"tie_word_embeddings": False}

CASES: list[tuple[Case, dict[str, Any]]] = [
    (Case("Llama that says it is tied and has a head", "Llama", _OWN_HEAD), {"tie_word_embeddings": True}),
    (Case("Gemma with a head", "Gemma", _OWN_HEAD | {"head_dim": 32}), {"tie_word_embeddings": DROP}),
    (Case("Granite without an attention_multiplier", "Granite"), {"attention_multiplier": DROP}),
    (
        Case(
            "MiniCPM, which transformers has no class for, as the Granite that it is",
            "Granite",
            {
                "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.25,
                "logits_scaling": 2.0,
            },
        ),
        {
            "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 3, "scale_depth": 1.4,
            "dim_model_base": 32,
        },
    ),
    (
        Case("Gemma 2 with caps of null", "Gemma2", SLIDING | {"head_dim": 32}),
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    (Case("Gemma 2 without caps", "Gemma2", SLIDING | {"head_dim": 32}), {"attn_logit_softcapping": DROP}),
    (Case("Mistral with a window of null", "Mistral", SLIDING), {"sliding_window": None}),
    (Case("Llama with a layer norm's epsilon", "Llama", {"rms_norm_eps": 1e-2}), {"layer_norm_eps": 0.5}),
    (Case("Llama with another's window", "Llama"), {"sliding_window": 4, "use_sliding_window": True}),
    (Case("Mistral told not to use its window", "Mistral", SLIDING), {"use_sliding_window": False}),
    (Case("Qwen2 without keys of windows", "Qwen2"), dict.fromkeys(("layer_types", "sliding_window"), DROP)),
    (
        Case("Llama, YaRN of nulls", "Llama"),
        {
            "rope_parameters": DROP,
            "rope_theta": 500.0,
            "rope_scaling": {
                "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": None,
                "beta_slow": 0, "truncate": None, "attention_factor": None, "mscale": None,
            },
        },
    ),
    (
        Case("Phi-3 whose longrope is called yarn", "Phi3", {"rope_parameters": LONGROPE}),
        {
            "rope_parameters": DROP,
            "rope_scaling": {"type": "yarn", "short_factor": DIVISORS, "long_factor": DIVISORS},
            "original_max_position_embeddings": 128,
        },
    ),
    (
        Case("Gemma 3, old spelling", "Gemma3", SLIDING | {"head_dim": 32, "num_hidden_layers": 7}),
        {
            "rope_parameters": DROP, "layer_types": DROP, "sliding_window_pattern": 3, "rope_theta": 3e5,
            "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes"), CASES, ids=[case.title.replace(" ", "_") for case, _ in CASES])
def test_logits(case: Case, changes: dict[str, Any], tmp_path: Path) -> None:
    """What transformers reads from the changed file."""
    kind = type(make_model(case, tmp_path))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not DROP}))
    theirs = kind.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager").eval()
    tokens = random_tokens(2, LENGTH)
    expected = their_logits(theirs, tokens)
    largest = np.abs(expected).max()
    assert largest > 0.1
    got = our_logits(ReferenceOps(exact_activations=True), tmp_path, 64, tokens)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE * largest)
