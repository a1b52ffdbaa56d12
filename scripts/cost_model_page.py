"""The page docs/operate/cost-model.md: the coefficients of the cost model, its errors on published points, fitted and
held out, and on published loads.

`python scripts/cost_model_page.py` prints it; `--fit` fits the coefficients anew and prints their table. In loads each
client sends its next request when it has the answer, and prompts and answers have one length. Nothing is fitted to
them: steps are those of `tokenmill.sim.roofline`, with usual coefficients, and the scheduler is the one that serves.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from published_steps import FITTED, Series, as_table, fit_all, published, summary
from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.sim.cluster_file import read_deployment
from tokenmill.sim.hardware import all_hardware
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.models import models
from tokenmill.sim.service import Service

_HEAD = """# What a step costs on machines that are not here

Made by `python scripts/cost_model_page.py`; do not edit.

`sim/roofline.py` tells how long a step takes from what it has to do (`core.cost.Work`), a model's shape, a device's
peaks, how the model is spread, and in what precision. It is one of the cost models that the simulator takes
(`core.cost.CostModel`): for machines that are here, take what `tokenmill calibrate` fits to their steps: it is closer.

```
linear      = (operations of matrices ^ overlap + weights read ^ overlap) ^ (1 / overlap)
attention   = positions that prompts' tokens attend to, by operations
            + positions that rows read, by the longer of their bytes and, on latents, their operations
collectives = two all-reduces a layer, by latency and bytes, or the all-to-all of experts, and between stages
overheads   = step_s + layers * layer_s + rows * row_s
step        = linear + attention + collectives + overheads
```

Weights of 4 bits that a device cannot multiply (int4; fp4 before Blackwell) are unpacked on the way: they are
multiplied at the peak of 16 bits, of which `compute_4bit` is reached, and read at `memory_4bit` of the memory's; each
layer of experts takes `experts_4bit_s` more, because its kernel sorts tokens and pads those of each expert to a tile.
The logits' matrix and the embedding stay in 16 bits beside layers of fp8, int8, fp4 and int4, as checkpoints have them.

Where two halves of a batch take turns (`expert_overlap`, as DeepSeek serves), each half reads weights, passes the
layers and tells the other devices by itself, and the all-to-all of one passes while the other computes: a step takes
the longer of all-to-all and (linear + attention), and all else. Nothing of that is fitted.

Of experts a step reads those that its tokens choose: all but (1 - chosen / experts) ^ tokens of them. Peaks are
those of data sheets; what of them is reached depends on the software that serves, and is in coefficients: `compute` to
`link` are shares of peaks, those that end in `_s` are seconds. An error is predicted over published, less 1.

## What was known beforehand

- Of a software with points marked *fitted*, coefficients are fitted to these points and to no others. All its other
  points are held out: other models, other numbers of devices, other devices.
- To points under *usual* nothing was fitted. The usual coefficients are round numbers near those of other software.
- The form of the cost model (the exponent that joins computing and reading, a latency that grows with the logarithm
  of the devices, shares of their own for products of 8 bits and weights of 4, an overhead of experts in 4 bits) was
  settled with points in view, held-out ones too. Only the peak throughputs of TensorRT-LLM came after it was.
- Of weights in 4 bits, vLLM's coefficients are fitted to Qwen2.5 14B on one A100 and DeepSeek-V3 on eight H100. Other
  sizes, numbers of devices and devices are held out. Shares and the overhead under *usual* are those of vLLM, rounded,
  `compute_4bit` by what vLLM reaches of it over what it reaches in 16 bits.
- Of TensorRT-LLM 1.0 all published peak throughputs of Llama 3 and Qwen3 on H100, H200, B200 and GB200 are taken. A
  hash of model, device and lengths halves them. Coefficients of each generation (Hopper, Blackwell) and family (dense,
  with experts) are fitted to one half; to the other nothing was fitted. The source does not tell the largest batch and
  step: 4,096 requests and 8,192 tokens were assumed before the first fit, and 95 % of the memory, less 3 GiB, for
  weights and KV. That experts lie whole on eight devices, each with a copy of the attention, was chosen with all
  points in view.
