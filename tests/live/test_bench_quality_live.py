"""Quality measured on the served model: over HTTP as in process, and as lm-eval asks for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
from serving import Server

from tokenmill import LLM
from tokenmill.bench.quality.api import ApiSubject
from tokenmill.cli.bench.commands import LocalSubject
from tokenmill.cli.main import main

TEXT = (
    "The town lay where the river met the sea, and its people had built boats there for as long as anybody could say. "
    "In the spring the market filled with wool and salt, and in the autumn with apples from the orchards up the vale. "
) * 4


@pytest.fixture(scope="module")
def server(smollm2) -> Iterator[Server]:
    with Server("--kv-cache-memory-bytes", "200MiB") as server:
        yield server


@pytest.fixture(scope="module")
def subjects(server) -> Iterator[tuple[ApiSubject, LocalSubject]]:
    over_http = ApiSubject(server.url)
    in_process = LocalSubject(LLM("smollm2", kv_cache_memory_bytes=200 << 20))
    yield over_http, in_process
    over_http.close()
    in_process.close()


@pytest.mark.exact
def test_http_and_in_process_give_equal_answers_and_scores(subjects) -> None:
    """Texts equal and scores equal to the last bit, with different company in the batch."""
    prompts = ["The capital of France is", "1, 2, 3,", "Once upon a time"]
    for chat in (False, True):
        first, second = (each.complete(prompts, max_tokens=24, stop=["\n\n"], chat=chat) for each in subjects)
        assert first == second and all(answer.text for answer in first)
    tokens = subjects[0].tokenize(TEXT, add_special=True)
    assert tokens == subjects[1].tokenize(TEXT, add_special=True)
    assert subjects[0].detokenize(tokens) == subjects[1].detokenize(tokens) == TEXT
    pieces = [tokens[:40], tokens[10:90], tokens[3:5]]
    assert subjects[0].score(pieces) == subjects[1].score(pieces[::-1])[::-1]


def test_the_command_measures_a_server(server, tmp_path, capsys) -> None:
    """Perplexity and choices, with plausible figures: the text is ordinary English, the first choice absurd."""
    (tmp_path / "text.txt").write_text(TEXT)
    rows = [
        {"question": "What is the capital of France?", "choices": ["Carpet", "Paris"], "answer": "Paris"},
        {"question": "What colour is the sky on a clear day?", "choices": ["Blue", "Seventeen"], "answer": 0},
    ]
    (tmp_path / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.json"
    command = ["bench", "quality", "--url", server.url, "--task", f"perplexity={tmp_path / 'text.txt'}"]
    command += ["--window", "64", "--stride", "32", "--task", "choice", "--data", str(tmp_path), "--json", str(out)]
    assert main(command) == 0
    scored, chosen = json.loads(out.read_text())["tasks"]
    assert 1 < scored["value"] < 60 and scored["interval"]["low"] < scored["value"] < scored["interval"]["high"]
    assert chosen["value"] == 1.0
    assert main(["bench", "quality", "--compare", str(out), str(out)]) == 0
    assert capsys.readouterr().out.count("undecided") == 2


class LmEval:
    """The bodies that lm-eval's local-completions model sends, and how it reads the answers."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def loglikelihoods(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        body = {
            "model": "smollm2",
            "prompt": [context + continuation for context, continuation in pairs],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        status, answer = self.server.request("POST", "/v1/completions", body)
        assert status == 200, answer
        found = []
        for (context, _), choice in zip(
            pairs, sorted(json.loads(answer)["choices"], key=lambda c: c["index"]), strict=True
        ):
            values = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
            found.append((sum(values), is_greedy))
        return found

    def generate(self, prompts: list[list[int]], until: list[str]) -> list[str]:
        body = {
            "prompt": prompts,
            "model": "smollm2",
            "max_tokens": 32,
            "temperature": 0,
            "stop": until,
            "seed": 1234,
        }
        status, answer = self.server.request("POST", "/v1/completions", body)
        assert status == 200, answer
        return [choice["text"] for choice in sorted(json.loads(answer)["choices"], key=lambda c: c["index"])]


def test_lm_eval_request_shapes_work(server, subjects) -> None:
    """Batches of token ids with echo and logprobs, and batched generation with stops. A greedy continuation is called
    greedy, another is not, and the sums are those of our own scores."""
    lm_eval, subject = LmEval(server), subjects[0]
    contexts = [subject.tokenize(text, add_special=True) for text in ("The capital of France is", "One, two, three,")]
    texts = lm_eval.generate(contexts, ["\n\n", "Question:"])
    assert len(texts) == 2 and all(texts) and not any("\n\n" in text for text in texts)
    ids = [json.loads(server.request("POST", "/v1/completions", {
        "model": "smollm2", "prompt": context, "max_tokens": 3, "temperature": 0, "return_token_ids": True,
    })[1])["choices"][0]["token_ids"] for context in contexts]  # fmt: skip
    other = subject.tokenize(" carpet", add_special=False)
    pairs = [*zip(contexts, ids, strict=True), (contexts[0], other)]
    found = lm_eval.loglikelihoods(pairs)
    assert [is_greedy for _, is_greedy in found] == [True, True, False]
    scores = subject.score([context + continuation for context, continuation in pairs])
    for (total, _), (context, _), values in zip(found, pairs, scores, strict=True):
        assert total == pytest.approx(math.fsum(values[len(context) - 1 :]), abs=1e-9)
