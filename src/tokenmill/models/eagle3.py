"""EAGLE-3 heads (arXiv 2503.01840): a decoder layer, trained for one target, that guesses further tokens from
the states of several layers of this.

The target has seen the tokens up to position p, and token p + 1 has been drawn. The head is given both:

    g       W_fc [states of the target at p, of each of its chosen layers]; to go on, h of the position before
    x       [norm(embedding of token p + 1), norm(g)], of which queries, keys and values are made
    h       g, or norm(g) where norm_before_residual says so, plus attention(x); then plus FFN(norm) of that
    logits  head(norm(h)), of token p + 2

Where norm_before_fc or fc_norm say so, there is a norm before W_fc, of all states together or of each; where
norm_output does, norm(h) goes on.

The head knows the most frequent tokens alone: its logits are spread to the target's vocabulary by d2t, which has for
each of its ids how far the target's is from there.

Two forms are read: a folder of vLLM's `speculators`, whose config.json has the layer under transformer_layer_config,
and one as EAGLE's authors and SpecForge write it (LlamaForCausalLMEagle3), whose config.json is that of the layer. The
layer is Llama's, or Qwen3's, with queries, keys and values of twice the width.

Numbers of the target's layers are those of vLLM: number n is the state that layer n gets. SpecForge and SGLang, whose
numbers stand under eagle_config, count the state that layer n gives.

    T tokens  L rows of logits  D width  N tokens of the head's vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.block import KVGroup
from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.config_keys import ARCHITECTURES, architecture_of
from ..formats.ggml import dequantise
from ..ops.api import NEVER, Array, Ops, Weight
from ..ops.forward import ForwardOps
from . import decoder
from .config import ModelConfig, config_from_checkpoint
from .kv_groups import LayerKV, kv_groups
from .loader import Model, load_ropes
from .repack import as_matrix
from .roles import expected_shapes
from .rope import RopeTables
from .weights import LayerWeights, as_run, compare_tensors, load_layer, quantization_of_ends, token_places

MOST_OTHER_TOKENS = 128
"""By which vocabularies of one tokenizer may differ: what fills them up."""

_LAYER = "transformer_layer_config"
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_LAYER_TYPES = ("llama", "qwen3")
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""What is said of norms, true or false; where nothing is, they are not there."""

_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_HIDDEN_NORM, _FC = "model.layers.0.hidden_norm.weight", "fc.weight"
_INPUT_NORM, _EACH_NORM = "input_norm.weight", "fc_norm.{}.weight"
_BESIDE = ("fc.", "fc_norm.", "input_norm.", "lm_head.", "d2t", "t2d", "verifier_")
"""What the names of tensors outside the layer begin with. The verifier's are there to train with."""


def is_eagle3(metadata: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of such a head, or what llama.cpp's converter says of one."""
    names = metadata.get("speculators_model_type"), metadata.get("general.architecture")
    return "eagle3" in names or "eagle3" in architecture_of(metadata).lower()


def eagle3_checkpoint(head: Checkpoint, target: Checkpoint) -> Checkpoint:
    """A view of a head, as of a model of one layer whose metadata also have, in vLLM's words, what is said of the head:
    draft_vocab_size, eagle_aux_hidden_state_layer_ids, and which norms there are. Raises BadCheckpoint where it is no
    such head, or not one for this target."""
    given = head.metadata
    if head.kind != "hf" and is_eagle3(given):
        raise BadCheckpoint(f"{head.path} is an EAGLE-3 head in a GGUF file; name the folder that it was made of.")
    if not is_eagle3(given):
        named = given.get("speculators_model_type") or architecture_of(given) or given.get("general.architecture")
        raise BadCheckpoint(
            f"{head.path} is no folder of an EAGLE-3 head but of {named!r}; those of EAGLE 1 and 2 are not supported."
        )
    model = config_from_checkpoint(target)
    layer = given.get(_LAYER, given)
    if not isinstance(layer, dict) or layer.get("model_type", "llama") not in _LAYER_TYPES:
        raise BadCheckpoint(f"{head.path}: {_LAYER} must be of model_type {' or '.join(_LAYER_TYPES)}.")
    _check_kind(head, target, layer)
    aux_layers = _aux_layers(head, model.num_layers)
    kind = layer.get("model_type", "llama")
    said: dict[str, Any] = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": given.get("draft_vocab_size", layer.get("vocab_size")),
        _AUX_LAYERS: aux_layers,
    }
    said |= {name: given.get(name) or _eagle_config(head).get(name) or False for name in _NORMS}
    said |= {"layer_types": ["full_attention"]} if layer.get("layer_types") else {}
    view = Checkpoint("hf", head.path, {**layer, **said}, dict(map(_named, head.tensors.values())))
    config = config_from_checkpoint(view)
    if all(each.rope is not None and each.rope.scaling == "none" for each in config.layers):
        view.metadata["max_position_embeddings"] = max(
            config.max_context, model.max_context
        )  # trained on shorter texts
    _check(view, config, model)
    return view


