"""Greedy answers to prompts of published data sets, recorded once for `draft_study.py`, which asks what other ways to
draft would gain on them.

    python scripts/draft_answers.py smollm2 PROMPTS --out answers.json
    python scripts/draft_answers.py coder-1.5b.gguf PROMPTS --num-prompts 4 --drafter coder-0.5b.gguf --out pair.json

PROMPTS is a folder with HumanEval, GSM8K, MT-bench and Spec-Bench (SOURCES). Answers that repeat themselves are left
out, as in `tokenmill bench speculation`. With --drafter, what that model takes for likely at each position of an answer
is recorded, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenmill import LLM, SamplingParams
from tokenmill.bench.speculation import is_loop, read_messages
from tokenmill.cli.bench.engine import Answerer

NUM_TOPS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """Prompts made of the rows of a file; what each conversation goes on with."""

    file: str
    template: str
    where: str | None = None
    follow_ups: tuple[str, ...] = ()


_CODE = "humaneval.jsonl.gz"
SOURCES = {
    "rewrite code": Source(_CODE, "Rewrite this function with type hints:\n\n{prompt}{canonical_solution}"),
    "write code": Source(_CODE, "Complete this function:\n\n{prompt}"),
    "GSM8K": Source("gsm8k_test.jsonl", "{question}"),
    "retrieved passages": Source("spec_bench.jsonl", "{turns[0]}", "category=rag"),
    "MT-bench": Source("mt_bench.jsonl", "{turns[0]}"),
    "agent": Source(
        _CODE,
        "Add type hints to this function. Answer with the code alone.\n\n{prompt}{canonical_solution}",
        follow_ups=("Add a docstring to it.", "Handle empty input first.", "Rename it to solve."),
    ),
}


@dataclass(slots=True)
class Answer:
    """Tokens. tops: at each position of the answer, the tokens that the drafter takes for the likeliest to be there,
    and their log probabilities, the likeliest first."""

    prompt: list[int]
    answer: list[int]
    tops: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(slots=True)
class Recorded:
    """answers: by source, in the order in which they were given."""

    vocab_size: int
    max_tokens: int
    answers: dict[str, list[Answer]] = field(default_factory=dict)


def load(path: Path) -> Recorded:
    found = json.loads(path.read_text())
    answers = {name: [Answer(**each) for each in those] for name, those in found["answers"].items()}
    return Recorded(found["vocab_size"], found["max_tokens"], answers)


def ask(llm: LLM, folder: Path, source: Source, num_prompts: int, max_tokens: int) -> Iterator[Answer]:
    """Those that do not repeat themselves. A conversation is a prompt for each turn, with the answers so far in it."""
    answerer = Answerer(llm, 0.0)
    firsts = read_messages(folder / source.file, source.template, source.where)[:num_prompts]
    said = [[{"role": "user", "content": first}] for first in firsts]
    turns = []
    for follow_up in (*source.follow_ups, None):
        prompts = [answerer.encode(one) for one in said]
        given = answerer.answer(prompts, max_tokens, "", ignore_eos=False)
        turns.append([Answer(list(p), list(a)) for p, a in zip(prompts, given.tokens, strict=True)])
        for one, text in zip(said, given.texts, strict=True):
            one += [{"role": "assistant", "content": text}, {"role": "user", "content": follow_up or ""}]
    for conversation in zip(*turns, strict=True):
        yield from (each for each in conversation if not is_loop(each.answer))


def add_tops(llm: LLM, answers: list[Answer]) -> None:
    """What the model takes for likely where the answers are."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=NUM_TOPS)
    for each in answers:
        (output,) = llm.generate([each.prompt + each.answer], sampling)
        scores = output.prompt_logprobs
        assert scores is not None and len(scores) == len(each.prompt + each.answer) - 1
        each.tops = [list(score.top[:NUM_TOPS]) for score in scores[-len(each.answer) :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sources", default=",".join(SOURCES), help="by commas (default: all)")
    parser.add_argument("--num-prompts", type=int, default=16, help="of each source, a quarter of conversations")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--drafter", help="a smaller model with the same tokenizer")
    args = parser.parse_args()
    options = {"max_model_len": args.max_model_len, "kv_cache_memory_bytes": "1GiB"}
    with LLM(args.model, **options) as llm:
        recorded = Recorded(llm.ready.vocab_size, args.max_tokens)
        for name in args.sources.split(","):
            source = SOURCES[name]
            num_prompts = -(-args.num_prompts // 4) if source.follow_ups else args.num_prompts
            recorded.answers[name] = list(ask(llm, args.prompts, source, num_prompts, args.max_tokens))
            print(name, len(recorded.answers[name]), "answers", flush=True)
            args.out.write_text(json.dumps(asdict(recorded)))
    if args.drafter:
        with LLM(args.drafter, **options) as llm:
            for name, answers in recorded.answers.items():
                add_tops(llm, answers)
                print(name, "drafted", flush=True)
        args.out.write_text(json.dumps(asdict(recorded)))


if __name__ == "__main__":
    main()
