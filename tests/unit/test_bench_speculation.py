"""`bench speculation`: rows become prompts, both engines take turns, and another answer with drafts is an error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tokenmill.bench.speculation import Given, compare, is_loop, read_messages, to_table
from tokenmill.core.errors import ConfigError, TokenmillError

ROWS = [
    {"prompt": "def f(x):", "canonical_solution": " return {x}", "turns": ["a", "b"], "category": "rag"},
    {"prompt": "def g(x):", "canonical_solution": " return 1", "turns": ["c"], "category": "qa"},
]


def write_rows(folder: Path) -> Path:
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return path


def test_a_message_is_made_of_each_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    assert read_messages(path, "Rewrite:\\n{prompt}{canonical_solution}", None) == [
        "Rewrite:\ndef f(x): return {x}",
        "Rewrite:\ndef g(x): return 1",
    ]
    assert read_messages(path, "{turns[0]}", "category=qa") == ["c"]


@pytest.mark.parametrize(
    ("template", "where", "words"),
    [
        ("{question}", None, r"--template '\{question\}' does not fit a row: .*prompt, canonical_solution"),
        ("{turns[1]}", None, "does not fit"),
        ("{", None, "does not fit"),
        ("{prompt}", "category=math", "no rows that are asked for"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, template: str, where: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_messages(write_rows(tmp_path), template, where)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_messages(tmp_path / "none.jsonl", template, where)


class Scripted:
    """Says the tokens of each prompt backwards, so many a second."""

    vocab_size = 1000

    def __init__(self, rate: float, accepted: int = 0, wrong: int | None = None) -> None:
        self.rate, self.accepted, self.wrong = rate, accepted, wrong
        self.salts: list[str] = []

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str, *, ignore_eos: bool) -> Given:
        self.salts.append(salt)
        tokens = [[0] if prompt[0] == self.wrong else list(prompt)[::-1] for prompt in prompts]
        return Given(sum(map(len, tokens)) / self.rate, tokens, 2 * self.accepted, self.accepted)

    def close(self) -> None: ...


def test_answers_that_repeat_themselves_are_counted_apart() -> None:
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9] * 40]
    plain, drafting = Scripted(100.0), Scripted(200.0, accepted=2)
    outcome = compare(plain, drafting, prompts, 1, 16, 3, ignore_eos=False)
    assert outcome.plain.ratios == outcome.loops.ratios == [pytest.approx(2.0)] * 3
    assert (outcome.plain.num_groups, outcome.plain.num_tokens, outcome.loops.num_tokens) == (2, 8, 40)
    assert (outcome.plain.accepted, outcome.plain.drafted) == (4, 8) and outcome.plain.tokens_a_row == 2.0
    assert to_table([outcome]).row_count == 2
    assert plain.salts == drafting.salts and len(set(plain.salts)) == 4, "one for each repeat, and to warm up"
    assert compare(plain, drafting, prompts, 2, 16, 1, ignore_eos=False).plain.num_groups == 1


def test_another_answer_with_drafts_is_an_error() -> None:
    with pytest.raises(TokenmillError, match="is another with drafts"):
        compare(Scripted(1.0), Scripted(1.0, wrong=5), [[1, 2], [5, 6]], 1, 16, 1, ignore_eos=False)


def test_a_loop_is_a_long_run_three_times() -> None:
    assert is_loop(list(range(16)) * 3) and is_loop([7] * 18)
    assert not is_loop(list(range(16)) * 2) and not is_loop([7] * 17)
