"""An EAGLE-3 head in torch (arXiv 2503.01840), under the names that its tensors have on disk.

At position p the head is given hidden states of the target there and the token behind it, p + 1, and guesses the token
at p + 2. To go on, its own state takes the place of the target's, and its guess that of the token. One layer does it:

    x       W [states of the target at p], or the head's own state
    u       norm(x)
    h       u + attention([norm(embedding of token p + 1), u]);  h + ffn(norm(h)) is the head's state
    logits  head(norm(state)), of the tokens that are drafted alone

`train_steps` runs it as it will draft, from every position of a text at once (the paper's training-time test): in a
step s > 0 a position sees what the target left up to its own, and of the head's own states those that lead from there,
one for each step before. Its tokens are those of the text, since behind a wrong guess nothing is drafted.

    B texts  T tokens  D width  G KV heads  R queries of a KV head  C channels of a head  V drafted tokens
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from ..formats.safetensors import WHOLE_NAME, write_safetensors
from ..formats.tensor import Tensor as StoredTensor
from ..models.config import ModelConfig

Weights = Mapping[str, Tensor]

_LAYER = "layers.0."
_INIT_STD = 0.02
_LARGEST_HEAD = 128
"""Channels of a head, where the target's own are no example."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head, and what is the target's."""

    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    vocab_size: int
    draft_vocab_size: int
    max_context: int
    layers: tuple[int, ...]

    @classmethod
    def of(cls, config: ModelConfig, layers: tuple[int, ...], draft_vocab_size: int) -> HeadShape:
        """As a dense layer of the target is, in the form of Llama's."""
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        if config.latent is not None:
            num_heads = num_kv_heads = max(1, config.width // _LARGEST_HEAD)
            head_dim = min(_LARGEST_HEAD, config.width)
        rope = config.layers[-1].rope
        return cls(
            width=config.width,
            ffn_width=config.ffn_width if config.moe is None else 3 * config.width,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=config.norm_eps,
            rope_theta=10_000.0 if rope is None else rope.base,
            vocab_size=config.vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_context=config.max_context,
            layers=layers,
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is trained, by name."""
        width, ffn, drafted = self.width, self.ffn_width, self.draft_vocab_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "hidden_norm": (width,),
            "input_layernorm": (width,),
            "self_attn.q_proj": (queries, 2 * width),
            "self_attn.k_proj": (keys, 2 * width),
            "self_attn.v_proj": (keys, 2 * width),
            "self_attn.o_proj": (width, queries),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (ffn, width),
            "mlp.up_proj": (ffn, width),
            "mlp.down_proj": (width, ffn),
        }
        named = {"fc": (width, len(self.layers) * width), "norm": (width,), "lm_head": (drafted, width)}
        return {f"{name}.weight": shape for name, shape in (named | {_LAYER + n: s for n, s in layer.items()}).items()}


def new_weights(shape: HeadShape, head_rows_VD: Tensor, seed: int) -> dict[str, Tensor]:
    """The target's own rows for its head, norms of ones, but before the head so much that logits begin with a spread of
    one, and the rest at random."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, sizes in shape.tensors().items():
        is_norm = len(sizes) == 1
        weights[name] = torch.ones(sizes) if is_norm else torch.randn(sizes, generator=generator) * _INIT_STD
    weights["lm_head.weight"] = head_rows_VD.clone()
    weights["norm.weight"] /= head_rows_VD.norm(dim=1).mean()
    return weights


def train_steps(
    weights: Weights, shape: HeadShape, aux_BTA: Tensor, embeds_BTD: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Of each step what the head makes logits of, [B, T, D]: at t, in step s, of token t + 2 + s.

    aux_BTA: the target's states, scaled as `fc` is trained to take them. embeds_BTD: of the texts' tokens."""
    attention = _Attention(weights, shape)
    state_BTD = linear(aux_BTA, weights["fc.weight"])
    for step in range(num_steps):
        ahead_BTD = torch.roll(embeds_BTD, -1 - step, 1)  # the last ones are wrong, and nobody looks at what they give
        u_BTD = _norm(weights, shape, f"{_LAYER}hidden_norm", state_BTD)
        e_BTD = _norm(weights, shape, f"{_LAYER}input_layernorm", ahead_BTD)
        h_BTD = u_BTD + attention(torch.cat([e_BTD, u_BTD], -1), step)
        state_BTD = h_BTD + _ffn(weights, _norm(weights, shape, f"{_LAYER}post_attention_layernorm", h_BTD))
        yield _norm(weights, shape, "norm", state_BTD)


class _Attention:
    """Over what the target left, in the first step, and the steps since then."""

    def __init__(self, weights: Weights, shape: HeadShape) -> None:
        self._weights, self._shape = weights, shape
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, x_BTX: Tensor, step: int) -> Tensor:
        """[B, T, D]; to be called for every step, in order."""
        shape, (num_texts, num_tokens, _) = self._shape, x_BTX.shape
        num_groups, head_dim = shape.num_kv_heads, shape.head_dim

        def heads(name: str) -> Tensor:
            """[B, G, heads of a group, T, C]"""
            y = linear(x_BTX, self._weights[f"{_LAYER}self_attn.{name}_proj.weight"])
            return y.view(num_texts, num_tokens, num_groups, -1, head_dim).permute(0, 2, 3, 1, 4)

        turns = self._turns(num_tokens, step)
        q_BGRTC, k_BG1TC = _turned(heads("q"), turns) * head_dim**-0.5, _turned(heads("k"), turns)
        self._keys.append(k_BG1TC)
        self._values.append(heads("v"))
        first = q_BGRTC @ self._keys[0].transpose(-1, -2)
        unseen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        own = [(q_BGRTC * keys).sum(-1, keepdim=True) for keys in self._keys[1:]]
        shares = torch.softmax(torch.cat([first.masked_fill(unseen, float("-inf")), *own], -1), -1)
        mixed = shares[..., :num_tokens] @ self._values[0]
        for number, values in enumerate(self._values[1:]):
            mixed = mixed + shares[..., num_tokens + number, None] * values
        mixed_BTX = mixed.permute(0, 3, 1, 2, 4).reshape(num_texts, num_tokens, -1)
        return linear(mixed_BTX, self._weights[f"{_LAYER}self_attn.o_proj.weight"])

    def _turns(self, num_tokens: int, step: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, C], of halves: the head's token in a step is so many positions on."""
        pairs = torch.arange(0, self._shape.head_dim, 2) / self._shape.head_dim
        angles = torch.outer(torch.arange(num_tokens) + float(step), self._shape.rope_theta**-pairs)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-high, low], -1) * turns[1]


def _ffn(weights: Weights, x: Tensor) -> Tensor:
    gate, up, down = (weights[f"{_LAYER}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def _norm(weights: Weights, shape: HeadShape, name: str, x: Tensor) -> Tensor:
    return rms_norm(x.float(), (shape.width,), weights[f"{name}.weight"], shape.norm_eps)


def speculators_config(shape: HeadShape, model: str, architectures: Sequence[str], num_drafts: int) -> dict[str, Any]:
    """config.json of such a head as `speculators` writes it."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafts,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": model, "architectures": list(architectures)},
        },
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "norm_before_residual": True,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",
            "attention_bias": False,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.width,
            "intermediate_size": shape.ffn_width,
            "max_position_embeddings": shape.max_context,
            "mlp_bias": False,
            "num_attention_heads": shape.num_heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": shape.num_kv_heads,
            "rms_norm_eps": shape.norm_eps,
            "rope_scaling": None,
            "rope_theta": shape.rope_theta,
            "vocab_size": shape.vocab_size,
        },
    }


def write_head(folder: Path, config: Mapping[str, Any], tensors: Weights) -> None:
    """Make the folder of a head, whole or not at all. Raises OSError."""
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
        write_safetensors(new / WHOLE_NAME, (_stored(name, each) for name, each in sorted(tensors.items())))
        new.chmod(0o755)
        os.replace(new, folder)
    except BaseException:
        shutil.rmtree(new)
        raise


def _stored(name: str, values: Tensor) -> StoredTensor:
    kind = {torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "bool"}[values.dtype]
    data = memoryview(values.contiguous().view(torch.uint8).numpy().reshape(-1).data)
    return StoredTensor(name, kind, tuple(values.shape), data)
