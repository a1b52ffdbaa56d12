"""Plans, schedules and traces: what a load generator promises to send, before anything is sent."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from tokenmill.bench.load import datasets, traces
from tokenmill.bench.load.body import BodyFormat, BodyWriter
from tokenmill.bench.load.datasets import Lengths
from tokenmill.bench.load.material import WORDS, single_token_words, token_material, word_material
from tokenmill.bench.load.plan import Drawn, Plan, Reply
from tokenmill.bench.load.schedule import Ramp, Schedule
from tokenmill.core.errors import ConfigError

SRC = Path(__file__).resolve().parent.parent.parent / "src"
TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "data" / "traces"


def writer(prompt_format: str = "tokens", api: str = "completions", seed: int = 0, **rest: object) -> BodyWriter:
    material = token_material(seed, 1000, 30000) if prompt_format == "tokens" else word_material(seed, None)
    return BodyWriter(BodyFormat(api, prompt_format, "m", **rest), material)  # type: ignore[arg-type]


def prompt(plan: Plan, index: int, seed: int = 0) -> list[int]:
    return json.loads(writer(seed=seed).write(plan.calls[index], lambda i: None))["prompt"]


def trace_file(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"no {name} beside the checkout")
    return path


def test_poisson_gaps_have_the_rate_and_the_spread_they_should() -> None:
    """The offered load is exact, and burstiness B gives gaps of variation 1 / sqrt(B)."""
    for burstiness, wanted_cv in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)):
        times = Schedule(request_rate=50.0, burstiness=burstiness).arrival_times(20_000, seed=1)
        gaps = [b - a for a, b in pairwise(times)]
        assert times[0] == 0.0 and min(gaps) >= 0.0
        assert fmean(gaps) == pytest.approx(1 / 50, rel=0.01)
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(wanted_cv, rel=0.05, abs=1e-9)


def test_a_ramp_ends_at_its_end_rate() -> None:
    """Gaps shrink from 1 / start to 1 / end, by equal steps or equal ratios of the rate."""
    for strategy, middle in (("linear", 5.5), ("exponential", math.sqrt(10.0))):
        schedule = Schedule(burstiness=math.inf, ramp=Ramp(strategy, 1.0, 10.0))
        times = schedule.arrival_times(1001, seed=0)
        assert times[1] - times[0] == pytest.approx(1.0, rel=0.02)
        assert times[501] - times[500] == pytest.approx(1 / middle, rel=0.02)
        assert times[1000] - times[999] == pytest.approx(0.1, rel=0.02)


def test_speedup_divides_trace_and_think_times(tmp_path: Path) -> None:
    """Roots and turns alike, in an open loop and in a closed one."""
    plan = datasets.conversations(6, 3, Lengths(4, 4), num_turns=3, think_time_s=2.0)
    fast = Schedule(concurrency=2, speedup=4.0).apply(plan)
    assert [call.delay_s for call in fast.calls] == [call.delay_s / 4 for call in plan.calls]
    trace = traces.read_trace(write_rows(tmp_path / "m.jsonl.gz", mooncake_rows()), 9, 0, traces.Fit())
    assert Schedule(use_trace_times=True, speedup=2.0).apply(trace).calls[2].delay_s == 1.5


def test_wrong_schedules_are_refused() -> None:
    """Each names its flag."""
    for wrong, flag in (
        ({"request_rate": 0.0}, "request_rate"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"concurrency": 0}, "concurrency"),
    ):
        with pytest.raises(ConfigError) as caught:
            Schedule(**wrong)  # type: ignore[arg-type]
        assert caught.value.param == flag
    with pytest.raises(ConfigError, match="linear or exponential"):
        Ramp("steep", 1.0, 2.0)
    plan = datasets.random_prompts(2, 0, Lengths(4, 4))
    with pytest.raises(ConfigError, match="no times of its own"):
        Schedule(use_trace_times=True).apply(plan)


def test_random_prompts_have_exact_lengths_within_their_range() -> None:
    """Every prompt is as many ids as the plan says, and lengths fill the range."""
    plan = datasets.random_prompts(300, 5, Lengths(40, 20, 0.25), prefix_len=8)
    made = writer()
    prompts = [json.loads(made.write(call, lambda i: None))["prompt"] for call in plan.calls]
    lengths = [len(tokens) for tokens in prompts]
    assert lengths == [call.input_tokens for call in plan.calls]
    assert min(lengths) == 30 + 8 and max(lengths) == 50 + 8
    assert {call.output_tokens for call in plan.calls} == set(range(15, 26))
    assert len({tuple(tokens[:8]) for tokens in prompts}) == 1
    assert len({tuple(tokens[8:24]) for tokens in prompts}) == 300


def test_groups_share_their_prefix_and_nothing_else() -> None:
    """Equal group, equal first tokens; different group, different ones; the rest is always different."""
    plan = datasets.shared_prefixes(60, 2, Lengths(16, 4), num_groups=5, prefix_len=32)
    heads: dict[str, set[tuple[int, ...]]] = {}
    for call in plan.calls:
        heads.setdefault(call.group, set()).add(tuple(prompt(plan, call.index)[:32]))
    assert len(heads) == 5 and all(len(found) == 1 for found in heads.values())
    assert len(set().union(*heads.values())) == 5
    assert len({tuple(prompt(plan, i)[32:]) for i in range(60)}) == 60


def test_a_turn_repeats_the_conversation_before_it() -> None:
    """Turn t's prompt begins with turn t - 1's and the (scripted) reply; it waits for that turn and thinks."""
    plan = datasets.conversations(12, 3, Lengths(10, 6), num_turns=4, think_time_s=2.0, system_len=5)
    assert [call.turn for call in plan.calls] == [0, 1, 2, 3] * 3
    for call in plan.calls:
        if call.turn:
            before = prompt(plan, call.index - 1)
            assert prompt(plan, call.index)[: len(before)] == before
            assert call.input_tokens == len(before) + 6 + 10
            assert call.after == (call.index - 1,) and call.delay_s > 0
        else:
            assert call.after == ()
    assert len({tuple(prompt(plan, i)[:5]) for i in (0, 4, 8)}) == 1


def test_a_real_reply_is_quoted_and_a_scripted_one_is_not() -> None:
    """What the server answered goes into the next prompt only when asked for, escaped as JSON."""
    plan = datasets.conversations(2, 0, Lengths(3, 4), num_turns=2, think_time_s=0.0)
    real = writer("text", "chat", scripted_replies=False).write(plan.calls[1], {0: 'so "be" it\n'}.get)
    messages = json.loads(real)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == 'so "be" it\n'
    scripted = json.loads(writer("text", "chat").write(plan.calls[1], {0: "never"}.get))["messages"]
    assert len(scripted[1]["content"].split()) == 4 and "never" not in scripted[1]["content"]


def test_bodies_are_json_with_the_fields_asked_for() -> None:
    """Every body parses; extra fields and ignore_eos are in it; max_tokens is the wanted length."""
    plan = datasets.random_prompts(1, 0, Lengths(5, 9))
    for prompt_format, api in (("tokens", "completions"), ("text", "completions"), ("text", "chat")):
        made = writer(prompt_format, api, ignore_eos=True, extra={"top_k": 1, "temperature": 0.5})
        body = json.loads(made.write(plan.calls[0], lambda i: None))
        assert body["max_tokens"] == 9 and body["ignore_eos"] is True and body["top_k"] == 1
        assert body["temperature"] == 0.5 and body["stream_options"] == {"include_usage": True}
        text = body["messages"][0]["content"] if api == "chat" else body["prompt"]
        assert len(text if prompt_format == "tokens" else text.split()) == 5


def test_jsonl_rows_become_calls(tmp_path: Path) -> None:
    """Strings, lists of turns and chats are taken; rows repeat until there are enough; a bad row names its line."""
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "a"}, {"turns": ["b", "c"], "tenant": "t"}, {"messages": [{"role": "system", "content": "s"}]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    plan = datasets.prompts_of_file(path, 10, 0, output_len=7)
    assert len(plan.calls) == 10 and plan.has_literals
    second = next(call for call in plan.calls if call.turn == 1)
    assert second.after == (second.index - 1,) and second.tenant == "t"
    assert json.loads(writer("text", "chat").write(second, lambda i: None))["user"] == "t"
    assert any(isinstance(part, Reply) for part in second.parts)
    with pytest.raises(ConfigError, match="text"):
        writer("tokens").prepare(plan)
    with pytest.raises(ConfigError, match="no text in wrong"):
        datasets.prompts_of_file(path, 3, 0, 7, column="wrong")
    path.write_text('{"prompt": "a", "max_tokens": "x"}\n')
    with pytest.raises(ConfigError, match="max_tokens 'x'"):
        datasets.prompts_of_file(path, 3, 0, 7)
    path.write_text('{"prompt": "a"}\nnot json\n')
    with pytest.raises(ConfigError, match="line 2"):
        datasets.prompts_of_file(path, 3, 0, 7)
    with pytest.raises(ConfigError, match="cannot be read"):
        datasets.prompts_of_file(tmp_path / "absent", 3, 0, 7)


class SplittingVocabulary:
    """Ids 0 to 199 are words; every third, though listed, is always cut in two; 200 is one letter without a space."""

    vocab_size = 201

    def token_bytes(self, token_id: int) -> bytes:
        return b"x" if token_id == 200 else f" {self._word(token_id)}".encode()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids = []
        for word in text.split():
            i = int(word.translate(str.maketrans("abcdefghij", "0123456789")))
            ids += [i, 200] if i % 3 == 0 else [i]
        return ids

    @staticmethod
    def _word(i: int) -> str:
        return f"{i:03}".translate(str.maketrans("0123456789", "abcdefghij"))


def test_words_are_one_token_each_side_by_side() -> None:
    """Text built from a tokenizer's own words encodes to exactly as many tokens as were meant."""
    vocabulary = SplittingVocabulary()
    words = single_token_words(vocabulary)
    material = word_material(0, vocabulary)
    text = (material.draw(Drawn("a", 50)) + material.draw(Drawn("b", 30))).decode()
    assert len(words) == 133 and len(vocabulary.encode(text)) == 80 and set(text.split()) <= set(words)


