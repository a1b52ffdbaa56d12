"""Puts the questions of `tasks` to a model and turns the answers into figures with their errors.

Knows the model only as a `Subject`, over HTTP or in this process: the same questions, the same greedy settings, so
that the two may be compared with one another too. Every result keeps one row per question, which is what makes paired
comparison possible later.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...core.errors import ConfigError
from ..stats import Z_95, ConfidenceInterval, clustered_mean, share_error, wilson
from .code import CodeLimits, probe, run_program
from .tasks import Question, Task, code_of, describe_file, read_text

BATCH = 64
"""Questions handed over at once; progress is told after each."""

_OUTPUT_CHARS = 2000
_CHARS_PER_TOKEN = 16
"""No ordinary text has more; bounds how much of a book is tokenised for a few windows."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    finish_reason: str


class Subject(Protocol):
    """A model under test. `facts` go into the result as they are."""

    facts: dict[str, Any]

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str], chat: bool) -> list[Completion]:
        """Greedy continuations of the prompts, or (chat) greedy answers to each as a user's message."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Natural-log probability of every token but the first of each sequence."""
        ...

    def tokenize(self, text: str, *, add_special: bool) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...

    def close(self) -> None: ...


def run_task(subject: Subject, task: Task, *, chat: bool, limits: CodeLimits | None = None) -> dict[str, Any]:
    """The result of a task of questions. Code runs only where `limits` are given."""
    assert task.kind != "code" or limits is not None, "code needs limits"
    extra: dict[str, Any] = {}
    if task.kind == "choose":
        items = _choose(subject, task)
    elif task.kind == "code":
        assert limits is not None
        extra["execution"] = {**asdict(limits), "held": list(probe(limits))}
        items = _code(subject, task, chat, limits)
    else:
        items = _generate(subject, task, chat)
    metrics = list(items[0]["right"])
    shares = {metric: _share([item["right"][metric] for item in items]) for metric in metrics}
    groups: dict[str, list[bool]] = {}
    for item in items:
        groups.setdefault(item["group"], []).append(item["right"][metrics[0]])
    return {
        "task": task.name,
        "kind": task.kind,
        "metric": metrics[0],
        **shares[metrics[0]],
        "other_metrics": {metric: shares[metric] for metric in metrics[1:]},
        "groups": {group: _share(right) for group, right in groups.items()} if len(groups) > 1 else {},
        "prompt": {
            "format": task.prompt_format,
            "num_shots": task.num_shots,
            "chat": chat and task.kind != "choose",
            "first": task.questions[0].prompt,
        },
        "decoding": {"temperature": 0, "max_tokens": task.max_tokens, "stop": list(task.stop)},
        "data": task.data,
        **extra,
        "items": items,
    }


def _share(right: Sequence[bool]) -> dict[str, Any]:
    num, num_right = len(right), sum(right)
    return {
        "value": num_right / num,
        "num_right": num_right,
        "num_items": num,
        "standard_error": share_error(num_right, num),
        "interval": asdict(wilson(num_right, num)),
    }


def _row(question: Question, right: dict[str, bool], **more: Any) -> dict[str, Any]:
    fixed = {"id": question.id, "group": question.group, "asked": question.digest, "right": right}
    return {**fixed, "target": question.target, **more}


def _generate(subject: Subject, task: Task, chat: bool) -> list[dict[str, Any]]:
    items = []
    for question, answer in _complete(subject, task, chat):
        right = {metric: judge(answer.text, question.target) for metric, judge in task.judges.items()}
        items.append(_row(question, right, output=answer.text[:_OUTPUT_CHARS], finish_reason=answer.finish_reason))
    return items


def _code(subject: Subject, task: Task, chat: bool, limits: CodeLimits) -> list[dict[str, Any]]:
    items = []
    for question, answer in _complete(subject, task, chat):
        before, after = question.program
        verdict = run_program(before + code_of(answer.text, chat) + after, limits)
        items.append(
            _row(
                question,
                {"pass@1": verdict.passed},
                output=answer.text[:_OUTPUT_CHARS],
                finish_reason=answer.finish_reason,
                status=verdict.status,
                detail=verdict.detail,
            )
        )
    return items


def _complete(subject: Subject, task: Task, chat: bool) -> Iterator[tuple[Question, Completion]]:
    for batch in _batches(task.questions, task.name):
        prompts = [question.prompt for question in batch]
        answers = subject.complete(prompts, max_tokens=task.max_tokens, stop=task.stop, chat=chat)
        yield from zip(batch, answers, strict=True)