def _named(tensor: Any) -> tuple[str, Any]:
    """A tensor by the name that it has in a model of one layer."""
    name = tensor.name.removeprefix("model.").replace("midlayer.", "layers.0.")
    name = name if name.startswith(_BESIDE) else f"model.{name}"
    return name, replace(tensor, name=name)


def _check_kind(head: Checkpoint, target: Checkpoint, layer: Mapping[str, Any]) -> None:
    given = head.metadata
    if layer.get("num_hidden_layers", 1) != 1:
        raise BadCheckpoint(f"{head.path} has {layer['num_hidden_layers']!r} layers; heads of one are supported.")
    if not _eagle_config(head).get("use_aux_hidden_state", True):
        raise BadCheckpoint(f"{head.path} takes the last state of its model alone, which is not supported.")
    known = given.get("speculators_config")
    verifier = known.get("verifier") if isinstance(known, dict) else None
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    if target.kind == "hf" and isinstance(names, list) and names and architecture_of(target.metadata) not in names:
        raise BadCheckpoint(
            f"{head.path} was trained for {verifier.get('name_or_path')}, a {names[0]}, and not for a "  # type: ignore[union-attr]
            f"{architecture_of(target.metadata)}."
        )


def _eagle_config(head: Checkpoint) -> Mapping[str, Any]:
    given = head.metadata.get("eagle_config")
    return given if isinstance(given, dict) else {}


def usual_aux_layers(num_layers: int) -> list[int]:
    """Whose states a head is given that does not say it, as vLLM and speculators choose and count them: an early one's,
    the middle one's, a late one's; in the order in which they are computed."""
    return sorted([min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)])


def _aux_layers(head: Checkpoint, num_layers: int) -> list[int]:
    """In the order in which the target computes them, as everywhere."""
    inner = _eagle_config(head).get(_AUX_LAYERS)
    layers = head.metadata.get(_AUX_LAYERS) or inner or usual_aux_layers(num_layers)
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise BadCheckpoint(f"{head.path}: {_AUX_LAYERS} must be a list of integers, got {layers!r}.")
    layers = sorted(layer + (layers is inner) for layer in layers)
    if not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise BadCheckpoint(f"{head.path} takes states of layers {layers}; its model has {num_layers} layers.")
    return layers


def _check(view: Checkpoint, config: ModelConfig, target: ModelConfig) -> None:
    """Everything but values of matrices."""
    said = view.metadata
    width, size, names = config.width, said["draft_vocab_size"], view.tensors
    if type(size) is not int or not 0 < size <= target.vocab_size:
        raise BadCheckpoint(f"{view.path}: draft_vocab_size must be from 1 to {target.vocab_size}, got {size!r}.")
    for name in _NORMS:
        if type(said[name]) is not bool:
            raise BadCheckpoint(f"{view.path}: {name} must be true or false, got {said[name]!r}.")
    if abs(config.vocab_size - target.vocab_size) > MOST_OTHER_TOKENS:
        raise BadCheckpoint(
            f"{view.path} was made for a vocabulary of {config.vocab_size} tokens; the model that it is to draft for "
            f"has {target.vocab_size}."
        )
    if _EMBED not in names and width != target.width:
        raise BadCheckpoint(
            f"{view.path} has no embeddings, and those of the model that it is to draft for have {target.width} "
            f"channels and not {width}."
        )
    expected = expected_shapes("hf", config)
    for role in ("q", "k", "v"):
        name = f"model.layers.0.self_attn.{role}_proj.weight"
        expected[name] = (expected[name][0], 2 * width)
    expected |= {_HIDDEN_NORM: (width,), _HEAD: (size, width)}
    num_aux = len(said[_AUX_LAYERS])
    expected |= {_FC: (width, num_aux * target.width)}
    expected |= {_INPUT_NORM: (num_aux * target.width,)} if said["norm_before_fc"] else {}
    expected |= {_EACH_NORM.format(each): (target.width,) for each in range(num_aux) if said["fc_norm"]}
    optional = {_EMBED: expected.pop(_EMBED), "d2t": (size,), "t2d": (config.vocab_size,)}
    compare_tensors(view, replace(config, unread=("verifier_",)), expected, optional)
    _places(view, target.vocab_size)