def test_built_in_words_are_distinct_and_plain() -> None:
    """They go into JSON as they are."""
    assert len(set(WORDS)) == len(WORDS) > 200 and all(word.isascii() and word.islower() for word in WORDS)


def test_equal_keys_begin_alike_and_seeds_differ() -> None:
    """A shorter part of the same key is the beginning of the longer; another seed is another text."""
    material = token_material(1, 1000, 30000)
    long, short = material.draw(Drawn("k", 100)), material.draw(Drawn("k", 40))
    assert long.split(b",")[:40] == short.split(b",")
    assert token_material(2, 1000, 30000).draw(Drawn("k", 40)) != short


def mooncake_rows() -> list[dict[str, object]]:
    return [
        {"timestamp": 0, "input_length": 1200, "output_length": 30, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 1024, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 700, "output_length": 4, "hash_ids": [0, 9]},
    ]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    with gzip.open(path, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_mooncake_blocks_are_really_shared_text(tmp_path: Path) -> None:
    """Equal ids give equal tokens, block by block, at the scaled block size; lengths and times are the trace's."""
    path = write_rows(tmp_path / "m.jsonl.gz", mooncake_rows())
    plan = traces.read_trace(path, 10, 0, traces.Fit())
    first, second, third = (prompt(plan, i) for i in range(3))
    assert [len(first), len(second), len(third)] == [1200, 1024, 700]
    assert first[:1024] == second and first[:512] == third[:512] and first[512:524] != third[512:524]
    assert [call.delay_s for call in plan.calls] == [0.0, 0.0, 3.0]
    small = traces.read_trace(path, 10, 0, traces.Fit(1 / 32))
    assert [len(prompt(small, i)) for i in range(3)] == [16 + 16 + 6, 32, 16 + 6]
    assert prompt(small, 0)[:32] == prompt(small, 1)
    # 6.7 tokens a block are 7, whole prompts too: two whole blocks are 14 tokens, not round(13.3).
    odd = traces.read_trace(path, 10, 0, traces.Fit(0.013))
    assert [len(prompt(odd, i)) for i in range(3)] == [7 + 7 + 2, 14, 7 + 2]
    spread = traces.read_trace(path, 10, 0, traces.Fit(), spread_s=3.0)
    assert [call.delay_s for call in spread.calls] == [0.0, 1.5, 3.0]


def test_a_sample_of_a_trace_keeps_conversations_whole(tmp_path: Path) -> None:
    """With all their turns, from all over the trace, at the trace's rate; equal for every seed."""
    ids = [(turn, talk) for turn in range(4) for talk in range(50)]
    rows = [
        {"timestamp": 1000 * i, "input_length": 512 * (turn + 2), "output_length": 1}
        | {"hash_ids": [0, *(1000 * talk + n for n in range(1, turn + 2))]}
        for i, (turn, talk) in enumerate(ids)
    ]
    path = write_rows(tmp_path / "m.jsonl.gz", rows)
    plan = traces.read_trace(path, 40, 0, traces.Fit(1 / 512), is_sampled=True)
    talks = Counter(call.parts[1] for call in plan.calls)
    assert len(plan.calls) == 40 and list(talks.values()) == [4] * 10
    times_s = [call.delay_s for call in plan.calls]
    assert times_s == sorted(times_s) and times_s[0] == 0.0 and times_s[-1] == pytest.approx(40, rel=0.3)
    other = traces.read_trace(path, 40, 1, traces.Fit(1 / 512), is_sampled=True)
    assert other.calls == plan.calls
    first = traces.read_trace(path, 40, 0, traces.Fit(1 / 512))
    assert len({call.parts[1] for call in first.calls}) == 40
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("num_prefill_tokens,num_decode_tokens\n3,4\n")
    with pytest.raises(ConfigError, match="trace-sample"):
        traces.read_trace(pairs, 1, 0, traces.Fit(), is_sampled=True)


def test_fresh_text_keeps_what_sessions_share(tmp_path: Path) -> None:
    """Prefixes of several requests stay, lengths and times too; what one session has alone is other text."""
    shared = datasets.shared_prefixes(20, 0, Lengths(8, 4, 0.5), 2, 16)
    turns = datasets.conversations(8, 0, Lengths(8, 4), 4, 1.0, system_len=6)
    trace = traces.read_trace(write_rows(tmp_path / "m.jsonl.gz", mooncake_rows()), 9, 0, traces.Fit(1 / 32))
    for plan, num_shared in ((shared, 16), (turns, 6), (trace, 16)):
        fresh = plan.with_fresh_text("warm")
        assert len(plan.calls) == len(fresh.calls)
        for i, (before, after) in enumerate(zip(plan.calls, fresh.calls, strict=True)):
            assert (before.input_tokens, before.delay_s) == (after.input_tokens, after.delay_s)
            old, new = prompt(plan, i), prompt(fresh, i)
            if plan is trace and i < 2:
                assert old[:32] == new[:32]
            else:
                assert old[:num_shared] == new[:num_shared] and old[num_shared] != new[num_shared]


def test_what_does_not_fit_is_cut_and_counted(tmp_path: Path) -> None:
    """The head of the prompt is kept, prompt and answer fit the context, and the result says how many were cut."""
    path = write_rows(tmp_path / "m.jsonl.gz", mooncake_rows())
    plan = traces.read_trace(path, 10, 0, traces.Fit(max_model_len=800))
    assert [(call.input_tokens, call.output_tokens) for call in plan.calls] == [(770, 30), (400, 400), (700, 4)]
    assert plan.facts["num_cut"] == 2
    assert prompt(plan, 0)[:400] == prompt(plan, 1)


def test_agentic_forks_wait_and_rejoin(tmp_path: Path) -> None:
    """A sub-agent starts after the request before it, the conversation goes on after it, and heads are shared."""
    plain = {"type": "n", "in": 130, "out": 5, "think_time": 2.0, "hash_runs": [[1, 2]]}
    nested = {"type": "subagent", "requests": [plain | {"hash_runs": [[1, 1], [7, 1]]}, plain]}
    rows = [
        {"id": name, "block_size": 64, "tool_tokens": 60, "system_tokens": 10, "requests": [plain, nested, plain]}
        for name in ("x", "y")
    ]
    plan = traces.read_trace(write_rows(tmp_path / "a.jsonl.gz", rows), 99, 0, traces.Fit())
    assert [call.after for call in plan.calls] == [(), (0,), (1,), (2,), (), (4,), (5,), (6,)]
    assert plan.calls[0].delay_s == 0.0 < plan.calls[4].delay_s and plan.calls[3].delay_s == 2.0
    assert len(prompt(plan, 0)) == 130
    # 70 common tokens are one whole block of 64: shared by both conversations; the second block is not.
    assert prompt(plan, 0)[:64] == prompt(plan, 4)[:64] and prompt(plan, 0)[64:128] != prompt(plan, 4)[64:128]
    assert prompt(plan, 0)[:128] == prompt(plan, 3)[:128] and prompt(plan, 0)[64:128] != prompt(plan, 1)[64:128]


def test_servegen_clients_keep_their_shares(tmp_path: Path) -> None:
    """The mix has the wanted rate, each client its share of it, and lengths from its own distribution."""
    lengths = {"0": {"input_tokens": {"bin": [10, 20], "p": [0.5, 0.5]}, "output_tokens": {"bin": [3], "p": [1.0]}}}
    rows = [
        {"client": 1, "trace": [[0, 3.0, 1.0, "Gamma", 1.0, 0.3]], "lengths": lengths},
        {"client": 2, "trace": [[0, 1.0, 2.0, "Weibull", 0.6, 1.0]], "lengths": lengths},
        {"client": 3, "trace": [[600, 9.0]], "lengths": lengths},
    ]
    path = write_rows(tmp_path / "s.jsonl.gz", rows)
    plan = traces.servegen(path, 4000, 0, traces.Fit(), rate=10.0, window_start_s=0.0, duration_s=400.0)
    share = sum(call.tenant == "client-1" for call in plan.calls) / len(plan.calls)
    assert len(plan.calls) == pytest.approx(4000, rel=0.1) and share == pytest.approx(0.75, abs=0.05)
    assert {call.tenant for call in plan.calls} == {"client-1", "client-2"}
    assert {call.input_tokens for call in plan.calls} == {10, 20}
    times = [call.delay_s for call in plan.calls]
    assert times == sorted(times) and times[-1] < 400.0


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    """Wall clock stamps of 100 ns digits become seconds."""
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    plan = traces.read_trace(path, 9, 0, traces.Fit())
    assert [call.delay_s for call in plan.calls] == [0.0, pytest.approx(0.052)]
    assert [(call.input_tokens, call.output_tokens) for call in plan.calls] == [(4808, 10), (3180, 8)]


def test_an_unknown_file_is_refused(tmp_path: Path) -> None:
    """And says what it is not."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="no trace of a known form"):
        traces.read_trace(path, 1, 0, traces.Fit())


@pytest.mark.parametrize(
    ("name", "num_tokens", "seen_before"),
    [("mooncake_conversation.jsonl.gz", 12_582, 0.346), ("mooncake_synthetic.jsonl.gz", 15_325, 0.640)],
)
def test_mooncake_traces_keep_their_published_reuse(name: str, num_tokens: int, seen_before: float) -> None:
    """Mean input length and the share of blocks asked for before are those known of the whole file."""
    plan = traces.read_trace(trace_file(name), 99_999, 0, traces.Fit())
    assert fmean(call.input_tokens or 0 for call in plan.calls) == pytest.approx(num_tokens, abs=1)
    asked = [part.key for call in plan.calls for part in call.parts if isinstance(part, Drawn)]
    assert 1 - len(set(asked)) / len(asked) == pytest.approx(seen_before, abs=0.001)


@pytest.mark.parametrize(
    "name", ["agentic_coding.jsonl.gz", "azure_llm_2023_code.csv.gz", "arxiv_summarization_lengths.csv.gz"]
)
def test_other_published_traces_are_read(name: str) -> None:
    """Each becomes a plan whose scaled bodies can be written."""
    plan = traces.read_trace(trace_file(name), 40, 0, traces.Fit(1 / 64, max_model_len=2048))
    assert len(plan.calls) == 40
    assert all(0 < (call.input_tokens or 0) + call.output_tokens <= 2048 for call in plan.calls)
    assert len(prompt(plan, 39)) == plan.calls[39].input_tokens


DIGEST = """
import sys
from tokenmill.bench.load import datasets, traces
from tokenmill.bench.load.body import BodyFormat, BodyWriter
from tokenmill.bench.load.datasets import Lengths
from tokenmill.bench.load.material import token_material, word_material
from tokenmill.bench.load.schedule import Schedule
for plan in (
    datasets.random_prompts(20, 7, Lengths(30, 10, 0.5)),
    datasets.shared_prefixes(20, 7, Lengths(30, 10), 3, 16),
    datasets.conversations(20, 7, Lengths(30, 10), 3, 1.0, 4),
):
    plan = Schedule(request_rate=3.0, burstiness=0.5).apply(plan)
    print(BodyWriter(BodyFormat("completions", "tokens", "m"), token_material(7, 1000, 30000)).digest(plan))
    print(BodyWriter(BodyFormat("chat", "text", "m"), word_material(7, None)).digest(plan))
"""


def test_a_seed_decides_every_byte_in_every_process() -> None:
    """Two processes with different PYTHONHASHSEED offer the same bytes at the same times; another seed does not."""

    def digests(hash_seed: str, code: str = DIGEST) -> list[str]:
        env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return done.stdout.split()

    first = digests("1")
    assert len(set(first)) == 6 and first == digests("2")
    assert not set(first) & set(digests("1", DIGEST.replace("7", "8")))


def test_a_plan_has_a_digest_of_its_own() -> None:
    """The same for every text that can be made of it; another for another length, time, tenant or order of turns."""
    plan = Schedule(request_rate=2.0).apply(datasets.conversations(8, 3, Lengths(16, 4), 2, 1.0))
    assert plan.digest() == Schedule(request_rate=2.0).apply(plan).digest()
    call = plan.calls[5]
    others = [
        replace(call, output_tokens=5), replace(call, delay_s=9.0), replace(call, tenant="t"),
        replace(call, after=(3,)), replace(call, messages=call.messages[:-1]),
    ]  # fmt: skip
    digests = {replace(plan, calls=(*plan.calls[:5], other, *plan.calls[6:])).digest() for other in others}
    assert len(digests | {plan.digest()}) == 6


def test_the_digest_ignores_the_model_and_nothing_else() -> None:
    """Equal loads on servers with different model names have equal digests; one byte more is another digest."""
    plan = datasets.random_prompts(3, 0, Lengths(8, 8))
    material = token_material(0, 1000, 30000)
    digests = [BodyWriter(BodyFormat("completions", "tokens", m), material).digest(plan) for m in ("a", "b")]
    longer = BodyWriter(BodyFormat("completions", "tokens", "a", ignore_eos=True), material).digest(plan)
    assert digests[0] == digests[1] != longer
