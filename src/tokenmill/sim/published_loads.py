"""Published measurements of whole loads, against the service simulated: clients that each send the next request when
they have the answer, prompts and answers of one length. Nothing here is fitted: steps are those of `roofline`, with
usual coefficients, and the scheduler is the one that serves, with as many tokens a step as is said."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import NamedTuple

from ..core.events import Output
from ..core.request import Request, SamplingParams
from .cluster_file import read_deployment
from .loop import VirtualLoop
from .service import Service


class Closed(NamedTuple):
    """ttft_ms, itl_ms, tokens_s: as published; medians and means are not told apart there."""

    cluster: str
    num_prompt: int
    num_output: int
    num_clients: int
    ttft_ms: float
    itl_ms: float
    tokens_s: float


NIM = """
[model]
name = "llama-3.3-70b"
precision = "fp8"
kv_precision = "fp8"
[[workers]]
hardware = "h100-sxm"
tensor_parallel = 2
[engine]
max_num_batched_tokens = 8192
enable_prefix_caching = false
[admission]
max_queue_s = 0
admission = "off"
"""
SOURCE = (
    "NVIDIA NIM 1.8.0, docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance: 2 H100, fp8, TP2, 5,000 + 500 tokens"
)
LOADS = (
    Closed(NIM, 5000, 500, 1, 406.77, 18.58, 51.67),
    Closed(NIM, 5000, 500, 5, 546.70, 21.83, 218.48),
    Closed(NIM, 5000, 500, 25, 688.69, 38.75, 623.40),
    Closed(NIM, 5000, 500, 50, 834.51, 59.73, 814.37),
    Closed(NIM, 5000, 500, 100, 7996.25, 92.91, 917.26),
    Closed(NIM, 5000, 500, 200, 61680.22, 93.06, 920.54),
    Closed(NIM, 5000, 500, 250, 88605.32, 93.20, 920.12),
)


class Simulated(NamedTuple):
    """Means over requests, after each client's first; tokens_s of all clients, over the time of these."""

    ttft_ms: float
    itl_ms: float
    tokens_s: float


def simulate(load: Closed, num_rounds: int = 3) -> Simulated:
    """Each client sends so many requests; they begin evenly spread over the time of
    about one answer, at 20 ms a token. The first of each is left out."""
    loop = VirtualLoop()
    service = Service(read_deployment(load.cluster), loop, seed=1)
    seen: list[tuple[float, float, float]] = []  # when it was sent, had its first token, and ended
    sampling = SamplingParams(max_tokens=load.num_output, temperature=0.0)
    rng = random.Random("published loads")

    async def client(number: int) -> None:
        await asyncio.sleep(number / load.num_clients * load.num_output * 0.02)
        for turn in range(num_rounds):
            sent_s, first_s, ended = loop.time(), 0.0, asyncio.Event()

            def hear(output: Output, ended: asyncio.Event = ended) -> None:
                nonlocal first_s
                assert not output.error, output
                first_s = first_s or loop.time()
                if output.finish_reason is not None:
                    ended.set()

            prompt = tuple(rng.randrange(1000) for _ in range(load.num_prompt))
            name = f"{number}.{turn}"
            seed = number * num_rounds + turn
            request = Request(name, prompt, sampling, load.num_output, seed, arrival_s=sent_s)
            service.open(request, f"client {number}", hear)
            await ended.wait()
            if turn:
                seen.append((sent_s, first_s, loop.time()))

    async def main() -> None:
        await service.start()
        await asyncio.gather(*(client(number) for number in range(load.num_clients)))
        await service.stop()

    loop.run(main())
    ttft_s = statistics.fmean(first - sent for sent, first, _ in seen)
    itl_s = statistics.fmean((end - first) / (load.num_output - 1) for _, first, end in seen)
    return Simulated(1e3 * ttft_s, 1e3 * itl_s, load.num_clients * load.num_output / (ttft_s + itl_s * load.num_output))


def loads_section() -> str:
    """Of docs/operate/cost-model.md."""
    lines = [
        "## Whole loads\n",
        "The simulated service against whole loads whose inputs are public: each client sends its next request when it",
        "has the answer. Nothing is fitted: usual coefficients, and the scheduler that serves, with at most 8,192",
        "tokens a step and KV in 8 bits. The source tells neither; with KV in 16 bits, 25 clients get 11 % less.",
        "Simulated clients begin one after the other. Times to first tokens under load depend on that, and on how the",
        "other scheduler mixes prompts with decodes: there the error is largest.",
        "With 100 clients and more KV is full, and most of the time to a first token is spent waiting for some.",
        "One client's times are among the steps above, too.\n",
        f"Source: {SOURCE}.\n",
        "| clients | | TTFT ms | ITL ms | tokens/s |",
        "|--:|---|--:|--:|--:|",
    ]
    for load in LOADS:
        found, published = simulate(load), load[-3:]
        lines.append(f"| {load.num_clients} | published | " + " | ".join(f"{each:,.1f}" for each in published) + " |")
        lines.append("| | simulated | " + " | ".join(f"{each:,.1f}" for each in found) + " |")
        errors = (ours / theirs - 1 for ours, theirs in zip(found, published, strict=True))
        lines.append("| | error | " + " | ".join(f"{each:+.1%}" for each in errors) + " |")
    return "\n".join(lines) + "\n"
