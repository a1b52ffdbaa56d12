"""processors: cores, hardware threads, kinds of core and NUMA nodes are read right, and threads chosen by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from random_models import Shape, write_gguf_model
from tokenmill import LLM, SamplingParams
from tokenmill.core.units import GiB, MiB
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.node import load
from tokenmill.node.machine import MachineFacts
from tokenmill.node.options import EngineOptions
from tokenmill.node.processors import (
    BUDGET_S,
    REPEATS,
    Processor,
    ThreadOptions,
    choose_threads,
    describe,
    num_fast_cores,
    read_processors,
    thread_options,
)
from tokenmill.ops.native import available

SMALL = {"width": 64, "heads": 2, "kv_heads": 2, "head": 32, "rope": 32, "value": 32, "experts": 0, "dense_ffn": 64}


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "sys/devices" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def topology(siblings: dict[int, str]) -> dict[str, str]:
    return {f"system/cpu/cpu{number}/topology/core_cpus_list": text for number, text in siblings.items()}


def two_sockets() -> dict[str, str]:
    """Two nodes of two cores of two hardware threads: 0-1 and 4-5 here, 2-3 and 6-7 there."""
    siblings = {number: f"{number % 4},{number % 4 + 4}" for number in range(8)}
    nodes = {"system/node/node0/cpulist": "0-1,4-5", "system/node/node1/cpulist": "2-3,6-7"}
    return {**topology(siblings), **nodes}


def test_where_the_system_tells_nothing_each_processor_is_a_core(tmp_path):
    """Also on systems without /sys."""
    assert read_processors(tmp_path, [3, 1]) == (Processor(1, 1), Processor(3, 3))
    assert thread_options(read_processors(tmp_path, [3, 1])) == ThreadOptions((2,), 2, (), "2 cores")


def test_hardware_threads_come_after_all_cores(tmp_path):
    """Whoever is allowed only the second of a core has it as its first."""
    root = lay(tmp_path, topology({number: f"{number % 4},{number % 4 + 4}" for number in range(8)}))
    options = thread_options(read_processors(root, range(8)))
    assert options == ThreadOptions((4, 8), 4, (), "4 cores with 8 hardware threads")
    assert thread_options(read_processors(root, [1, 5, 6])).counts == (2, 3)
    assert num_fast_cores(read_processors(root, [5, 6])) == 2


def test_nodes_come_one_after_the_other_and_threads_stay_in_theirs(tmp_path):
    """Within its node a thread may move, so that it never waits for a processor while another is idle."""
    options = thread_options(read_processors(lay(tmp_path, two_sockets()), range(8)))
    assert options.counts == (2, 4, 6, 8) and options.default == 4
    assert options.about == "4 cores with 8 hardware threads, 2 NUMA nodes"
    here, there = (0, 1, 4, 5), (2, 3, 6, 7)
    assert options.places == (here, here, there, there, here, here, there, there)


@pytest.mark.parametrize("source", ["kinds", "capacity", "clock"])
def test_slow_cores_come_after_fast_ones(tmp_path, source):
    """By whatever the system tells; clocks that differ by little are of one kind of core."""
    numbers = range(6)
    files = {
        "kinds": {"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-5"},
        "capacity": {f"system/cpu/cpu{n}/cpu_capacity": "1024" if n < 4 else "446" for n in numbers},
        "clock": {
            f"system/cpu/cpu{n}/cpufreq/cpuinfo_max_freq": str(5700000 - 100000 * n if n < 4 else 3300000)
            for n in numbers
        },
    }[source]
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5"}
    processors = read_processors(lay(tmp_path, {**topology(siblings), **files}), numbers)
    options = thread_options(processors)
    assert options.counts == (2, 4, 6) and options.default == 2
    assert options.places == ((0, 2, 1, 3), (0, 2, 1, 3), (4, 5), (4, 5), (0, 2, 1, 3), (0, 2, 1, 3))
    assert describe(processors) == "2 fast cores with 4 hardware threads, 2 slow cores"


def test_no_more_threads_than_whole_processors_of_a_quota(tmp_path):
    """Places are only of those."""
    options = thread_options(read_processors(lay(tmp_path, two_sockets()), range(8)), quota=3.9)
    assert (options.counts, options.default, len(options.places)) == ((2, 3), 3, 3)
    assert options.about.endswith("of which the container grants 3.9")
    assert thread_options([Processor(0, 0), Processor(1, 1)], quota=0.5).counts == (1,)


def test_of_many_cores_fewer_are_tried():
    """They may keep the memory busy."""
    assert thread_options([Processor(number, number) for number in range(16)]).counts == (4, 8, 16)
    assert thread_options([Processor(number, number) for number in range(8)]).counts == (4, 8)
    assert thread_options([Processor(number, number) for number in range(7)]).counts == (7,)


class Machine:
    """Takes rows / threads of arithmetic, and memory that `enough` threads keep busy, in hundredths of a second."""

    def __init__(self, enough: int, scale: float = 1e-5) -> None:
        self.now_s = 0.0
        self._enough, self._scale = enough, scale

    def clock(self) -> float:
        return self.now_s

    def time_step(self, rows: int, threads: int) -> float:
        took_s = self._scale * max(rows / threads, 16 / min(threads, self._enough)) + self._scale * 0.001 * threads
        self.now_s += took_s
        return took_s


def test_few_rows_take_the_threads_that_keep_the_memory_busy():
    """Steps of many rows take more, and what was measured can be shown."""
    machine = Machine(enough=8)
    plan = choose_threads(ThreadOptions((4, 8, 16, 32), 16), machine.time_step, machine.clock, 512)
    assert (plan.num_threads, plan.limits) == (16, ((8, 8),))
    plan = choose_threads(ThreadOptions((1, 2, 4), 2), Machine(enough=1).time_step, machine.clock, 512)
    assert (plan.num_threads, plan.limits) == (2, ((8, 1),))
    assert str(plan) == "2, 1 for steps of at most 8 rows"
    assert {rows for rows, _, _ in plan.measured} == {1, 8, 32}


def test_a_little_faster_is_not_worth_another_thread():
    """Others can use it."""

    def time_step(rows: int, threads: int) -> float:
        return 1.0 if threads == 4 else 0.99

    assert choose_threads(ThreadOptions((4, 8), 4), time_step, lambda: 0.0, 512).num_threads == 4


def test_measuring_ends_in_time():
    """What has not been measured is as it would be without; of a model whose steps take long, all."""
    slow = Machine(enough=4, scale=BUDGET_S / 16)
    plan = choose_threads(ThreadOptions((4, 8), 8), slow.time_step, slow.clock, 512)
    assert (plan.num_threads, plan.limits) == (8, ())
    longest = slow.time_step(1, 4)
    slow.now_s = 0.0
    choose_threads(ThreadOptions((4, 8), 8), slow.time_step, slow.clock, 512)
    assert slow.now_s <= BUDGET_S + longest


def test_no_step_is_longer_than_steps_can_be():
    """An engine may be made for few rows."""
    asked: list[int] = []

    def time_step(rows: int, threads: int) -> float:
        asked.append(rows)
        return 0.001 * threads

    plan = choose_threads(ThreadOptions((1, 2), 2), time_step, lambda: 0.0, 16)
    assert set(asked) == {1, 8} and len(asked) == 2 * 2 * (REPEATS + 1)
    assert (plan.num_threads, plan.limits) == (1, ())


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_an_engine_times_its_own_steps_and_says_what_it_chose(tmp_path, monkeypatch):
    """Answers are those of one thread, also from blocks that timed steps have used."""
    path = tmp_path / "model.gguf"
    write_gguf_model(path, Shape("qwen3", layers=2, context=256, **SMALL), "q8_0")
    prompts, how = ["one two three", "four"], SamplingParams(max_tokens=20, temperature=0.9, seed=3, ignore_eos=True)
    limits = {"kv_cache_memory_bytes": 16 * MiB, "max_num_seqs": 4}
    with LLM(str(path), threads=1, **limits) as llm:
        alone = [each.outputs[0].token_ids for each in llm.generate(prompts, how)]
    monkeypatch.setattr(load, "thread_options", lambda *given: ThreadOptions((1, 3), 3, (), "3 cores"))
    with LLM(str(path), **limits) as llm:
        assert [each.outputs[0].token_ids for each in llm.generate(prompts, how)] == alone
    machine = MachineFacts(num_cpus=3, cpu_quota=None, memory_available=GiB, cgroup_headroom=None)
    for options, said in (
        (EngineOptions(**limits), "(of 1, 3, measured at start; 3 cores)"),
        (EngineOptions(threads=2, **limits), "2 (as asked)"),
    ):
        engine = load.load_engine(open_checkpoint(path), options, machine, tmp_path)
        try:
            facts = dict(engine.facts())
        finally:
            engine.close()
        assert facts["threads"].endswith(said), facts["threads"]