def _choose(subject: Subject, task: Task) -> list[dict[str, Any]]:
    """The choice of the highest log-likelihood after the prompt, and of the highest per character. Prompt and choice
    are tokenised together and the choice is what lies past the prompt's own number of tokens."""
    items = []
    for batch in _batches(task.questions, task.name):
        starts = [len(subject.tokenize(question.prompt, add_special=True)) for question in batch]
        pairs = [(question.prompt, choice) for question in batch for choice in question.choices]
        wholes = [subject.tokenize(prompt + choice, add_special=True) for prompt, choice in pairs]
        scores = iter(subject.score(wholes))
        for question, start in zip(batch, starts, strict=True):
            # score[i] is of token i + 1.
            sums = [math.fsum(next(scores)[start - 1 :]) for _ in question.choices]
            lengths = [len(choice.strip()) for choice in question.choices]
            correct = [choice.strip() for choice in question.choices].index(question.target.strip())
            best = max(range(len(sums)), key=lambda i: sums[i])
            best_per_character = max(range(len(sums)), key=lambda i: sums[i] / lengths[i])
            right = {"likeliest": best == correct, "likeliest per character": best_per_character == correct}
            items.append(_row(question, right, output=question.choices[best].strip(), log_likelihoods=sums))
    return items


def run_perplexity(subject: Subject, path: Path, *, window: int, stride: int, limit: int | None) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of a text's tokens, in overlapping windows.

    Window i holds tokens [i * stride, i * stride + window), after the tokenizer's own leading special tokens (most have
    one or none). The first window scores all its tokens but the first; every other only those past the window before
    it, so each token is scored once, with at least window - stride tokens before it from the second window on. A last
    window shorter than the others is left out. `limit`: at most this many windows.
    """
    if not 1 <= stride < window:
        raise ConfigError(f"--stride must be at least 1 and below --window, got {stride} and {window}.", param="stride")
    text = read_text(path)
    most = None if limit is None else (window + stride * limit) * _CHARS_PER_TOKEN
    tokens = subject.tokenize(text[:most], add_special=False)
    head = _leading_special(subject)
    starts = [start for start in range(0, len(tokens) - window + 1, stride)][:limit]
    if not starts:
        raise ConfigError(f"{path} has {len(tokens)} tokens, less than one window of {window}.", param="window")
    sums: list[float] = []
    counts: list[int] = []
    for batch in _batches(starts, "perplexity"):
        scored_batch = subject.score([head + tokens[start : start + window] for start in batch])
        for start, scores in zip(batch, scored_batch, strict=True):
            # scores[i] is of token i + 1 of what was sent.
            new = 1 if start == 0 else window - stride
            scored = scores[len(head) + new - 1 :]
            sums.append(-math.fsum(scored))
            counts.append(len(scored))
    mean, error = clustered_mean(sums, counts)
    num_bytes = _num_bytes(subject, tokens[: starts[-1] + window])
    bounds = ConfidenceInterval(
        math.exp(mean - Z_95 * error), math.exp(mean + Z_95 * error), "normal, in log space, by window"
    )
    return {
        "task": "perplexity",
        "kind": "score",
        "metric": "perplexity per token",
        "value": math.exp(mean),
        "num_items": sum(counts),
        "standard_error": math.exp(mean) * error,
        "interval": asdict(bounds),
        "other_metrics": {
            "nats per token": {"value": mean, "standard_error": error},
            "bits per byte": {"value": math.fsum(sums) / math.log(2) / num_bytes, "num_bytes": num_bytes},
        },
        "groups": {},
        "prompt": {"window": window, "stride": stride, "num_windows": len(starts), "leading_special_tokens": head},
        "data": {**describe_file(path), "num_chars": len(text), "num_tokens_read": starts[-1] + window},
        "items": [
            {"id": str(start), "num_tokens": count, "nll": total}
            for start, count, total in zip(starts, counts, sums, strict=True)
        ],
    }


def _leading_special(subject: Subject) -> list[int]:
    """What the tokenizer itself puts before a text."""
    plain, whole = (subject.tokenize("a", add_special=add_special) for add_special in (False, True))
    num = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:num]


def _num_bytes(subject: Subject, tokens: Sequence[int]) -> int:
    """UTF-8 bytes of all tokens but the first. A character cut in two at either end counts as three bytes."""
    return len(subject.detokenize(tokens).encode()) - len(subject.detokenize(tokens[:1]).encode())


def _batches(items: Iterable[T], name: str) -> Iterator[list[T]]:
    """Batches of BATCH, telling progress on standard error."""
    all_items = list(items)
    source = iter(all_items)
    num_done = 0
    while batch := list(itertools.islice(source, BATCH)):
        yield batch
        num_done += len(batch)
        print(f"{name}: {num_done} of {len(all_items)}", file=sys.stderr)
