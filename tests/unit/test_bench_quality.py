"""bench quality: figures and errors against known values, questions that repeat, answers read rightly."""

from __future__ import annotations

import argparse
import json
import math
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quality_cases import CountingSubject, load, write_rows

from tokenmill.bench import stats as quality_stats
from tokenmill.bench.html import report as html
from tokenmill.bench.quality import api as quality_api
from tokenmill.bench.quality import command as quality
from tokenmill.bench.quality import run as quality_run
from tokenmill.bench.quality import tasks as quality_tasks
from tokenmill.bench.quality.api import ApiSubject
from tokenmill.core.errors import ConfigError, InvalidRequest, Unavailable

# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_right", "num", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_intervals_are_those_of_the_books(num_right, num, low, high) -> None:
    """The last is Newcombe's (1998) worked example."""
    interval = quality_stats.wilson(num_right, num)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("lost", "won", "p"), [(0, 0, 1.0), (10, 2, 0.03857), (5, 5, 1.0), (0, 6, 0.03125)])
def test_mcnemar_is_the_exact_binomial_test(lost, won, p) -> None:
    assert quality_stats.mcnemar(lost, won) == pytest.approx(p, abs=1e-5)


def test_equal_clusters_give_the_plain_standard_error() -> None:
    values = [random.Random(1).gauss(3, 1) for _ in range(50)]
    mean, error = quality_stats.clustered_mean(values, [1] * 50)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / 49)
    assert (mean, error) == pytest.approx((sum(values) / 50, spread / math.sqrt(50)))


def test_the_paired_bootstrap_agrees_with_the_normal_interval() -> None:
    """For 2,000 paired values with a known difference, and equal for an equal seed."""
    rng = random.Random(2)
    first = [rng.gauss(0, 1) for _ in range(2000)]
    second = [value + rng.gauss(0.1, 0.5) for value in first]
    change, interval = quality_stats.paired_bootstrap(first, second, [1] * 2000, 0)
    half = 1.96 * 0.5 / math.sqrt(2000)
    assert change == pytest.approx(0.1, abs=3 * half)
    assert (interval.low, interval.high) == pytest.approx((change - half, change + half), abs=0.15 * half)
    assert quality_stats.paired_bootstrap(first, second, [1] * 2000, 0)[1] == interval


# ---- tasks -----------------------------------------------------------------------------------------------------------


def sums(num: int) -> list[dict]:
    return [
        {"index": i, "question": f"What is {i} + {i}?", "answer": f"It is <<{i}+{i}>>.\n#### {2 * i}"}
        for i in range(num)
    ]


@pytest.mark.parametrize(
    ("output", "target", "strict", "last"),
    [
        (" 3 + 4 = 7\n#### 7", "7", True, True),
        (" so #### 1,234.0 then", "1234", True, True),
        (" costs $18.", "18", False, True),
        ("#### -5", "5", False, False),
        ("#### 70\nThen 80", "70", True, False),
        ("no number", "7", False, False),
        ("#### 7.5", "7.50", True, True),
    ],
)
def test_sums_are_read_after_the_marks_or_at_the_end(tmp_path, output, target, strict, last) -> None:
    judges = load("gsm8k", write_rows(tmp_path / "g.jsonl", sums(9))).judges
    assert [judge(output, target) for judge in judges.values()] == [strict, last]


def test_sums_show_examples_of_their_own_file_only_if_there_is_no_other(tmp_path) -> None:
    """And never the question itself."""
    path = write_rows(tmp_path / "gsm8k_test.jsonl", sums(20))
    task = load("gsm8k", path)
    assert len(task.questions) == 15 and task.data["examples"].endswith("held out")
    for question in task.questions:
        asked = question.prompt.rpartition("Question: ")[2]
        assert asked not in question.prompt[: -len(asked)]
        assert question.prompt.count("####") == 5 and question.prompt.endswith("\nAnswer:")
    write_rows(tmp_path / quality_tasks.EXAMPLES_FILE, [{"question": "Other?", "answer": "Yes #### 1"}] * 9)
    task = load("gsm8k", path)
    assert len(task.questions) == 20 and task.questions[0].prompt.count("Other?") == 5


def test_the_seed_decides_what_is_asked(tmp_path) -> None:
    path = write_rows(tmp_path / "g.jsonl", sums(100))
    asked = [[q.digest for q in load("gsm8k", path, limit=10, seed=seed).questions] for seed in (0, 0, 1)]
    assert asked[0] == asked[1] != asked[2]


