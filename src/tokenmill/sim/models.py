"""What of a model a step's cost depends on: its shape, and what follows from it. Weights by number and bytes, KV
bytes a position, operations a token. Norms and biases are left out: together less than 0.1 % of any model here.

The table is `tables/models.toml`, each model with its source. Latent attention as in DeepSeek-V2 (DeepSeek-AI, 2024),
whose decodes work on the latents themselves; a query of low rank without them as in Step-3 (StepFun, 2025)."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TypeVar

from ..core.errors import ConfigError
from .fields import Fields

Found = TypeVar("Found")

WEIGHT_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5 + 1 / 16,
    "int4": 0.5 + 2.5 / 128,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
}
"""Bytes of one weight: fp4 with a scale of 8 bits for 16 (NVFP4), int4 with a scale and a zero for 128 (AWQ), GGUF's
with theirs for 32."""
_ONLY_LAYERS = ("fp8", "int8", "fp4", "int4")
"""Precisions that leave the logits' matrix and the embedding in 16 bits: so do GPTQ (Frantar et al., 2023) and AWQ (Lin
et al., 2024), and the checkpoints that llm-compressor and ModelOpt make (lm_head is ignored); DeepSeek-V3's too."""
_PRECISION = "precision.weights"
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}


@dataclass(frozen=True)
class ModelShape:
    """ffn: width of dense layers' FFN; is_gated: it has three matrices, not two. num_dense_layers: those without
    experts, of a model that has experts. query_rank, kv_rank: 0 where projections have no inner rank; kv_rank makes
    attention latent, with rope_dim more values a position."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    is_gated: bool = True
    is_tied: bool = False
    num_dense_layers: int = 0
    num_experts: int = 0
    num_chosen: int = 0
    num_shared: int = 0
    expert_ffn: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    title: str = ""
    source: str = ""

    @property
    def chosen(self) -> float:
        """Share of the experts that a token chooses, 0 without experts."""
        return self.num_chosen / self.num_experts if self.num_experts else 0.0

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention_weights(self) -> int:
        """Of one layer: queries, keys, values, output."""
        hidden, heads = self.hidden, self.num_heads
        query_width = heads * (self.head_dim + self.rope_dim)
        query = self.query_rank * (hidden + query_width) if self.query_rank else hidden * query_width
        if self.kv_rank:
            kv = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * 2 * self.head_dim
        else:
            kv = hidden * 2 * self.num_kv_heads * self.head_dim
        return query + kv + heads * self.head_dim * hidden

    @property
    def undivided_weights(self) -> int:
        """Of all layers, what each of several devices that share a layer has whole: the projections to inner ranks,
        which all heads use (DeepSeek-AI, 2024)."""
        width = self.query_rank + (self.kv_rank + self.rope_dim if self.kv_rank else 0)
        return self.num_layers * self.hidden * width

    @property
    def expert_weights(self) -> int:
        """Of one expert of one layer."""
        return (3 if self.is_gated else 2) * self.hidden * self.expert_ffn

    @property
    def routed_weights(self) -> int:
        """Of all experts that tokens choose among, in all layers."""
        return self.num_expert_layers * self.num_experts * self.expert_weights

    @property
    def fixed_weights(self) -> int:
        """What every step reads in its layers: attention, dense FFNs, shared experts, routers."""
        num_dense = self.num_layers - self.num_expert_layers
        dense_ffn = (3 if self.is_gated else 2) * self.hidden * self.ffn
        shared = self.num_expert_layers * (self.num_shared * self.expert_weights + self.hidden * self.num_experts)
        return self.num_layers * self.attention_weights + num_dense * dense_ffn + shared

    @property
    def head_weights(self) -> int:
        """The matrix of the logits."""
        return self.hidden * self.vocab

    def head_bytes(self, precision: str) -> float:
        """Of the logits' matrix, and of the embedding. Raises ConfigError for a precision that is unknown."""
        return self.head_weights * bytes_of(head_precision(precision), WEIGHT_BYTES, _PRECISION)

    @property
    def num_parameters(self) -> int:
        return self.fixed_weights + self.routed_weights + (1 if self.is_tied else 2) * self.head_weights

    @property
    def token_weights(self) -> int:
        """Weights of layers that one token meets; twice that are its operations, but for attention and logits."""
        return self.fixed_weights + self.num_expert_layers * self.num_chosen * self.expert_weights

    @property
    def num_active(self) -> int:
        """Parameters that a token uses, its logits' among them, its embedding's not."""
        return self.token_weights + self.head_weights

    @property
    def kv_values(self) -> int:
        """Numbers kept for one position, in all layers."""
        one = self.kv_rank + self.rope_dim if self.kv_rank else 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * one

    @property
    def prefill_flop(self) -> int:
        """Operations of one token for one position before it, in all layers: scores and weighted sum."""
        return self.num_layers * 2 * self.num_heads * (2 * self.head_dim + self.rope_dim)

    @property
    def decode_flop(self) -> int:
        """The same where a row of one token attends: on the latents themselves, where there are any."""
        if not self.kv_rank:
            return self.prefill_flop
        return self.num_layers * 2 * self.num_heads * (2 * self.kv_rank + self.rope_dim)

    def weight_bytes(self, precision: str) -> float:
        """Of all weights. Raises ConfigError for a precision that is unknown."""
        layers = self.fixed_weights + self.routed_weights
        num_heads = 1 if self.is_tied else 2
        return layers * bytes_of(precision, WEIGHT_BYTES, _PRECISION) + num_heads * self.head_bytes(precision)

    def kv_bytes(self, precision: str) -> float:
        """Of one position in all layers. Raises ConfigError for a precision that is unknown."""
        return self.kv_values * bytes_of(precision, KV_BYTES, "precision.kv")


