"""What docs/develop/fidelity.md is measured on: servers, the loads that calibrate, and the loads that are held out.

A server is one set of settings of `tokenmill serve` and the cluster file that says the same to the simulator. Servers
with equal `engine` (model and threads) share a calibration, which the first of them makes. Load is said as a share of
the capacity that a closed loop finds; lengths are short, so that a thousand requests take about a minute here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OF_ONE = {"e2e": 0.06, "ttft_mean": 0.12, "ttft_p99": 0.20}
OF_SEVERAL = {"e2e": 0.10, "ttft_mean": 0.12, "ttft_p99": 0.20}
BEYOND = {"load": 0.05}
"""Bars: the error allowed, or 1.25 times what two live runs differ by, where that is more. `load`: how far the load is
from the real one at which the simulation shows the live mean TTFT."""

REPEATS_LIMIT = 1.25

RANDOM = ("--input-len", "48", "--output-len", "12", "--random-range-ratio", "0.5", "--ignore-eos")
PREFIXES = ("--dataset-name", "shared-prefix", "--num-prefixes", "8", "--prefix-len", "64", *RANDOM)
LONG = ("--input-len", "768", "--output-len", "12", "--random-range-ratio", "0.5", "--ignore-eos")
MANY_PREFIXES = ("--dataset-name", "shared-prefix", "--num-prefixes", "24", "--prefix-len", "192", *RANDOM)


def traced(path: str) -> tuple[str, ...]:
    """Prompts and answers of the lengths of a public trace, in its order, an eighth as long."""
    words = ("--dataset-name", "trace", "--dataset-path", path, "--length-scale", "0.125", "--max-model-len", "2048")
    return (*words, "--ignore-eos")


def arriving(rate: float) -> tuple[str, ...]:
    """The load that tells how fast the machine is now: requests that come one by one, so many a second. Its lengths
    are none of the held-out loads. A closed loop of few clients makes steps of few kinds, and what the cost model is
    wrong by for these would be taken for the machine's speed."""
    lengths = ("--input-len", "64", "--output-len", "16", "--random-range-ratio", "0.5", "--ignore-eos")
    return ("--request-rate", f"{rate:g}", *lengths)


SLICE = arriving(16)

CALIBRATION = (
    ("--concurrency", "1", "--input-len", "32", "--output-len", "24"),
    ("--concurrency", "2", "--input-len", "96", "--output-len", "32"),
    ("--concurrency", "4", "--input-len", "160", "--output-len", "32"),
    ("--concurrency", "8", "--input-len", "64", "--output-len", "48"),
    ("--concurrency", "16", "--input-len", "96", "--output-len", "32"),
    ("--concurrency", "32", "--input-len", "32", "--output-len", "48"),
    ("--concurrency", "48", "--input-len", "24", "--output-len", "16"),
    ("--concurrency", "1", "--input-len", "700", "--output-len", "16"),
    ("--request-rate", "3", "--input-len", "384", "--output-len", "24"),
    ("--request-rate", "8", "--input-len", "64", "--output-len", "20"),
)
"""Closed and open loops of many sizes; each lasts CALIBRATION_S, and all are gone through so many times: a machine that
is slower for half a minute must not look like a kind of load that is."""
CALIBRATION_S, CALIBRATION_ROUNDS = 3.0, 3


@dataclass(frozen=True)
class Load:
    """`share` of the capacity that the server has under loads of these `words`."""

    name: str
    words: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Case:
    """options: of `tokenmill serve`. cluster: the same for the simulator; {calibration} and {model} are put in.
    calibrated: options of the server that calibrates: of one engine that has all cores, or of as many as have all.
    slice: the load between loads."""

    name: str
    model: str
    options: tuple[str, ...]
    calibrated: tuple[str, ...]
    engine: str
    cluster: str
    loads: tuple[Load, ...]
    bars: dict[str, float] = field(default_factory=lambda: OF_SEVERAL)
    slice: tuple[str, ...] = SLICE


def at(words: tuple[str, ...], *percents: int) -> tuple[Load, ...]:
    return tuple(Load(f"{percent}", words, percent / 100) for percent in percents)


_WORKER = """\
[[workers]]
count = {count}
pool = "{pool}"
threads = {threads}
calibration = "{{calibration}}"
kv_blocks = {blocks}
kv_token_bytes = {token_bytes}
"""

_CLUSTER = """\
{workers}
[host]
cores = 2
{more}
[engine]
max_num_seqs = {seqs}
max_num_batched_tokens = {tokens}
max_model_len = 2048
block_size = 16
{engine}"""

TOKEN_BYTES = {"smollm2": 30 * 2 * 192 * 2, "qwen3-0.6b": 28 * 2 * 1024 * 2}
"""KV of a token: layers, keys and values, width of all KV heads, bytes of a value."""
BLOCKS = 1024


