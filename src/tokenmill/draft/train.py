"""Trains an EAGLE-3 head on what target.py kept, for so many seconds, and tells what it will be worth.

The loss of a position and step is the cross entropy between the target's likeliest tokens, those that are drafted, and
the head's, as EAGLE-3 has it: later steps weigh less. The learning rate follows the time that is over, up a short slope
and down a cosine, so that training ends when it should on any machine. What was done is saved now and then; whoever
calls again with the same folder goes on from there, and gets what a run without a break gets.

    B texts  T tokens  D width  K likeliest tokens  N positions  V drafted tokens
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils import clip_grad_norm_

from ..formats.checkpoint import Checkpoint
from ..models.config import config_from_checkpoint
from ..models.eagle3 import usual_aux_layers
from .eagle3 import HeadShape, new_weights, train_steps
from .target import Sample, embeddings, head_rows

HELD_OUT = 20
"""One sample of so many is not trained on."""
_BATCH_TOKENS = 1024
_LEARNING_RATE = 1e-3
_WARM_UP = 0.03
"""Of the time."""
_STEP_DECAY = 0.8
_LARGEST_GRADIENT = 1.0
_SORTED_TOGETHER = 64
"""Samples that are put in the order of their lengths, so that those of a batch are about as long."""
_SAVE_EVERY_S, _TELL_EVERY_S = 60.0, 30.0
_EVALUATIONS = 5


@dataclass(frozen=True, slots=True)
class Lessons:
    """What there is to learn. rows: of each sample, as Target.read gives them. embeds_UD: embeddings of the tokens that
    occur; places_V: where in it each token's is."""

    samples: Sequence[Sample]
    rows: Sequence[np.ndarray]
    embeds_UD: NDArray[np.float32]
    places_V: NDArray[np.int64]

    def choose(self, *, held_out: bool) -> list[int]:
        """Numbers of those that are trained on, or of the others."""
        return [number for number in range(len(self.rows)) if (number % HELD_OUT == HELD_OUT - 1) == held_out]


@dataclass(frozen=True, slots=True)
class Plan:
    """seconds: how long to train. num_drafts: steps that the head is trained to go. draft_vocab_size: tokens that can
    be drafted, at most."""

    seconds: float
    num_drafts: int = 3
    draft_vocab_size: int = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """On samples that were not trained on. right: of all positions the share whose first, first two, ... drafts are all
    what the text has."""

    right: tuple[float, ...]
    num_positions: int

    @property
    def tokens_a_step(self) -> float:
        """Expected where as many are drafted and all are verified: one, and the drafts before the first wrong one."""
        return 1 + sum(self.right)

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.3f}" for share in self.right)
        return (
            f"{self.tokens_a_step:.2f} tokens a step ({shares} of the drafts right, {self.num_positions:,} positions)"
        )


def choose_vocabulary(lessons: Lessons, most: int, vocab_size: int) -> NDArray[np.int64]:
    """The tokens to draft, in order: those that the target expects most often where something is to be learned."""
    mass_V = np.zeros(vocab_size)
    for number in lessons.choose(held_out=False):
        rows = lessons.rows[number][lessons.samples[number].start :]
        np.add.at(mass_V, rows["ids"].ravel(), rows["probabilities"].astype(np.float64).ravel())
    return np.sort(np.argsort(-mass_V, kind="stable")[:most])


@dataclass(frozen=True, slots=True)
class _Batch:
    """tokens_BT: padded with zeros, as the others are; lengths_B, starts_B: see Sample."""

    aux_BTA: Tensor
    embeds_BTD: Tensor
    tokens_BT: Tensor
    ids_BTK: Tensor
    probabilities_BTK: Tensor
    starts_B: Tensor
    lengths_B: Tensor

    def learned(self, step: int, ahead: int) -> Tensor:
        """bool [B, T]: positions from which a token is guessed in the step that is to be learned, where the text has
        `ahead` tokens more."""
        places = torch.arange(self.tokens_BT.shape[1])
        return (places + 1 + step >= self.starts_B[:, None]) & (places + ahead < self.lengths_B[:, None])


def trainer_of(
    checkpoint: Checkpoint,
    samples: Sequence[Sample],
    rows: Sequence[np.ndarray],
    plan: Plan,
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
) -> Trainer:
    """Of a head for the model of the checkpoint. rows: of the first of the samples. Others: see Trainer."""
    config = config_from_checkpoint(checkpoint)
    samples = samples[: len(rows)]
    used = np.unique(np.concatenate([np.array(sample.tokens, np.int64) for sample in samples]))
    places_V = np.zeros(config.vocab_size, np.int64)
    places_V[used] = np.arange(len(used))
    lessons = Lessons(samples, rows, embeddings(checkpoint, config, used), places_V)
    drafted = choose_vocabulary(lessons, plan.draft_vocab_size, config.vocab_size)
    shape = HeadShape.of(config, tuple(usual_aux_layers(config.num_layers)), len(drafted))
    return Trainer(lessons, shape, drafted, head_rows(checkpoint, config, drafted), plan, folder, clock)