def head_precision(precision: str) -> str:
    """Of the logits' matrix and the embedding, where layers have this one."""
    return "bf16" if precision in _ONLY_LAYERS else precision


def bytes_of(precision: str, known: Mapping[str, float], where: str) -> float:
    if precision not in known:
        raise ConfigError(f"{where}: {precision!r} is unknown; {_hint(precision, list(known))}", param=where)
    return known[precision]


def model_named(name: str, where: str = "model") -> ModelShape:
    """Of the table, by name or alias in any case. Raises ConfigError, which names the field and the nearest ones."""
    return find(name, models(), where)


@cache
def models() -> dict[str, ModelShape]:
    """All of the table, by name and by alias."""
    text = resources.files(__package__).joinpath("tables/models.toml").read_text(encoding="utf8")
    return read_models(text)


def read_models(text: str) -> dict[str, ModelShape]:
    """Of a TOML text as in `tables/models.toml`, by name and by alias. Raises ConfigError."""
    found: dict[str, ModelShape] = {}
    for name, table in tomllib.loads(text).items():
        fields = Fields(table, name)
        aliases = fields.texts("aliases")
        shape = read_model(fields, name)
        for each in (name, *aliases):
            found[each] = shape
    return found


def read_model(fields: Fields, name: str) -> ModelShape:
    """One table of a model. Raises ConfigError where a figure is missing, and where it has no source."""
    most = {
        key: fields.count(key, least=1) for key in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim")
    }
    counts = ("num_dense_layers", "num_experts", "num_chosen", "num_shared", "expert_ffn", "query_rank", "kv_rank")
    shape = ModelShape(
        name,
        **most,
        ffn=fields.count("ffn", 0),
        vocab=fields.count("vocab", least=1),
        is_gated=fields.flag("is_gated", True),
        is_tied=fields.flag("is_tied"),
        **{key: fields.count(key, 0) for key in (*counts, "rope_dim")},
        title=fields.text("title", name),
        source=fields.text("source"),
    )
    fields.end()
    if bool(shape.num_experts) != bool(shape.num_chosen) or shape.num_chosen > shape.num_experts:
        raise fields.error("num_chosen", f"from 1 to num_experts ({shape.num_experts}) is needed")
    if not shape.ffn and not shape.expert_ffn:
        raise fields.error("ffn", "the width of the FFN is needed, here or in expert_ffn")
    return shape


def find(name: str, known: Mapping[str, Found], where: str) -> Found:
    value = known.get(name.lower())
    if value is None:
        raise ConfigError(f"{where}: {name!r} is unknown; {_hint(name.lower(), list(known))}", param=where)
    return value


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