- Usual coefficients of Blackwell are below the others by about as much as those of TensorRT-LLM are.
- Except in peaks, the scheduler has no part: points are single steps, or requests that begin together. At peaks,
  requests are admitted when their whole length fits (`scripts/published_steps.py`).

"""

_THEIRS = """
## Beside other simulators

| simulator | what it predicts | error that its authors publish |
|---|---|---|
| BLIS (inference-sim) | whole loads, 36 held-out runs, from traces of servers | E2E 6.7 % median, TTFT 17.6 % mean |
| Vidur (Agrawal et al., 2024) | whole loads, from operators profiled on the device | below 9 % |
| AIConfigurator (NVIDIA) | aggregated serving, from operators profiled on the device | TTFT 18 % |
| this page | single steps, from data sheets and {num_coefficients} coefficients a software | {ours} |
| this page | whole loads, from data sheets | see above; TTFT is far off where clients queue |

The rows do not measure the same: theirs are loads, on devices that were profiled; ours are mostly steps, on models,
devices and spreads that nothing was fitted to. How far off loads on calibrated machines are, is for
`docs/develop/fidelity.md`.

## What is left out, and what is known to be wrong

- Not compared, because it is not clear what was measured: Falcon 180B on two stages of four A100 (Sarathi-Serve, 2024),
  1,150 ms for a prompt of 4k, which is more than four of them can compute; OPT 175B on eight (DistServe), whose
  published fit takes hardly longer for longer prompts.
- Not compared, because bf16 is as far off there as 4 bits: Qwen3 on H20 (Qwen, SGLang 0.4.6), whose decodes reach a
  third of the data sheet's bandwidth in bf16, 36 % in fp8 and 20 % in AWQ. Its GPTQ experts take 0.6 to 0.7 ms a layer
  (30B-A3B, 235B-A22B); the source itself says that their kernel needs work.
- Prompts on experts of 4 bits: kernels made for decodes reach much less of the peak than with dense matrices
  (DeepSeek-V3 in int4 on eight H100, above). One point is known: fitted to it, nothing would be left to test it.
- Decodes on experts of 4 bits: the overhead is as long on all devices, so that steps on H200 and A100 are predicted
  too fast; of 32 rows most.
- Grouped KV heads: kernels that read KV for each query head take longer (TensorRT-LLM v0.6, 70B, long answers).
- Experts on many devices: an all-to-all is taken for as many steps as the logarithm of the devices says, which RDMA
  need not take, so that decodes are predicted too slow there. How uneven the load of experts is, is one number,
  `imbalance`.
