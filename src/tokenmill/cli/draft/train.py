"""`draft train MODEL --data FILE... --out PATH`: an EAGLE-3 head for a model (draft/train.py), on what it answers.

Answers, states and training each go on where they were, if the command is called again after a kill.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...bench.load.options import positive
from ...core.errors import ConfigError
from ...core.request import SamplingParams
from ...core.units import format_bytes, visible
from ...draft.target import LONGEST, Rows, Sample, SampleFile, Target
from ...draft.texts import JSON_LINES, read_texts
from ...formats.checkpoint import Checkpoint, open_checkpoint, weights_digest
from ...formats.digest import write_atomically
from ...formats.hub import default_cache_dir, resolve_model
from ...llm.llm import LLM
from ...models.config import config_from_checkpoint
from ...node.resolve import EngineSettings
from ...ops.select import select_ops
from ...text.files import fill_template, read_jsonl
from ..models import progress_bar
from ..options import engine_options

MINUTES = 35.0
MAX_TOKENS = 256
DRAFT_VOCAB_SIZE = 8192
TTT_STEPS = 3
_ASKED_TOGETHER = 64
_ANSWERS, _STATES = 1 / 3, 1 / 2
"""Of the time, when the answers are to be there, and the states too."""
_KV_BYTES = "1GiB"


def add_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--data",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines, of which each row is a message that the model answers, and texts that it reads; .gz, too",
    )
    train.add_argument(
        "--template",
        default="{prompt}",
        metavar="TEXT",
        help="the message made of a row, in Python's format, such as '{turns[0]}'; \\n is a line break (default:"
        " {prompt})",
    )
    train.add_argument("--out", "-o", type=Path, required=True, metavar="PATH", help="the folder to write")
    train.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="N", help=f"how long it all takes (default: {MINUTES:g})"
    )
    train.add_argument(
        "--draft-vocab-size",
        type=positive,
        default=DRAFT_VOCAB_SIZE,
        metavar="N",
        help=f"tokens that can be drafted: the most frequent ones (default: {DRAFT_VOCAB_SIZE})",
    )
    train.add_argument(
        "--ttt-steps",
        type=positive,
        default=TTT_STEPS,
        metavar="N",
        help=f"steps that it is trained to draft one after the other (default: {TTT_STEPS})",
    )
    train.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the answers (default: 0)")
    train.add_argument(
        "--max-tokens", type=positive, default=MAX_TOKENS, metavar="N", help=f"of an answer (default: {MAX_TOKENS})"
    )


def train(args: argparse.Namespace) -> int:
    out: Path = args.out
    _check(args)
    import torch

    from ...draft.eagle3 import speculators_config, write_head
    from ...draft.train import Plan, trainer_of

    with progress_bar(f"fetching {args.model}") as progress:
        path = resolve_model(args.model, progress=progress).path
    folder = out.with_name(f"{out.name}.work")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}.", param="out") from None
    _same_settings(folder, path, args)
    spent = _Spent(folder / "spent")
    checkpoint = open_checkpoint(path)
    longest = min(LONGEST, config_from_checkpoint(checkpoint).max_context)
    settings, samples = _answer(args, path, longest, SampleFile(folder / "answers.jsonl"), spent)
    rows = _read_states(args, checkpoint, settings, samples, folder, spent)
    seconds = folder / "seconds"
    if not seconds.exists():
        write_atomically(seconds, repr(max(1.0, 60 * args.minutes - spent.seconds())))
    torch.set_num_threads(settings.threads)
    plan = Plan(float(seconds.read_text()), args.ttt_steps, args.draft_vocab_size)
    trainer = trainer_of(checkpoint, samples, rows.read(), plan, folder)
    acceptance = trainer.train(_tell)
    config = speculators_config(trainer.shape, args.model, checkpoint.metadata.get("architectures", []), args.ttt_steps)
    try:
        write_head(out, config, trainer.tensors())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}.", param="out") from None
    shutil.rmtree(folder)
    size = format_bytes(sum(file.stat().st_size for file in out.iterdir()))
    print(f"{visible(str(out))}: {size}, held out: {acceptance}")
    return 0


def _tell(line: str) -> None:
    print(f"tokenmill: {line}", file=sys.stderr, flush=True)


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("draft train takes torch, which is not installed: install tokenmill[torch].", param="command")
    if args.out.exists():
        raise ConfigError(f"--out {args.out} is there already.", param="out")
    if not args.minutes > 0:
        raise ConfigError(f"--minutes must be above 0, got {args.minutes:g}.", param="minutes")
    if not 0 <= args.temperature <= 2:
        raise ConfigError(f"--temperature must be from 0 to 2, got {args.temperature:g}.", param="temperature")
    for path in args.data:
        if not path.exists():
            raise ConfigError(f"--data {path} is not there.", param="data")


def _same_settings(folder: Path, path: Path, args: argparse.Namespace) -> None:
    """What an earlier call left in the folder is of use for the same wishes alone. Raises ConfigError."""
    names = ("template", "minutes", "draft_vocab_size", "ttt_steps", "temperature", "max_tokens")
    wishes = {name: getattr(args, name) for name in names} | {"data": [str(each.absolute()) for each in args.data]}
    engine = {name: value for name, value in asdict(engine_options(args)).items() if name in ("quantization",)}
    digest = weights_digest(path, default_cache_dir())
    said = hashlib.sha256(json.dumps([digest, wishes, engine]).encode()).hexdigest()
    kept = folder / "settings"
    if kept.exists() and kept.read_text() != said:
        raise ConfigError(
            f"{folder} is of a training that was asked for otherwise: remove it, or ask as before.", param="out"
        )
    write_atomically(kept, said)


class _Spent:
    """Seconds that were used so far, of earlier calls too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before_s = float(path.read_text()) if path.exists() else 0.0
        self._since_s = time.monotonic()

    def seconds(self) -> float:
        return self._before_s + time.monotonic() - self._since_s

    def save(self) -> None:
        write_atomically(self._path, repr(self.seconds()))


