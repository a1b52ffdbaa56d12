"""What a family of decoder declares of itself: a small difference from the common decoder, which is Llama's.

The decoder, the weight loader and the kernels know only these differences, never a family. What the roles of a layer's
tensors are: roles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..formats.config_key import Keys
from .moe import MoeFamily

HEADS, LATENT_HEADS, LOW_RANK, NO_HEADS = "heads", "latent", "low_rank", "none"
"""Kinds of attention."""

SEQUENTIAL, PARALLEL, ONE_NORM = "sequential", "parallel", "one_norm"
"""Residuals: the FFN sees what attention has added to; or both see the layer's input (parallel residuals, as of GPT-J),
each through a norm of its own or both through one."""


@dataclass(frozen=True, slots=True)
class Family:
    """title              what people call it
    norm               "rms" or "layer"
    norm_weight        norms have a weight
    norm_bias          layer norms have a bias
    norm_eps           of norms, where the type has no key for it
    norm_offset        added to norm weights at load, where a file stores them less one
    pre_norm           norms before attention and FFN
    post_norm          norms on what attention and FFN give, before it is added
    residual           SEQUENTIAL, PARALLEL or ONE_NORM
    residual_key       the key that a file says this by; where it is false the residual is SEQUENTIAL
    qk_norm            "" none, "head" over each head, "width" over all heads together; "own": layer norms of
                       each head, which have weights of its own and no bias
    norm_after_rope    these norms come after RoPE
    bare_qk_norm       they have no weights, and layers without positions have no such norms
    v_norm             values are normed too, head by head and without weights
    may_lack_qk_norm   a GGUF file may be without these norms, as its tensors tell
    activation         "silu", "gelu" (the tanh form), "gelu_erf", "relu2" (where nothing is gated); None: the file says
    legacy_gelu        the file says "gelu" where the tanh form is meant
    gated              whether the FFN multiplies activation(gate) by up
    attention          HEADS, LATENT_HEADS (DeepSeek-V2's: latent keys and values), LOW_RANK (Step-3's: queries
                       through fewer channels) or NO_HEADS: no layer attends
    indexed            a layer attends to the positions that an indexer chooses (DeepSeek sparse attention, arXiv
                       2512.02556), `index_topk` of them: so many are the longest context, of which all are chosen
    gated_attention    what attention gives is multiplied by gates, which stand beside each head's query
    own_gates          these have a matrix of their own
    attention_scale    of scores, whatever a head's size; None: the file says, or it is its root's inverse
    sinks              each head has a score that no key has
    mixer              what layers that keep a state do (mixer.py); "": there are none
    tiled_values       a mixer's heads of values are stored in turns: the first of each head of keys, then the second of
                       each (llama.cpp's tiled order)
    mixer_layers       what layer_types calls these
    mixer_beside       every layer has its mixer beside attention
    one_sublayer       a layer has a mixer, attention or an FFN alone
    moe                its layers, or some, are mixtures of experts
    fused              roles stored as one matrix: "qkv", "gate_up", "shared_gate_up"; "mixer_qkvz" and "mixer_ba", with
                       the rows of each head of keys and its heads of values together
    qkv_by_group       rows of qkv go by KV head: its queries, its key, its value
    biases             roles that always have a bias
    bias_keys          file key -> roles that have a bias where it is true
    window_every       None: no windows; 0: every layer, where the file names a window; n: every layer but each n-th.
                       A file's own list of layer types overrules it
    chunks             windows are chunks: a token sees what lies in its own. Layers without positions have none
    full_first         of every n layers the first has no window, not the last
    full_last          the last layer has no window, whatever the file says
    window_on_no_rope  layers without positions have the window, and no others
    no_rope_every      n: each n-th layer is without positions; 0: none. config.json may say another n, or list them
    no_rope_on_full    layers without a window are without positions, in a file that has windows
    layer_scales       what a layer makes of the residual stream is multiplied by a number of its own
    scaled_embeddings  embeddings are multiplied by sqrt(width)
    interleaved_heads  rows of q and k are ordered for RoPE pairs (2i, 2i + 1)
    local_rope         windowed layers have RoPE settings of their own
    whole_yarn_pairs   YaRN's ramp begins and ends at whole pairs in a GGUF file, which has no key for it
    rope_mscales       RoPE settings with divisors have a short_mscale and a long_mscale in place of an attention factor
    rope_alpha         RoPE settings may have an `alpha`, by which the base is stretched
    scaled_queries     queries grow with their position, as the RoPE settings say (RopeConfig.query_beta), or those of
                       layers without positions alone, as keys of their own say
    rope               whether any layer has positions
    rope_if            (key, value) without which no layer has them; where a GGUF file lacks the key, all have
    rope_default       RoPE settings of a config.json that has none
    rope_names         what names of RoPE scalings in config.json mean, where that is not what they say; others are
                       then refused
    sees_ahead_key     of config.json: tokens see what comes after them too, windowed ones half the window to each side,
                       as only a model that gives vectors may
    logits_multiplied  a GGUF file's logit_scale multiplies logits; else they are divided by it
    key_names          usual name of a key -> what files of the family call it, where they may do so
    refused            (key, what it would mean) that must be absent or falsy
    only               key -> the values that it may have
    defaults           what a key of a GGUF file means where it is missing; of config.json formats/config_keys.py knows
    unread             what names of tensors begin with that are there for guessing more than one token
    names              role -> name pattern, where it is not the common one
    parallel_names     the same, of models whose residual is PARALLEL
    keys               of config.json, and what each means where it is missing; None: those of the file's model_type in
                       formats/config_keys.py, which has all of ours
    """

    title: str
    norm: str = "rms"
    norm_weight: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    residual: str = SEQUENTIAL
    residual_key: str = ""
    qk_norm: str = ""
    norm_after_rope: bool = False
    bare_qk_norm: bool = False
    v_norm: bool = False
    may_lack_qk_norm: bool = False
    activation: str | None = None
    legacy_gelu: bool = False
    gated: bool = True
    attention: str = HEADS
    indexed: bool = False
    gated_attention: bool = False
    own_gates: bool = False
    attention_scale: float | None = None
    sinks: bool = False
    mixer: str = ""
    tiled_values: bool = False
    mixer_layers: str = "linear_attention"
    mixer_beside: bool = False
    one_sublayer: bool = False
    moe: MoeFamily | None = None
    fused: tuple[str, ...] = ()
    qkv_by_group: bool = False
    biases: tuple[str, ...] = ()
    bias_keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    window_every: int | None = None
    chunks: bool = False
    full_first: bool = False
    full_last: bool = False
    window_on_no_rope: bool = False
    no_rope_every: int = 0
    no_rope_on_full: bool = False
    layer_scales: bool = False
    scaled_embeddings: bool = False
    interleaved_heads: bool = False
    local_rope: bool = False
    whole_yarn_pairs: bool = True
    rope_mscales: bool = False
    scaled_queries: bool = False
    rope: bool = True
    rope_alpha: bool = False
    rope_if: tuple[str, str | bool] | None = None
    rope_default: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    rope_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sees_ahead_key: str = ""
    logits_multiplied: bool = False
    key_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    refused: tuple[tuple[str, str], ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MappingProxyType({}))
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    unread: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    parallel_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    keys: Keys | None = None

    @property
    def norm_tensors(self) -> tuple[str, ...]:
        """What a file has of each norm over the model's width."""
        return ("weight",) * self.norm_weight + ("bias",) * (self.norm == "layer" and self.norm_bias)

    def with_residual(self, residual: str) -> Family:
        """The family with the names that it has where its residual is this."""
        return replace(self, names={**self.names, **self.parallel_names}) if residual == PARALLEL else self

    def has_window(self, layer: int) -> bool:
        """Whether a layer has the file's window, where the file does not list them."""
        every = self.window_every
        return every is not None and (every == 0 or (layer + (not self.full_first)) % every != 0)