def reasoning() -> list[dict]:
    rows = [
        {"task": "colours", "index": i, "input": "Pick.\nOptions:\n(A) red\n(B) blue", "target": "(A)"}
        for i in range(30)
    ]
    rows += [{"task": "truth", "index": i, "input": f"not {i} is", "target": str(i % 2 == 0)} for i in range(9)]
    return rows + [{"task": "sorting", "index": i, "input": "b a", "target": "a b"} for i in range(5)]


def test_a_limit_is_drawn_evenly_from_the_groups(tmp_path) -> None:
    path = write_rows(tmp_path / "bbh.jsonl.gz", reasoning())
    groups = [question.group for question in load("bbh", path, limit=7).questions]
    assert sorted(map(groups.count, set(groups))) == [2, 2, 3]


def test_choices_are_options_or_the_closed_set_of_answers(tmp_path) -> None:
    """Free answers are left to bbh."""
    found = {q.group: q.choices for q in load("bbh-choice", write_rows(tmp_path / "b.jsonl", reasoning())).questions}
    assert found == {"colours": (" (A)", " (B)"), "truth": (" False", " True")}


@pytest.mark.parametrize(
    ("output", "exact", "found"),
    [(" (B)\nQ", True, True), (" The answer is (B).", False, True), (" (b)", False, True), (" (A)", False, False)],
)
def test_reasoning_answers_are_the_first_line(tmp_path, output, exact, found) -> None:
    judges = load("bbh", write_rows(tmp_path / "b.jsonl", reasoning())).judges
    assert [judge(output, "(B)") for judge in judges.values()] == [exact, found]


def test_code_is_taken_from_a_block_only_in_a_chat() -> None:
    answer = "Sure:\n```python\ndef f():\n    return 1\n```\nDone."
    assert quality_tasks.code_of(answer, chat=True) == "def f():\n    return 1\n"
    assert quality_tasks.code_of(answer, chat=False) == answer


def test_damaged_data_is_an_error_that_names_the_file(tmp_path) -> None:
    bad = tmp_path / "bad.jsonl"
    for content in (b"{}\n", b"[1]\n", b"{\n", b"", b"\xff\n"):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.jsonl"):
            load("gsm8k", bad)
    with pytest.raises(ConfigError, match="choices"):
        load("choice", write_rows(bad, [{"question": "?", "choices": ["a"], "answer": 0}]))
    with pytest.raises(ConfigError, match="--data"):
        quality_tasks.find_file("gsm8k", tmp_path)


# ---- runs ------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 30), st.integers(1, 29), st.integers(30, 200), st.sampled_from([(), (1,), (1, 2)]))
def test_perplexity_scores_every_token_once(tmp_path_factory, window, stride, length, head) -> None:
    """Whatever window and stride are: the sum over windows is that over the text, and context is never less than
    window - stride."""
    stride = min(stride, window - 1)
    text = "".join(chr(97 + random.Random(length).randrange(26)) for _ in range(length))
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text(text)
    subject = CountingSubject(head=head)
    result = quality_run.run_perplexity(subject, path, window=window, stride=stride, limit=None)
    end = result["data"]["num_tokens_read"]
    assert length - stride < end <= length
    expected = [ord(character) / 1000 for character in text[1:end]]
    assert result["num_items"] == len(expected)
    assert result["value"] == pytest.approx(math.exp(sum(expected) / len(expected)))
    assert result["other_metrics"]["bits per byte"]["num_bytes"] == len(expected)
    assert all(sent[: len(head)] == list(head) and len(sent) == window + len(head) for sent in subject.sent)


