"""What a head learns from: texts as the model that it is to draft for reads them, kept in files of a folder.

The model reads each text once, and of each token are kept the hidden states that the head is given, and the likeliest
tokens behind it. Files only grow, so that a process that was killed in between goes on behind the last whole text.

    T tokens of a text  D width  K likeliest tokens  A layers whose states are kept
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..models.config import ModelConfig
from ..models.decoder import AuxHiddenStates
from ..models.eagle3 import usual_aux_layers
from ..models.loader import load_model
from ..models.repack import as_matrix, raw_matrix
from ..models.tensor_names import global_names
from ..ops.api import Ops, RawTensor, StepBatch, StepLimits
from ..ops.reference_weights import dequantise as dequantise_raw

LIKELIEST = 32
"""K. What is left of the probability is little, and would take most of the memory."""
LONGEST = 1024
"""Tokens of a text, at most."""
_STEP = 256
"""Tokens that the model computes at a time."""
_RUN = 128
"""Tokens of the vocabulary of which the likeliest one is found first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A text's tokens. start: the first of them that is to be learned; those before it are there to be looked at."""

    tokens: list[int]
    start: int


class SampleFile:
    """Samples on disk, in the order in which they came; a line that a kill cut short counts as not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
        self.samples = [Sample(*json.loads(line)) for line in data[:whole].splitlines()]

    def add(self, samples: Sequence[Sample]) -> None:
        with open(self._path, "a", encoding="ascii") as file:
            file.writelines(json.dumps([sample.tokens, sample.start]) + "\n" for sample in samples)
        self.samples += samples


def row_type(width: int) -> np.dtype:
    """Of what is kept of a token: bfloat16 states [A * D]; ids and probabilities of the tokens behind it [K]."""
    return np.dtype(
        [("aux", "<u2", (3 * width,)), ("ids", "<i4", (LIKELIEST,)), ("probabilities", "<f2", (LIKELIEST,))]
    )


class Rows:
    """What is kept of the tokens of samples, one after the other."""

    def __init__(self, path: Path, width: int, samples: Sequence[Sample]) -> None:
        self._path, self._type = path, row_type(width)
        path.touch()
        self._ends = np.cumsum([len(sample.tokens) for sample in samples], dtype=np.int64)
        num_rows = path.stat().st_size // self._type.itemsize
        self.num_samples = int(np.searchsorted(self._ends, num_rows, "right"))
        os.truncate(path, self._start(self.num_samples) * self._type.itemsize)

    def _start(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    def add(self, rows_T: np.ndarray) -> None:
        """Of the next sample."""
        with open(self._path, "ab") as file:
            file.write(rows_T.tobytes())
        self.num_samples += 1
        assert self._path.stat().st_size == self._start(self.num_samples) * self._type.itemsize, len(rows_T)

    def read(self) -> list[np.ndarray]:
        """Of each sample, mapped."""
        rows = np.memmap(self._path, self._type, "r")
        return [rows[self._start(number) : self._start(number + 1)] for number in range(self.num_samples)]


class Target:
    """The model that is drafted for, on kernels of its own. Close it to free them. Raises BadCheckpoint."""

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, *, kv_dtype: str = "f16", quantization: str | None = None
    ) -> None:
        model = load_model(checkpoint, ops, max_model_len=LONGEST, kv_dtype=kv_dtype, quantization=quantization)
        num_blocks = -(-LONGEST // model.kv_group.block_size)
        self.config = model.config
        self.layers = usual_aux_layers(model.config.num_layers)
        self._ops, self._pool = ops, ops.new_pool(model.kv_group, num_blocks)
        self._aux = AuxHiddenStates.of(model.config, _STEP, self.layers)
        self._table = np.arange(num_blocks, dtype=np.int32)[None]
        self._program = ops.compile(
            lambda recorder, batch: model.forward(recorder, self._pool.kv, batch, self._aux),
            StepLimits(_STEP, 1, num_blocks, _STEP),
        )

    def read(self, sample: Sample) -> np.ndarray:
        """Rows [T] of `row_type`. Before the sample's start there are states alone."""
        tokens = sample.tokens
        rows_T = np.zeros(len(tokens), row_type(self.config.width))
        for start in range(0, len(tokens), _STEP):
            end = min(start + _STEP, len(tokens))
            learned = range(max(start, sample.start), end)
            batch = StepBatch(
                tokens_T=np.array(tokens[start:end], np.int32),
                positions_T=np.arange(start, end, dtype=np.int32),
                row_starts_S1=np.array([0, end - start], np.int32),
                context_lens_S=np.array([end], np.int32),
                block_tables_SB=self._table,
                logit_rows_L=np.array(learned, np.int32) - np.int32(start),
            )
            logits_LV = self._program(batch)
            if learned:
                part = rows_T[learned.start : end]
                part["ids"], part["probabilities"] = _likeliest(logits_LV)
            states = [array[: end - start] for array in self._aux.arrays]
            rows_T["aux"][start:end] = to_bfloat16(np.concatenate(states, axis=1))
        return rows_T

    def close(self) -> None:
        self._ops.close()
        self._pool.close()


def _likeliest(logits_LV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and probabilities [L, K]; of a vocabulary that has fewer, the last ones have none. They are in the runs
    whose likeliest tokens are the likeliest ones, so that few need to be put in order."""
    (num_rows, vocab_size), rows_L1 = logits_LV.shape, np.arange(len(logits_LV))[:, None]
    most_L1 = logits_LV.max(axis=1, keepdims=True)
    sums_L1 = np.exp(logits_LV - most_L1).sum(axis=1, keepdims=True)
    padded = np.pad(logits_LV, ((0, 0), (0, -vocab_size % _RUN + _RUN * LIKELIEST)), constant_values=-np.inf)
    runs = padded.reshape(num_rows, -1, _RUN)
    best_LK = np.argpartition(runs.max(axis=2), -LIKELIEST, axis=1)[:, -LIKELIEST:]
    values = runs[rows_L1, best_LK].reshape(num_rows, -1)
    places_LK = np.argpartition(values, -LIKELIEST, axis=1)[:, -LIKELIEST:]
    ids_LK = best_LK[rows_L1, places_LK // _RUN] * _RUN + places_LK % _RUN
    return np.minimum(ids_LK, vocab_size - 1), np.exp(values[rows_L1, places_LK] - most_L1) / sums_L1


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to the nearest, of finite values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def embeddings(checkpoint: Checkpoint, config: ModelConfig, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The model's own embeddings of these tokens, [len(ids), D]."""
    return _rows(checkpoint, global_names(checkpoint.kind, config.family.names)["embed"], ids)


def head_rows(checkpoint: Checkpoint, config: ModelConfig, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """What its head makes these tokens' logits with, [len(ids), D], with what the final norm has as weight."""
    names = global_names(checkpoint.kind, config.family.names)
    rows = _rows(checkpoint, names["embed" if config.tied_embeddings else "head"], ids)
    if not config.family.norm_weight:
        return rows
    norm = checkpoint.tensors[f"{names['final_norm']}.weight"]
    return rows * (dequantise(norm.kind, norm.data, norm.num_values) + np.float32(config.family.norm_offset))


def _rows(checkpoint: Checkpoint, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    raw = raw_matrix(as_matrix(checkpoint.tensors[f"{name}.weight"]))
    chosen = raw.data.reshape(raw.num_rows, -1)[ids]
    return dequantise_raw(RawTensor(raw.kind, len(ids), raw.num_cols, chosen.reshape(-1)))