def _answer(
    args: argparse.Namespace, path: Path, longest: int, answers: SampleFile, spent: _Spent
) -> tuple[EngineSettings, list[Sample]]:
    """Have the model answer what it has not answered yet, as far as there is time; the texts come behind."""
    asked = {name: value for name, value in asdict(engine_options(args)).items() if value is not None}
    needed = {"max_model_len": longest, "max_num_seqs": _ASKED_TOGETHER, "kv_cache_memory_bytes": _KV_BYTES}
    with LLM(str(path), **{**needed, **asked}) as llm:
        prompts, texts = _read_data(args, llm, longest)
        while len(answers.samples) < len(prompts) and spent.seconds() < _ANSWERS * 60 * args.minutes:
            start = len(answers.samples)
            answers.add(_answered(llm, args, prompts[start : start + _ASKED_TOGETHER], start))
            spent.save()
            _tell(f"{len(answers.samples)} of {len(prompts)} prompts are answered, {spent.seconds() / 60:.1f} min")
        spent.save()
        return llm.settings, answers.samples + [Sample(tokens, 0) for tokens in texts]


def _read_data(args: argparse.Namespace, llm: LLM, longest: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of what is to be answered, in an order that mixes files, and of texts. Raises ConfigError."""
    room = min(longest, llm.settings.config.max_model_len) - args.max_tokens
    prompts, texts = [], []
    for path in args.data:
        if path.name.removesuffix(".gz").endswith(JSON_LINES):
            prompts += [_prompt(llm, fill_template(args.template, row)) for row in read_jsonl(path)]
        else:
            for tokens in (llm.encode(piece) for text in read_texts([path], "") for piece in text):
                texts += [tokens[start : start + longest] for start in range(0, len(tokens), longest)]
    few = [prompt for prompt in prompts if len(prompt) <= room]
    if len(few) < len(prompts):
        _tell(f"{len(prompts) - len(few)} prompts have more than {room} tokens and are left out")
    random.Random(0).shuffle(few)
    texts = [tokens for tokens in texts if len(tokens) > 1]
    if not few and not texts:
        raise ConfigError("--data has nothing to learn from.", param="data")
    return few, texts


def _prompt(llm: LLM, message: str) -> list[int]:
    return llm.encode(message) if llm.text.chat is None else llm.encode_chat([{"role": "user", "content": message}])


def _answered(llm: LLM, args: argparse.Namespace, prompts: Sequence[list[int]], first: int) -> list[Sample]:
    sampling = [
        SamplingParams(temperature=args.temperature, seed=first + number, max_tokens=args.max_tokens)
        for number in range(len(prompts))
    ]
    outputs = llm.generate(list(prompts), sampling)
    return [
        Sample([*prompt, *output.outputs[0].token_ids], len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _read_states(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    settings: EngineSettings,
    samples: Sequence[Sample],
    folder: Path,
    spent: _Spent,
) -> Rows:
    """Of the samples, as many as there is time for."""
    spec = settings.spec
    ops = select_ops(settings.backend, settings.threads)
    target = Target(checkpoint, ops, kv_dtype=spec.kv_dtype, quantization=spec.quantization)
    rows = Rows(folder / "rows", target.config.width, samples)
    try:
        for number in range(rows.num_samples, len(samples)):
            if rows.num_samples and spent.seconds() >= _STATES * 60 * args.minutes:
                break
            rows.add(target.read(samples[number]))
            if number % _ASKED_TOGETHER == 0:
                spent.save()
    finally:
        target.close()
    spent.save()
    _tell(f"states of {rows.num_samples} of {len(samples)} texts are there, {spent.seconds() / 60:.1f} min")
    return rows