def _places(view: Checkpoint, vocab_size: int) -> np.ndarray:
    """int32 [N]: the target's id of each of the head's. Raises BadCheckpoint."""
    size = int(view.metadata["draft_vocab_size"])
    if "d2t" in view.tensors:
        return token_places(view, "d2t", vocab_size, are_offsets=True)
    if size != view.metadata["vocab_size"]:
        raise BadCheckpoint(f"{view.path} is missing d2t, which says what its {size} tokens are.")
    return np.arange(size, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Eagle3Model:
    """config       of its layer, whose vocab_size tokens it can take in
    vocab_size   tokens that it can take in and the target knows
    aux_layers   of the target, whose states `join` takes
    embed        the target's own where it has none
    layer        whose input norm is that of the embedding
    input_norm   of the states together, or None
    each_norm    of each of them, or none
    norm_output  whether what it goes on with is normed
    places_N     int32: the target's id of each of its own, of which there are num_logits
    """

    config: ModelConfig
    kv_group: KVGroup
    vocab_size: int
    num_logits: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool
    norm_output: bool
    input_norm: Array | None
    each_norm: tuple[Array, ...]
    fc: Weight
    embed: Weight
    layer: LayerWeights
    hidden_norm: Array
    rope: RopeTables | None
    final_norm: Array
    head: Weight
    places_N: np.ndarray
    num_bytes: int

    @property
    def width(self) -> int:
        return self.config.width

    def join(self, ops: ForwardOps, states: Sequence[Array]) -> Array:
        """[T, D] of the target's states."""
        eps = self.config.norm_eps
        if self.each_norm:
            states = [ops.rms_norm(x_TD, norm, eps) for x_TD, norm in zip(states, self.each_norm, strict=True)]
        x_TX = ops.join_columns(states)
        return ops.linear(x_TX if self.input_norm is None else ops.rms_norm(x_TX, self.input_norm, eps), self.fc)

    def forward(self, ops: ForwardOps, kv: Any, batch: Any, states: np.ndarray, made: np.ndarray) -> Array:
        """Logits [L, num_logits]; writes the KV of all its tokens. Of the token of each row, which is at the position
        behind the row's: states, float32 [max_tokens, D]: what `join` made at the row's position, or this head. made:
        what it makes is written there."""
        config, layer = self.config, self.layer
        assert layer.attn_norm is not None
        e_TD = ops.rms_norm(ops.embed(self.embed, batch.tokens_T), layer.attn_norm.weight, config.norm_eps)
        x_TD = ops.load_rows(states, batch.tokens_T)
        h_TD = ops.rms_norm(x_TD, self.hidden_norm, config.norm_eps)
        both_T2D, layer = ops.join_columns([e_TD, h_TD]), replace(layer, attn_norm=None)
        mixed_TD = decoder.attention(ops, config, 0, layer, self.rope, LayerKV((kv, 0)), batch, both_T2D)
        x_TD = ops.add(h_TD if self.norm_before_residual else x_TD, mixed_TD)
        x_TD = ops.add(x_TD, decoder.ffn(ops, config, layer, batch, x_TD))
        if self.norm_output:
            x_TD = ops.rms_norm(x_TD, self.final_norm, config.norm_eps)
        ops.store_rows(x_TD, made)
        x_LD = ops.gather_rows(x_TD, batch.logit_rows_L)
        if not self.norm_output:
            x_LD = ops.rms_norm(x_LD, self.final_norm, config.norm_eps)
        return ops.spread_columns(ops.linear(x_LD, self.head), self.places_N, self.num_logits, float(NEVER))


def load_eagle3(
    view: Checkpoint,
    ops: Ops,
    target: Model,
    *,
    max_model_len: int,
    block_size: int,
    kv_dtype: str,
    quantization: str | None = None,
) -> Eagle3Model:
    """Of what eagle3_checkpoint gave for this target, on whose `ops` it is packed. quantization: see load_weights.
    Raises BadCheckpoint."""
    config, said, tensors = config_from_checkpoint(view), view.metadata, view.tensors

    def pack(name: str, kind: str | None = quantization) -> Weight:
        return ops.pack([as_run(as_matrix(tensors[name]), ops, kind)])

    num_aux, ends = len(said[_AUX_LAYERS]), quantization_of_ends(quantization)
    names = (_HIDDEN_NORM, _NORM, _INPUT_NORM, *(_EACH_NORM.format(each) for each in range(num_aux)))
    norms = {name: dequantise(each.kind, each.data, each.num_values) for name, each in tensors.items() if name in names}
    vectors = {name: ops.vector(values) for name, values in norms.items()}
    layer, layer_bytes = load_layer(view, config, ops, quantization=quantization)
    (rope,), _, table_bytes = load_ropes(config, ops, max_model_len)
    (kv_group,) = kv_groups(config, windows=(), block_size=block_size, dtype=kv_dtype)
    fc, head = pack(_FC), pack(_HEAD, ends)
    own = pack(_EMBED, ends) if _EMBED in tensors else None
    packed = [fc, head] if own is None else [fc, head, own]
    return Eagle3Model(
        config=config,
        kv_group=kv_group,
        vocab_size=min(config.vocab_size, target.config.vocab_size),
        num_logits=target.config.vocab_size,
        aux_layers=tuple(said[_AUX_LAYERS]),
        norm_before_residual=said["norm_before_residual"],
        norm_output=said["norm_output"],
        input_norm=vectors.get(_INPUT_NORM),
        each_norm=tuple(vectors[name] for name in names[3:] if name in vectors),
        fc=fc,
        embed=own or target.weights.embed,
        layer=layer,
        hidden_norm=vectors[_HIDDEN_NORM],
        rope=rope,
        final_norm=vectors[_NORM],
        head=head,
        places_N=_places(view, target.config.vocab_size),
        num_bytes=layer_bytes
        + table_bytes
        + sum(int(weight.num_bytes) for weight in packed)
        + sum(values.nbytes for values in norms.values()),
    )