- Pipelines: the cost model gives the time until a step's tokens are there; as many steps can overlap as there are
  stages, which a simulated worker does not let them ([simulate.md](simulate.md#what-is-modelled-and-what-is-not)).
- Latents: for the later chunks of a prompt, keys and values of all positions before them are made again, or attention
  works on latents; neither is counted, so that long prompts in short chunks are predicted too fast.
- Devices that are joined in pairs (H100 PCIe, A40): beyond a pair the network is taken, not the node's PCIe.
- Attention and FFN on different devices (MegaScale-Infer, Step-3) are not modelled.
- Matrices that fill their tiles badly, and attention of many short rows, are as fast as all others.
- Latencies of collectives are one number a software: fitted on A100, they are too long on H100 (Splitwise, TP8).
"""


def page(loads: str) -> str:
    """loads: its section on whole loads, which `loads_section` simulates."""
    found = published()
    parts = [
        _HEAD,
        "## Errors\n\n",
        _errors_table(found),
        "\n",
        _totals(found),
        "\n",
        loads,
        "\n## Coefficients\n\n",
        _coefficients_table(found),
    ]
    held = [abs(error) for each in found if not each.is_fitted for error in each.errors(each.coefficients)]
    ours = f"{statistics.median(held):.1%} median of {len(held)} held-out steps"
    parts += [
        _THEIRS.format(num_coefficients=len(FITTED), ours=ours),
        "\n## Sources of the points\n\n",
        *_sources(found),
    ]
    names = sorted({device.name for device in all_hardware().values()})
    shapes = sorted({model.name for model in models().values()})
    parts.append(
        "\n## Hardware and models\n\n"
        f"Hardware (`sim/tables/hardware.toml`, every figure with its source): {', '.join(names)}; and any machine\n"
        "that `tokenmill bench kernels --json FILE` measured.\n\n"
        f"Models (`sim/tables/models.toml`): {', '.join(shapes)}; and any checkpoint that `tokenmill inspect` reads.\n"
    )
    return "".join(parts)


def _errors_table(found: Iterable[Series]) -> str:
    lines = [
        "| software | model, devices | kind | | points | median | largest | mean |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    for each in found:
        median, most, mean = summary(each.errors(each.coefficients))
        held = "fitted" if each.is_fitted else "held out"
        lines.append(
            f"| {each.serves} | {each.name} | {each.kind} | {held} | {len(each.points)} | {median:.1%} | {most:.1%} "
            f"| {mean:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def _totals(found: Iterable[Series]) -> str:
    lines = [
        "| software | | points | median | within 10 % | within 25 % | mean |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    errors: dict[tuple[str, bool], list[float]] = {}
    for each in found:
        for name in (_title(each), "all"):
            errors.setdefault((name, each.is_fitted), []).extend(each.errors(each.coefficients))
    for (name, is_fitted), some in sorted(errors.items(), key=lambda item: (item[0][0] == "all", item[0])):
        median, _, mean = summary(some)
        near = [sum(abs(error) <= limit for error in some) / len(some) for limit in (0.1, 0.25)]
        held = "fitted" if is_fitted else "held out"
        lines.append(f"| {name} | {held} | {len(some)} | {median:.1%} | {near[0]:.0%} | {near[1]:.0%} | {mean:+.1%} |")
    return "\n".join(lines) + "\n"


def _title(series: Series) -> str:
    """Of the coefficients that belong to it."""
    return " ".join(filter(None, (series.serves, *series.variant)))


def _coefficients_table(found: Iterable[Series]) -> str:
    columns = {_title(each): each.coefficients for each in found}
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for name in FITTED:
        lines.append(f"| {name} | {' | '.join(f'{getattr(each, name):.3g}' for each in columns.values())} |")
    intervals = (f"{each.error_low:+.0%} to {each.error_high:+.0%}" for each in columns.values())
    lines.append(f"| 8 of 10 errors | {' | '.join(intervals)} |")
    return "\n".join(lines) + "\n"


def _sources(found: Iterable[Series]) -> list[str]:
    return [f"- {source}\n" for source in dict.fromkeys(each.source for each in found)]


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
    """Each client sends so many requests, of which the first is left out. Clients begin evenly spread over the time of
    about one answer, at 20 ms a token."""
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
        found, theirs = simulate(load), load[-3:]
        lines.append(f"| {load.num_clients} | published | " + " | ".join(f"{each:,.1f}" for each in theirs) + " |")
        lines.append("| | simulated | " + " | ".join(f"{each:,.1f}" for each in found) + " |")
        errors = (ours / other - 1 for ours, other in zip(found, theirs, strict=True))
        lines.append("| | error | " + " | ".join(f"{each:+.1%}" for each in errors) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python scripts/cost_model_page.py", description="Errors of the cost model.")
    parser.add_argument("--fit", action="store_true", help="fit coefficients anew and print their table")
    options = parser.parse_args(arguments)
    print(as_table(fit_all()) if options.fit else page(loads_section()), end="")


if __name__ == "__main__":
    main()
