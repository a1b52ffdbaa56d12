"""Medusa heads (arXiv 2401.10774): small layers that guess further tokens from the state that a model draws one from.

The target has seen the tokens up to position p and has drawn token p + 1 from its last state there, behind its final
norm. From the same state, which nothing of what was drawn is in, head number k guesses token p + 2 + k:

    x       the state
    x       x + silu(W x + b), for each of the head's blocks
    logits  W_head x

Two forms are read, both folders: that of Medusa's authors, whose tensors are called 0.0.linear.weight (head, block) and
0.1.weight, and that of vLLM, where these are blocks.0.layers.0.weight and lm_heads.0.weight. In the latter, heads may
know a part of the vocabulary alone, whose tokens token_map names. Only chains of tokens are drafted: no trees.

    S sequences  D width  V vocabulary  N tokens that heads know
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..core.speculation import MOST_SPECULATIVE_TOKENS
from ..formats.checkpoint import Checkpoint, open_checkpoint
from ..formats.config_keys import architecture_of
from ..formats.ggml import dequantise
from ..ops.api import NEVER, Array, Ops, Weight
from ..ops.forward import ForwardOps
from .config import config_from_checkpoint
from .weights import Linear, as_run, quantization_of_ends, refuse_tensors, token_places

_PICKLED = "medusa_lm_head.pt"
_NUM_HEADS, _NUM_BLOCKS = ("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")
_MAP = "token_map"
_BEFORE = re.compile(r"(medusa_heads?\.)?(.*)")
_BLOCK, _HEAD = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), re.compile(r"(\d+)\.\d+\.weight")
_OF_A_HEAD = re.compile(r"(?:blocks|lm_heads)\.(\d+)\..*")


def is_medusa(metadata: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of such heads."""
    is_named = metadata.get("model_type") == "medusa" or architecture_of(metadata).startswith("Medusa")
    return is_named or _NUM_HEADS[1] in metadata


def open_medusa(path: Path, target: Checkpoint) -> Checkpoint:
    """The folder of heads for a model, with tensors and metadata by vLLM's names: num_heads, num_hidden_layers (blocks
    of a head), original_lm_head (whether all heads share a matrix), vocab_size (the target's), and where they know a
    part of it, truncated_vocab_size. Raises BadCheckpoint where these are no heads, or none for this model."""
    if path.is_dir() and (path / _PICKLED).is_file() and not list(path.glob("*.safetensors")):
        raise BadCheckpoint(
            f"{path} has its heads in {_PICKLED} alone, a pickle, which is not read: save them as "
            f"{Path(_PICKLED).with_suffix('.safetensors')}."
        )
    found = open_checkpoint(path)
    given = found.metadata
    if found.kind != "hf" or not is_medusa(given):
        raise BadCheckpoint(f"{path} is no folder of Medusa heads.")
    tensors = {_name(name): each for name, each in found.tensors.items()}
    said: dict[str, Any] = {
        "vocab_size": config_from_checkpoint(target).vocab_size,
        "num_heads": _count(found, _NUM_HEADS, _num_heads(tensors)),
        "num_hidden_layers": _count(found, _NUM_BLOCKS, 1),
        "original_lm_head": bool(given.get("original_lm_head")),
    }
    view = replace(
        found, metadata=given | said, tensors={name: replace(each, name=name) for name, each in tensors.items()}
    )
    _check(view, config_from_checkpoint(target).width)
    return view


def _name(stored: str) -> str:
    """A tensor's name as vLLM has it."""
    prefixed = _BEFORE.fullmatch(stored)
    name = stored if prefixed is None else prefixed[2]
    if block := _BLOCK.fullmatch(name):
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if head := _HEAD.fullmatch(name):
        return f"lm_heads.{head[1]}.weight"
    return "lm_heads.0.weight" if name == "lm_head.weight" else name


def _num_heads(tensors: Mapping[str, Any]) -> int:
    numbers = [int(named[1]) for named in map(_OF_A_HEAD.fullmatch, tensors) if named is not None]
    return 1 + max(numbers, default=0)


def _count(found: Checkpoint, keys: tuple[str, ...], otherwise: int) -> int:
    key = next((key for key in keys if found.metadata.get(key) is not None), keys[0])
    count = found.metadata.get(key, otherwise)
    if type(count) is not int or not 0 < count <= MOST_SPECULATIVE_TOKENS:
        raise BadCheckpoint(
            f"{found.path}: {key} of its config.json must be from 1 to {MOST_SPECULATIVE_TOKENS}, got {count!r}."
        )
    return count