def test_a_text_shorter_than_a_window_is_an_error(tmp_path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("short")
    with pytest.raises(ConfigError, match="5 tokens"):
        quality_run.run_perplexity(CountingSubject(), path, window=10, stride=5, limit=None)
    with pytest.raises(ConfigError, match="--stride"):
        quality_run.run_perplexity(CountingSubject(), path, window=2, stride=2, limit=None)


def test_the_likeliest_choice_wins_by_sum_and_by_character(tmp_path) -> None:
    """'b' costs less than 'aa' in sum, 'aa' less per character."""
    rows = [
        {"id": i, "question": "?", "choices": ["aa", "b"], "answer": answer} for i, answer in enumerate((0, 1, "b"))
    ]
    task = load("choice", write_rows(tmp_path / "c.jsonl", rows))
    result = quality_run.run_task(CountingSubject(head=(7,)), task, chat=False)
    assert [item["right"] for item in result["items"]] == [
        {"likeliest": False, "likeliest per character": True},
        {"likeliest": True, "likeliest per character": False},
        {"likeliest": True, "likeliest per character": False},
    ]
    # The space before a choice belongs to it; the prompt and the leading special token do not.
    space, a, b = (-ord(character) / 1000 for character in " ab")
    assert result["items"][0]["log_likelihoods"] == pytest.approx([space + 2 * a, space + b])


def settings(tmp_path: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    return parser.parse_args(["--data", str(tmp_path), *more])


def right_below(limit: int):
    """Answers sums rightly where the number asked for is below `limit`."""

    def answer(prompt: str) -> str:
        number = int(prompt.rpartition("What is ")[2].split()[0])
        return f" #### {2 * number if number < limit else 0}"

    return answer


def test_a_result_is_complete_and_two_are_compared_question_by_question(tmp_path, capsys, monkeypatch) -> None:
    write_rows(tmp_path / "gsm8k_test.jsonl", sums(65))
    monkeypatch.setattr(
        quality.sys, "argv", ["tokenmill", "bench", "quality", "--api-key", "sesame", "--api-key=sesame"]
    )
    args = settings(tmp_path, "--task", "gsm8k", "--json", str(tmp_path / "a.json"))
    subjects = [CountingSubject(right_below(60)), CountingSubject(right_below(40))]
    for name, subject in zip(("a", "b"), subjects, strict=True):
        args.json = tmp_path / f"{name}.json"
        assert quality.run(args, lambda subject=subject: subject) == 0 and subject.is_closed
    first, second = (quality.read_result(tmp_path / f"{name}.json") for name in "ab")
    task = first["tasks"][0]
    assert task["num_items"] == 60 and task["num_right"] == sum(item["right"][task["metric"]] for item in task["items"])
    assert task["interval"]["low"] < task["value"] < task["interval"]["high"]
    assert first["argv"] == ["bench", "quality", "--api-key", "...", "--api-key=..."]
    assert first["settings"]["seed"] == 0 and len(task["data"]["sha256"]) == 64 and task["prompt"]["first"]

    compared = quality.compare(first, second)["tasks"][0]
    lost = sum(40 <= int(item["target"]) // 2 < 60 for item in task["items"])
    assert (compared["num_only_first"], compared["num_only_second"], compared["verdict"]) == (lost, 0, "worse")
    assert compared["change"] == pytest.approx(-lost / 60) and compared["mcnemar_p"] < 0.001
    assert quality.compare(second, first)["tasks"][0]["verdict"] == "better"
    assert quality.compare(first, first)["tasks"][0]["verdict"] == "undecided"
    assert "gsm8k" in capsys.readouterr().out
    assert "gsm8k" in html.render([first, quality.compare(first, second)])


def test_results_over_other_questions_are_not_compared(tmp_path) -> None:
    write_rows(tmp_path / "gsm8k_test.jsonl", sums(30))
    results = []
    for seed in ("0", "1"):
        args = settings(tmp_path, "--task", "gsm8k", "--limit", "5", "--seed", seed)
        results.append(quality.measure(args, lambda: CountingSubject(right_below(9))))
    with pytest.raises(ConfigError, match="same questions"):
        quality.compare(*results)


def test_perplexities_are_compared_by_window(tmp_path) -> None:
    (tmp_path / "t.txt").write_text("abcdefgh" * 40)
    args = settings(tmp_path, "--task", f"perplexity={tmp_path / 't.txt'}", "--window", "32", "--stride", "16")
    first = quality.measure(args, CountingSubject)
    worse = json.loads(json.dumps(first))
    for item in worse["tasks"][0]["items"]:
        item["nll"] *= 1.1
    compared = quality.compare(first, worse)["tasks"][0]
    assert compared["verdict"] == "worse" and compared["ratio"] == pytest.approx(first["tasks"][0]["value"] ** 0.1)


def test_wrong_settings_are_refused_before_a_model_is_loaded(tmp_path) -> None:
    write_rows(tmp_path / "humaneval.jsonl.gz", [{"task_id": "1", "prompt": "", "entry_point": "f", "test": ""}])
    for more, message in (
        ([], "--task"),
        (["--task", "chess"], "chess"),
        (["--task", "gsm8k"], "gsm8k_test"),
        (["--task", "humaneval"], "--allow-code-execution"),
    ):
        with pytest.raises(ConfigError, match=message):
            quality.measure(settings(tmp_path, *more), pytest.fail)


# ---- over HTTP -------------------------------------------------------------------------------------------------------


class Stub(BaseHTTPRequestHandler):
    """Answers with what the test put in `script`: functions from body to (status, headers, answer)."""

    protocol_version = "HTTP/1.1"
    script: dict
    seen: list

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict) -> None:
        self.seen.append((self.path, body, self.headers.get("Authorization")))
        status, headers, answer = self.script[self.path](body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[tuple[str, type[Stub]]]:
    handler = type("Handler", (Stub,), {"script": {}, "seen": []})
    handler.script["/v1/models"] = lambda body: (200, {}, {"data": [{"id": "m"}]})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_scores_are_asked_for_as_harnesses_do(stub) -> None:
    """Token ids, echo and logprobs; the generated token's own score is not counted."""
    url, handler = stub

    def complete(body):
        values = [None, *(-token / 10 for token in body["prompt"][1:]), -99.0]
        return 200, {}, {"system_fingerprint": "fp", "choices": [{"logprobs": {"token_logprobs": values}}]}

    handler.script["/v1/completions"] = complete
    subject = ApiSubject(url, api_key="k", extra={"repetition_penalty": 1})
    assert subject.score([[1, 2, 3], [4, 5]]) == [[-0.2, -0.3], [-0.5]]
    subject.close()
    _, body, key = handler.seen[1]
    assert body | {"prompt": []} == {
        "model": "m", "prompt": [], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1,
        "repetition_penalty": 1,
    }  # fmt: skip
    assert key == "Bearer k" and subject.facts["system_fingerprint"] == "fp"


def test_a_busy_server_is_asked_again_and_order_is_kept(stub, monkeypatch) -> None:
    url, handler = stub
    waits: list[float] = []
    monkeypatch.setattr(quality_api.time, "sleep", waits.append)
    refused = threading.Event()

    def complete(body):
        if body["prompt"] == "3" and not refused.is_set():
            refused.set()
            return 429, {"Retry-After": "7"}, {"error": {"message": "busy"}}
        return 200, {}, {"choices": [{"text": f"<{body['prompt']}>", "finish_reason": "stop"}]}

    handler.script["/v1/completions"] = complete
    subject = ApiSubject(url, concurrency=4)
    answers = subject.complete([str(i) for i in range(20)], max_tokens=5, stop=["x"], chat=False)
    subject.close()
    assert [answer.text for answer in answers] == [f"<{i}>" for i in range(20)] and waits == [7.0]


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (400, {"error": {"message": "too long"}}, "too long"),
        (404, {"detail": "none"}, "no /tokenize"),
        (500, "oops", "status 500"),
        (200, [1], "status 200"),
    ],
)
def test_any_other_failure_ends_the_run(stub, status, answer, message) -> None:
    url, handler = stub
    handler.script["/tokenize"] = lambda body: (status, {}, answer)
    subject = ApiSubject(url)
    with pytest.raises((InvalidRequest, quality_api.EngineFailed), match=message):
        subject.tokenize("x", add_special=True)
    subject.close()


def test_events_of_a_stream_are_timed(stub) -> None:
    """All but the last; one that is refused, ends with an error or breaks off gives none."""
    url, handler = stub
    subject = ApiSubject(url)

    def stream(status: int, answer: object) -> list[float]:
        handler.script["/v1/completions"] = lambda body: (status, {}, answer)
        return subject.stream("/v1/completions", {"stream": True})

    times_s = stream(200, b'data: {"choices": []}\n\n: still here\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n')
    assert len(times_s) == 2 and times_s == sorted(times_s)
    with pytest.raises(InvalidRequest, match="too long"):
        stream(400, {"error": {"message": "too long"}})
    with pytest.raises(quality_api.EngineFailed, match="the engine failed"):
        stream(200, b'data: {"choices": []}\n\ndata: {"error": {"message": "the engine failed"}}\n\n')
    with pytest.raises(quality_api.EngineFailed, match="without"):
        stream(200, b'data: {"choices": []}\n\n')
    subject.close()


def test_a_server_without_prompt_scores_is_named(stub) -> None:
    url, handler = stub
    handler.script["/v1/completions"] = lambda body: (200, {}, {"choices": [{"text": "", "logprobs": None}]})
    subject = ApiSubject(url, model="m")
    with pytest.raises(InvalidRequest, match="echo"):
        subject.score([[1, 2]])
    subject.close()


def test_no_server_and_no_url_are_told_apart(stub) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        ApiSubject("http://127.0.0.1:9")
    for url in ("localhost:8000", "ftp://x", "http://", "http://x:port"):
        with pytest.raises(ConfigError, match="--url"):
            ApiSubject(url)