class Trainer:
    """folder: where what was done is saved, and is taken from. clock: tells seconds, which only grow."""

    def __init__(
        self,
        lessons: Lessons,
        shape: HeadShape,
        drafted: NDArray[np.int64],
        head_rows_VD: NDArray[np.float32],
        plan: Plan,
        folder: Path,
        clock: Callable[[], float],
    ) -> None:
        self.shape = shape
        self._lessons, self._plan = lessons, plan
        self._path, self._clock = folder / "train.pt", clock
        self._embeds_UD = torch.from_numpy(lessons.embeds_UD)
        self._draft_ids = np.full(shape.vocab_size, -1, np.int64)
        self._draft_ids[drafted] = np.arange(len(drafted))
        self._drafted = torch.from_numpy(drafted)
        self._scale_A = torch.from_numpy(_spread(lessons))
        self.weights = new_weights(shape, torch.from_numpy(head_rows_VD), plan.seed)
        for each in self.weights.values():
            each.requires_grad_()
        self._optimizer = torch.optim.AdamW(self.weights.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
        self._is_bfloat16_fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        self._epoch = self._at = self._num_evaluations = 0
        self._spent_s = 0.0
        self.losses: list[float] = []
        if self._path.exists():
            self._load()

    def train(self, say: Callable[[str], None]) -> Acceptance:
        """Until the time is over. Tells `say` how it goes."""
        began_s = self._clock() - self._spent_s
        saved_s = told_s = self._spent_s
        told = len(self.losses)
        while self._spent_s < self._plan.seconds:
            batches = self._batches(self._epoch)
            while self._at < len(batches) and self._spent_s < self._plan.seconds:
                self.losses.append(self._learn(batches[self._at]))
                self._at += 1
                self._spent_s = self._clock() - began_s
                if self._spent_s - told_s >= _TELL_EVERY_S:
                    say(self._describe(told))
                    told, told_s = len(self.losses), self._spent_s
                if self._share() * _EVALUATIONS >= self._num_evaluations + 1:
                    self._num_evaluations += 1
                    say(f"held out: {self.evaluate()}")
                if self._spent_s - saved_s >= _SAVE_EVERY_S:
                    self._save()
                    saved_s = self._spent_s
            if self._at >= len(batches):
                self._epoch, self._at = self._epoch + 1, 0
        self._save()
        return self.evaluate()

    def evaluate(self) -> Acceptance:
        """Of samples that are held out, or of all where there are too few to hold any out."""
        num_drafts, count = self._plan.num_drafts, 0
        right = torch.zeros(num_drafts, dtype=torch.int64)
        for numbers in self._cut(self._lessons.choose(held_out=True) or self._lessons.choose(held_out=False)):
            batch = self._batch(numbers)
            asked_BT = batch.learned(0, num_drafts + 1)
            still_N = torch.ones(int(asked_BT.sum()), dtype=torch.bool)
            count += len(still_N)
            with torch.no_grad():
                for step, x_BTD in enumerate(self._steps(batch)):
                    guessed_N = self._drafted[linear(x_BTD[asked_BT], self.weights["lm_head.weight"]).argmax(-1)]
                    still_N = still_N & (guessed_N == torch.roll(batch.tokens_BT, -2 - step, 1)[asked_BT])
                    right[step] += still_N.sum()
        return Acceptance(tuple((right / max(count, 1)).tolist()), count)

    def tensors(self) -> dict[str, Tensor]:
        """As the format has them: bfloat16, with `fc` taking states as they are; d2t [V], what to add to the number of
        a drafted token for its id; t2d [vocab_size], whether a token is drafted."""
        kept = {name: each.detach() for name, each in self.weights.items()}
        kept["fc.weight"] = kept["fc.weight"] * self._scale_A
        is_drafted = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        is_drafted[self._drafted] = True
        named = {name: each.to(torch.bfloat16) for name, each in kept.items()}
        return named | {"d2t": self._drafted - torch.arange(len(self._drafted)), "t2d": is_drafted}

    def _share(self) -> float:
        return min(1.0, self._spent_s / self._plan.seconds)

    def _describe(self, since: int) -> str:
        losses = self.losses[since:]
        return (
            f"{self._spent_s / 60:.1f} of {self._plan.seconds / 60:.1f} min, epoch {self._epoch + 1}, step"
            f" {len(self.losses)}: loss {sum(losses) / len(losses):.3f}"
        )

    def _steps(self, batch: _Batch) -> Iterator[Tensor]:
        return train_steps(self.weights, self.shape, batch.aux_BTA, batch.embeds_BTD, self._plan.num_drafts)

    def _learn(self, numbers: Sequence[int]) -> float:
        batch, share = self._batch(numbers), self._share()
        rate = _LEARNING_RATE * min(1.0, (share + 1e-3) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))
        with torch.autocast("cpu", torch.bfloat16, enabled=self._is_bfloat16_fast):
            losses = [self._loss(batch, step, x) * _STEP_DECAY**step for step, x in enumerate(self._steps(batch))]
        loss = torch.stack(losses).sum()
        self._optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.weights.values(), _LARGEST_GRADIENT)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return float(loss.detach())

    def _loss(self, batch: _Batch, step: int, x_BTD: Tensor) -> Tensor:
        """The mean over positions: sum over k of p_k (log sum exp z - z_k), of the tokens that are drafted."""
        learned_BT = batch.learned(step, step + 1)
        ids_NK = torch.roll(batch.ids_BTK, -1 - step, 1)[learned_BT]
        p_NK = torch.roll(batch.probabilities_BTK, -1 - step, 1)[learned_BT] * (ids_NK >= 0)
        z_NV = linear(x_BTD[learned_BT], self.weights["lm_head.weight"]).float()
        z_NK = z_NV.gather(1, ids_NK.clamp(min=0))
        return (p_NK * (z_NV.logsumexp(-1, keepdim=True) - z_NK)).sum() / max(1, len(z_NV))

    def _batches(self, epoch: int) -> list[list[int]]:
        """Of all samples that are trained on, in an order that the epoch alone decides."""
        rng = np.random.default_rng([self._plan.seed, epoch])
        numbers = rng.permutation(self._lessons.choose(held_out=False)).tolist()
        batches = [
            batch
            for start in range(0, len(numbers), _SORTED_TOGETHER)
            for batch in self._cut(numbers[start : start + _SORTED_TOGETHER])
        ]
        return [batches[number] for number in rng.permutation(len(batches))]

    def _cut(self, numbers: Sequence[int]) -> list[list[int]]:
        """Into batches of about as many tokens, padding included."""
        batches: list[list[int]] = [[]]
        for number in sorted(numbers, key=lambda each: (len(self._lessons.rows[each]), each)):
            if batches[-1] and (len(batches[-1]) + 1) * len(self._lessons.rows[number]) > _BATCH_TOKENS:
                batches.append([])
            batches[-1].append(number)
        return [batch for batch in batches if batch]

    def _batch(self, numbers: Sequence[int]) -> _Batch:
        samples = [self._lessons.samples[number] for number in numbers]
        longest = max(len(sample.tokens) for sample in samples)
        rows_BT = np.zeros((len(samples), longest), self._lessons.rows[numbers[0]].dtype)
        tokens_BT = np.zeros((len(samples), longest), np.int64)
        for row, (number, sample) in enumerate(zip(numbers, samples, strict=True)):
            rows_BT[row, : len(sample.tokens)] = self._lessons.rows[number]
            tokens_BT[row, : len(sample.tokens)] = sample.tokens
        return _Batch(
            torch.from_numpy(_from_bfloat16(rows_BT["aux"])) * self._scale_A,
            self._embeds_UD[torch.from_numpy(self._lessons.places_V[tokens_BT])],
            torch.from_numpy(tokens_BT),
            torch.from_numpy(self._draft_ids[rows_BT["ids"]]),
            torch.from_numpy(rows_BT["probabilities"].astype(np.float32)),
            torch.tensor([sample.start for sample in samples]),
            torch.tensor([len(sample.tokens) for sample in samples]),
        )

    def _save(self) -> None:
        """Whole or not at all."""
        state: dict[str, Any] = {
            "weights": {name: each.detach() for name, each in self.weights.items()},
            "optimizer": self._optimizer.state_dict(),
            "epoch": self._epoch,
            "at": self._at,
            "evaluations": self._num_evaluations,
            "spent_s": self._spent_s,
            "losses": self.losses,
        }
        new = self._path.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, self._path)

    def _load(self) -> None:
        state: Mapping[str, Any] = torch.load(self._path, weights_only=True)
        with torch.no_grad():
            for name, each in self.weights.items():
                each.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._epoch, self._at, self._num_evaluations = state["epoch"], state["at"], state["evaluations"]
        self._spent_s, self.losses = state["spent_s"], state["losses"]


def _from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _spread(lessons: Lessons) -> NDArray[np.float32]:
    """What each channel of the states is multiplied by, so that its mean size is one: some are thousands of times as
    large as others. Of a few samples, without their first tokens, whose states are like no others."""
    chosen = [lessons.rows[number]["aux"][1:] for number in lessons.choose(held_out=False)[:_SORTED_TOGETHER]]
    sizes = np.mean(np.abs(_from_bfloat16(np.concatenate(chosen)).astype(np.float64)), axis=0)
    return (1 / (sizes + 1e-3 * sizes.mean() + 1e-12)).astype(np.float32)