def _num_known(view: Checkpoint) -> int:
    """Tokens that the heads know."""
    size, vocab_size = view.metadata.get("truncated_vocab_size"), view.metadata["vocab_size"]
    if size is None:
        return int(vocab_size)
    if type(size) is not int or not 0 < size <= vocab_size:
        raise BadCheckpoint(
            f"{view.path}: truncated_vocab_size of its config.json must be from 1 to {vocab_size}, got {size!r}."
        )
    return size


def _check(view: Checkpoint, width: int) -> None:
    tensors, said, vocab_size, num_known = view.tensors, view.metadata, view.metadata["vocab_size"], _num_known(view)
    first = tensors.get("lm_heads.0.weight")
    num_rows = num_known if first is not None and first.shape[0] == num_known else vocab_size
    if first is not None and tuple(first.shape) != (num_rows, width):
        raise BadCheckpoint(
            f"{view.path} has heads of {' times '.join(map(str, first.shape))} (vocabulary and hidden size); the model "
            f"that they are to draft for has {vocab_size} times {width}."
        )
    heads, blocks = range(said["num_heads"]), range(said["num_hidden_layers"])
    names = [f"blocks.{head}.layers.{block}" for head in heads for block in blocks]
    expected: dict[str, tuple[int, ...]] = {f"{name}.weight": (width, width) for name in names}
    expected |= {f"lm_heads.{0 if said['original_lm_head'] else head}.weight": (num_rows, width) for head in heads}
    if num_known < vocab_size:
        expected[_MAP] = (num_known,)
    known = expected | {f"{name}.bias": (width,) for name in names}
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in (*known, _MAP) and not _is_further(name, len(heads))]
    misshaped = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in known.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    refuse_tensors(str(view.path), missing, extra, misshaped)


def _is_further(name: str, num_heads: int) -> bool:
    """Of a head behind those that config.json counts."""
    named = _OF_A_HEAD.fullmatch(name)
    return named is not None and int(named[1]) >= num_heads


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """places_N: int32: the target's ids of the tokens that it knows, of vocab_size; None: it knows all."""

    blocks: tuple[Linear, ...]
    head: Weight
    vocab_size: int
    places_N: np.ndarray | None

    def forward(self, ops: ForwardOps, batch: Any, states_SD: np.ndarray) -> Array:
        """Logits [S, V] of a batch that has a token and a row of logits for each sequence. states_SD: float32, of at
        least as many rows."""
        x_SD = ops.load_rows(states_SD, batch.tokens_T)
        for block in self.blocks:
            y_SD = ops.linear(x_SD, block.weight)
            y_SD = y_SD if block.bias is None else ops.add_bias(y_SD, block.bias)
            x_SD = ops.add(x_SD, ops.silu(y_SD))
        logits_SN = ops.linear(ops.gather_rows(x_SD, batch.logit_rows_L), self.head)
        if self.places_N is None:
            return logits_SN
        return ops.spread_columns(logits_SN, self.places_N, self.vocab_size, float(NEVER))


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    heads: tuple[MedusaHead, ...]
    width: int
    vocab_size: int
    num_bytes: int


def load_medusa(checkpoint: Checkpoint, ops: Ops, *, quantization: str | None = None) -> MedusaHeads:
    """Of what open_medusa gave. quantization: as of a model (weights.load_weights). Raises BadCheckpoint."""
    tensors, said, num_bytes, vocab_size = checkpoint.tensors, checkpoint.metadata, 0, checkpoint.metadata["vocab_size"]
    places_N = token_places(checkpoint, _MAP, vocab_size) if _num_known(checkpoint) < vocab_size else None

    def pack(name: str, quantization: str | None, rows: np.ndarray | None = None) -> Weight:
        nonlocal num_bytes
        raw = as_run(tensors[name], ops, quantization)
        if rows is not None and raw.num_rows > len(rows):
            data = raw.data.reshape(raw.num_rows, -1)[rows].reshape(-1)
            raw = replace(raw, num_rows=len(rows), data=data)
        weight = ops.pack([raw])
        num_bytes += weight.num_bytes
        return weight

    def linear(name: str) -> Linear:
        nonlocal num_bytes
        weight, bias = pack(f"{name}.weight", quantization), tensors.get(f"{name}.bias")
        if bias is None:
            return Linear(weight, None)
        values = dequantise(bias.kind, bias.data, bias.num_values)
        num_bytes += values.nbytes
        return Linear(weight, ops.vector(values))

    ends, heads, shared = quantization_of_ends(quantization), [], None
    for number in range(said["num_heads"]):
        if shared is None or not said["original_lm_head"]:
            shared = pack(f"lm_heads.{number}.weight", ends, places_N)
        blocks = tuple(linear(f"blocks.{number}.layers.{block}") for block in range(said["num_hidden_layers"]))
        heads.append(MedusaHead(blocks, shared, vocab_size, places_N))
    assert shared is not None
    return MedusaHeads(tuple(heads), shared.num_cols, vocab_size, num_bytes)
