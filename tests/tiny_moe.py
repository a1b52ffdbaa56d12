"""A random mixture of experts of a few thousand weights, as an open checkpoint and its configuration, with no file
behind it. Its router has rows in equal pairs: experts 2i and 2i + 1 tie in every row of every step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiny import tensor, tiny_config
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models import loader as registry
from tokenmill.models.config import ModelConfig
from tokenmill.models.families import HF_FAMILIES
from tokenmill.models.moe import PAIRED, MoeConfig
from tokenmill.models.roles import expected_shapes
from tokenmill.ops.api import SOFTMAX_CHOSEN, ExpertActivation, Routing
from tokenmill.worker import build

ROUTING = Routing(num_experts=8, top_k=3)
EXPERT_WIDTH = 32
CONFIG = "tiny moe config"
_ROUTERS = ("mlp.gate.weight", "correction_bias", "mlp.router.weight", "mlp.router.bias")


def moe_config(
    routing: Routing = ROUTING, *, shared_width: int = 0, shared_mix: bool = False, choice_bias: bool = False
) -> ModelConfig:
    """Three layers, of which the first is dense."""
    config = tiny_config(num_layers=3)
    layers = tuple(replace(layer, is_moe=index > 0) for index, layer in enumerate(config.layers))
    moe = MoeConfig(routing, EXPERT_WIDTH, shared_width, shared_mix, choice_bias=choice_bias)
    return replace(config, layers=layers, moe=moe)


def gpt_oss_config() -> ModelConfig:
    """Sinks, windows in turns, biases of everything, clamped SwiGLU, gates and ups in turns; each layer has experts."""
    config = moe_config(Routing(num_experts=8, top_k=4, score=SOFTMAX_CHOSEN, normalise=False))
    assert config.moe is not None
    family = HF_FAMILIES["GptOssForCausalLM"]
    layers = tuple(
        replace(layer, is_moe=True, window=24 if family.has_window(index) else 0)
        for index, layer in enumerate(config.layers)
    )
    moe = replace(config.moe, activation=ExpertActivation("swiglu", limit=2.0, alpha=1.702), form=PAIRED)
    biases = frozenset((*family.biases, "q", "k", "v", "output"))
    return replace(config, family=family, layers=layers, moe=moe, biases=biases)


def moe_checkpoint(config: ModelConfig, *, seed: int = 0, has_ties: bool = True) -> Checkpoint:
    """Weights are a function of the seed and of their names."""
    tensors = {}
    for index, (name, shape) in enumerate(sorted(expected_shapes("hf", config).items())):
        rng = np.random.default_rng([seed, index])
        is_norm = len(shape) == 1
        values = 1 + 0.1 * rng.normal(size=shape) if is_norm else rng.normal(size=shape) * shape[-1] ** -0.5 * 2
        if name.endswith("correction_bias"):
            values = 0.2 * rng.normal(size=shape)
        if has_ties and name.endswith(_ROUTERS):
            values[1::2] = values[::2]
        tensors[name] = tensor(name, values)
    return Checkpoint("hf", Path("tiny-moe"), {CONFIG: config}, tensors)


def read_tiny_moe(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a worker can be built of such a checkpoint, which has a configuration instead of keys."""
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny moe")
    monkeypatch.setattr(registry, "config_from_checkpoint", lambda checkpoint: checkpoint.metadata[CONFIG])
