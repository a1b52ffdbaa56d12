"""`bench speculation`: rows become prompts, both engines take turns, and another answer with drafts is an error."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench.peer.llama_server import LlamaServer
from tokenmill.bench.speculation import (
    CHOSEN,
    NONE,
    PLAIN,
    REPEATING,
    Asked,
    Given,
    add_arguments,
    best_fixed,
    by_quarter,
    compare,
    is_loop,
    ratios,
    read_messages,
    run,
    to_tables,
)
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
    """Says the tokens of each prompt backwards, so many a second, after half a second for the first. wrong: the first
    token of a prompt that it answers otherwise."""

    vocab_size = 1000

    def __init__(self, rate: float, accepted: int = 0, wrong: int | None = None, name: str = "") -> None:
        self.rate, self.accepted, self.wrong, self.name = rate, accepted, wrong, name
        self.salts: list[str] = []
        self.is_closed = False

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [ord(letter) for message in messages for letter in message["role"][0] + message["content"]]

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "", *, ignore_eos: bool = False
    ) -> Given:
        self.salts.append(salt)
        tokens = [[0] if prompt[0] == self.wrong else list(prompt)[::-1] for prompt in prompts]
        decode_s = sum(len(each) - 1 for each in tokens) / self.rate
        texts = ["".join(map(chr, each)) for each in tokens]
        return Given(decode_s + 0.5, decode_s, tokens, texts, 2 * self.accepted, self.accepted)

    def close(self) -> None:
        self.is_closed = True


def test_answers_that_repeat_themselves_are_counted_apart() -> None:
    engines = {NONE: Scripted(100.0), CHOSEN: Scripted(200.0, accepted=2)}
    asked = Asked([[1, 2, 3, 4], [5, 6, 7, 8], [9] * 40], num_repeats=3)
    outcome = compare(engines, [], asked, 1)
    plain, chosen = (outcome.answers[PLAIN][name] for name in (NONE, CHOSEN))
    assert ratios(chosen.decode_speeds, plain.decode_speeds) == [pytest.approx(2.0)] * 3
    assert plain.speeds == [pytest.approx(8 / 1.06)] * 3 and chosen.speeds == [pytest.approx(8 / 1.03)] * 3
    assert plain.decode_speeds == [pytest.approx(100.0)] * 3, "without the half second of a prompt"
    assert (chosen.num_answers, chosen.num_tokens, outcome.answers[REPEATING][NONE].num_tokens) == (2, 8, 40)
    assert (chosen.accepted, chosen.drafted) == (4, 8) and chosen.tokens_a_row == 2.0
    assert [table.row_count for table in to_tables([outcome])] == [2, 2]
    assert engines[NONE].salts == engines[CHOSEN].salts and len(set(engines[NONE].salts)) == 4, "and one to warm up"
    assert compare(engines, [], replace(asked, num_repeats=1), 2).answers[PLAIN][NONE].num_answers == 2


def test_a_long_run_is_told_by_quarters() -> None:
    """A drafter that is right in the second half alone: the quarters tell, and few groups have none."""

    class Learning(Scripted):
        def answer(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> Given:
            self.accepted = 2 if prompts[0][0] > 4 else 0
            return super().answer(prompts, *args, **options)

    conversations = [[first, 1, 2, 3] for first in range(1, 10)]
    engines = {NONE: Scripted(1.0), CHOSEN: Learning(1.0)}
    outcome = compare(engines, [], Asked(conversations, num_repeats=2), 1)
    assert outcome.answers[PLAIN][CHOSEN].quarters == [1.0, 1.0, 2.0, 2.0], "of the last repeat: 2, 2, 2 and 3 answers"
    line = "1 at a time, plain, by quarter of the run: chosen 1.00, 1.00, 2.00, 2.00 tokens a row"
    assert list(by_quarter([outcome])) == [line], "nothing is told of what drafts nothing"
    few = compare(engines, [], Asked(conversations[4:7], num_repeats=1), 1)
    assert few.answers[PLAIN][CHOSEN].accepted and list(by_quarter([few])) == []


def test_a_conversation_goes_on_with_what_was_answered() -> None:
    seen: list[list[int]] = []

    class Noting(Scripted):
        def answer(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> Given:
            seen.extend(map(list, prompts))
            return super().answer(prompts, *args, **options)

    engines = {NONE: Noting(1.0), CHOSEN: Scripted(1.0)}
    outcome = compare(engines, [], Asked(["ab"], ["c"], num_repeats=1), 1)
    assert ["".join(map(chr, each)) for each in seen[2:]] == ["uab", "uababauuc"], "after the run that warms up"
    assert outcome.answers[PLAIN][NONE].num_answers == 2


def test_another_answer_with_drafts_is_an_error_and_one_of_a_peer_is_none() -> None:
    engines, asked = {NONE: Scripted(1.0), CHOSEN: Scripted(1.0, wrong=5)}, Asked([[1, 2], [5, 6]], num_repeats=1)
    with pytest.raises(TokenmillError, match="prompt 1 or one after it is another with drafts"):
        compare(engines, [], asked, 1)
    peer = Scripted(4.0, wrong=5, name="other")
    answers = compare({NONE: Scripted(1.0)}, [peer], asked, 1).answers[PLAIN]
    assert list(answers) == [NONE, "other"] and (answers["other"].num_tokens, answers[NONE].num_tokens) == (3, 4)


def test_the_best_fixed_number_may_be_none() -> None:
    asked = Asked([[1, 2, 3, 4]], num_repeats=3)
    for rate, best, ratio in ((100.0, "8", "0.900"), (400.0, NONE, "0.450")):
        engines = {NONE: Scripted(rate), CHOSEN: Scripted(180.0), "1": Scripted(150.0), "8": Scripted(200.0)}
        (line,) = best_fixed([compare(engines, [], asked, 1)])
        assert f"chosen decodes at {ratio}" in line and line.endswith(f"best fixed number, {best}")


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def test_a_run_tells_all_engines_and_closes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Scripted] = []
    asked_for: list[Any] = []

    def make(drafting: Any) -> Scripted:
        asked_for.append(drafting)
        made.append(Scripted(100.0))
        return made[-1]

    def make_peer(flags: str) -> Scripted:
        made.append(Scripted(50.0, name=f"llama.cpp {flags}"))
        return made[-1]

    flags = ("--num-prompts", "2", "--repeats", "2", "--fixed-drafts", "1,4", "--json", str(tmp_path / "found.json"))
    peers = ("--peer-llama-server", "server", "--peer-flags=--spec-type ngram-mod", "--peer-flags=")
    assert run(arguments(*flags, *peers), make, make_peer) == 0
    fixed = [{"num_speculative_tokens": num, "adaptive": False} for num in (1, 4)]
    assert asked_for == [None, {}, *fixed] and len(made) == 6 and all(each.is_closed for each in made)
    found = json.loads((tmp_path / "found.json").read_text())
    names = [NONE, CHOSEN, "1", "4", "llama.cpp --spec-type ngram-mod", "llama.cpp "]
    assert list(found["outcomes"][0]["answers"][PLAIN]) == names
    assert "the best fixed number" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--follow-up", "more"), "random tokens say nothing"),
        (("--peer-flags=-fa",), "are those of --peer-llama-server"),
    ],
)
def test_flags_that_need_others(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(arguments(*flags), lambda drafting: Scripted(1.0), lambda flags: Scripted(1.0))
    with pytest.raises(SystemExit):
        arguments("--fixed-drafts", "1,65")


SERVER = """#!{python}
import http.server, json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def say(self, body):
        data = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self): self.say({{}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        drafts = {{"draft_n": 6, "draft_n_accepted": 3}} if flags.get("--spec-type") else {{}}
        self.say({{"tokens": asked["prompt"][::-1][: asked["n_predict"]], "content": flags["-m"],
                  "timings": {{"predicted_ms": 250.0, **drafts}}}})
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def test_a_server_of_llama_cpp_is_asked_over_http(tmp_path: Path) -> None:
    """Its clock and its counts are taken, those of drafts where it has any."""
    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable))
    options = {"threads": 2, "streams": 2, "max_tokens": 64, "temperature": 0.0}
    with pytest.raises(ConfigError, match="is no program"):
        LlamaServer(program, "", Path("m.gguf"), **options)  # type: ignore[arg-type]
    program.chmod(0o700)
    for flags, counts in (("", (0, 0)), ("--spec-type ngram-mod", (12, 6))):
        server = LlamaServer(program, flags, Path("m.gguf"), **options)  # type: ignore[arg-type]
        try:
            given = server.answer([[1, 2, 3], [4, 5]], 2, ignore_eos=True)
        finally:
            server.close()
        assert server.name == f"llama.cpp {flags}".strip() and given.seconds > 0
        assert (given.tokens, given.texts, given.decode_s) == ([[3, 2], [5, 4]], ["m.gguf"] * 2, 0.5)
        assert (given.drafted, given.accepted) == counts


def test_a_loop_is_a_long_run_three_times() -> None:
    assert is_loop(list(range(16)) * 3) and is_loop([7] * 18)
    assert not is_loop(list(range(16)) * 2) and not is_loop([7] * 17)