def cluster_of(
    *pools: tuple[int, str],
    model: str = "smollm2",
    threads: int = 2,
    blocks: int = BLOCKS,
    seqs: int = 64,
    tokens: int = 512,
    more: str = "",
    engine: str = "",
) -> str:
    """A cluster file. pools: (number of workers, pool). more: further sections; engine: lines of that."""
    facts = {"threads": threads, "blocks": blocks, "token_bytes": TOKEN_BYTES[model]}
    workers = "\n".join(_WORKER.format(count=count, pool=pool, **facts) for count, pool in pools)
    return _CLUSTER.format(workers=workers, seqs=seqs, tokens=tokens, more=more, engine=engine)


SPLIT = ("--disaggregation", "always")
ALWAYS = '[router]\ndisaggregation = "always"\n'
"""Every request by both workers. Whether to split is else a decision between nearly equal costs, of which each tips the
next: live runs then differ from each other by what was decided first."""
COMMON = ("--max-queue-s", "0", "--max-model-len", "2048", "--disable-access-log")
ONE = (*COMMON, "--max-num-seqs", "64", "--max-num-batched-tokens", "512")


def memory(model: str, num_blocks: int) -> tuple[str, str]:
    return "--kv-cache-memory-bytes", str(16 * num_blocks * TOKEN_BYTES[model])


def cases(trace: str = "") -> list[Case]:
    """trace: the path of one, for the case of that name."""
    small, shape = "smollm2", "qwen3-0.6b"
    pool = memory(small, BLOCKS)
    two_engines = (*ONE, *pool, "--workers", "2", "--threads", "1")

    def of_one(name: str, loads: tuple[Load, ...]) -> Case:
        """One engine that has both cores."""
        options = (*ONE, *pool)
        return Case(name, small, options, options, "smollm2-t2", cluster_of((1, "mixed")), loads, OF_ONE)

    return [
        of_one("one", at(RANDOM, 30, 50, 70, 85, 95, 105)),
        of_one("full", at(RANDOM, 95, 105)),
        of_one("prefixes", at(PREFIXES, 60)),
        of_one("long", at(LONG, 50, 85)),
        of_one("trace", at(traced(trace), 50, 85)),
        Case(
            "two",
            small,
            (*ONE, *pool, "--workers", "2", "--threads", "1"),
            two_engines,
            "smollm2-t1",
            cluster_of((2, "mixed"), threads=1),
            at(RANDOM, 50, 85),
        ),
        Case(
            "three",
            small,
            (*ONE, *pool, "--workers", "3", "--threads", "1"),
            two_engines,
            "smollm2-t1",
            cluster_of((3, "mixed"), threads=1),
            at(RANDOM, 60),
        ),
        Case(
            "prefill-decode",
            small,
            (*ONE, *pool, "--prefill-workers", "1", "--decode-workers", "1", "--threads", "1", *SPLIT),
            two_engines,
            "smollm2-t1",
            cluster_of((1, "prefill"), (1, "decode"), threads=1, more=ALWAYS),
            at(RANDOM, 40, 75),
        ),
        Case(
            "tiers",
            small,
            (*ONE, *memory(small, 256), "--kv-host", "256MiB"),
            (*ONE, *pool),
            "smollm2-t2",
            cluster_of((1, "mixed"), blocks=256, more='\n[[tiers]]\nkind = "host"\nbytes = 268435456\n'),
            at(MANY_PREFIXES, 45),
        ),
        Case(
            "qwen3",
            shape,
            (*ONE, *memory(shape, BLOCKS)),
            (*ONE, *memory(shape, BLOCKS)),
            "qwen3-t2",
            cluster_of((1, "mixed"), model=shape),
            at(RANDOM, 50, 85),
            OF_ONE,
            slice=arriving(4.5),
        ),
    ]


@dataclass(frozen=True)
class Setting:
    """One of the settings that are put in order."""

    name: str
    options: tuple[str, ...]
    cluster: str
    engine: str


def settings() -> list[Setting]:
    """Ten settings of one server, for the ordering."""

    def of(name: str, *options: str, seqs: int = 64, tokens: int = 512, engine: str = "", threads: int = 2) -> Setting:
        given = (*COMMON, *memory("smollm2", BLOCKS), "--max-num-seqs", str(seqs))
        text = cluster_of((1, "mixed"), seqs=seqs, tokens=tokens, engine=engine, threads=threads)
        words = (*given, "--max-num-batched-tokens", str(tokens), "--threads", str(threads), *options)
        return Setting(name, words, text, f"smollm2-t{threads}")

    two = Setting(
        "two workers",
        (*ONE, *memory("smollm2", BLOCKS), "--workers", "2", "--threads", "1"),
        cluster_of((2, "mixed"), threads=1),
        "smollm2-t1",
    )
    return [
        of("as it comes"),
        of("one thread", threads=1),
        of("4 sequences", seqs=4),
        of("8 sequences", seqs=8),
        of("16 sequences", seqs=16),
        of("64 tokens a step", tokens=64),
        of("128 tokens a step", tokens=128),
        of("no prefix cache", "--no-enable-prefix-caching", engine="enable_prefix_caching = false\n"),
        of("first come", "--scheduling-policy", "fcfs", engine='scheduling_policy = "fcfs"\n'),
        two,
    ]
