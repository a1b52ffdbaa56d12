"""Prints the tables of docs/develop/oracle.md, or writes them there: `python tests/oracle/report.py [--write]`.

Needs the native backend, torch and transformers; takes about a minute. llama.cpp's figures come from the goldens.
"""

from __future__ import annotations

import argparse

import numpy as np
import real_model
from real_model import HERE, View, goldens

from tokenmill import LLM
from tokenmill.formats.hub import resolve_model

PAGE = HERE.parents[1] / "docs" / "develop" / "oracle.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/develop/oracle.md")
    options = parser.parse_args()
    path = resolve_model("smollm2").path
    with LLM(str(path), backend="native", kv_cache_memory_bytes=1 << 30) as llm:
        score = real_model.build_transformers(path)
        ours, exact = real_model.our_views(llm), real_model.transformers_views(score)
        tables = "\n".join([agreement_table(ours, exact), perplexity_table(llm, score), prompt_table(ours, exact)])
        tables = f"Kernels: {dict(llm.ready.facts)['kernels']}.\n\n{tables}"
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{tables}{END}{rest.partition(END)[2]}")
    else:
        print(tables)


def agreement_table(ours: list[View], exact: list[View]) -> str:
    llama, flash = real_model.llama_views(), real_model.llama_views(flash=True)
    pairs = [
        ("tokenmill", "llama.cpp", ours, llama),
        ("llama.cpp with flash attention", "llama.cpp", flash, llama),
        ("tokenmill", "transformers float32", ours, exact),
        ("llama.cpp", "transformers float32", llama, exact),
        ("llama.cpp with flash attention", "transformers float32", flash, exact),
    ]
    rows = []
    for name, judge, views, reference in pairs:
        error = real_model.errors(views, reference)
        gaps = [gap.gap for gap in real_model.disagreements(views, reference)]
        rows.append(
            f"| {name} | {judge} | {error.mean():.4f} | {np.percentile(error, 99):.3f} | {error.max():.3f} |"
            f" {1 - len(gaps) / len(error):.2%} | {max(gaps):.3f} |"
        )
    num_tokens = sum(len(prompt["tokens"]) for prompt in goldens()["prompts"])
    return "\n".join(
        [
            f"{len(goldens()['prompts'])} prompts, {num_tokens} tokens of continuation:",
            "",
            "| engine | against | mean error | 99 % | largest | same first choice | largest preference overturned |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def perplexity_table(llm: LLM, score: real_model.Score) -> str:
    rows = []
    for passage in real_model.passages(llm):
        ours = real_model.perplexity(real_model.our_window_logprobs(llm, passage))
        exact = real_model.perplexity(real_model.transformers_window_logprobs(score, passage))
        llama, flash = passage.golden["perplexity"], passage.golden["flash_perplexity"]
        rows.append(
            f"| {passage.name} | {len(passage.windows)} | {ours:.4f} | {llama:.4f} | {ours / llama - 1:+.2%} |"
            f" {flash:.4f} | {exact:.4f} |"
        )
    return "\n".join(
        [
            "| text | windows | tokenmill | llama.cpp | difference | llama.cpp, flash attention | float32 |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def prompt_table(ours: list[View], exact: list[View]) -> str:
    """Tokens until an engine's first choice leaves llama.cpp's continuation, and what llama.cpp thought of it."""
    llama, flash = real_model.llama_views(), real_model.llama_views(flash=True)
    first_gap = {}
    for gap in real_model.disagreements(ours, llama):
        first_gap.setdefault(gap.prompt, gap)
    lines = ["| prompt | tokens | tokenmill | preference overturned | llama.cpp, flash attention | float32 |"]
    lines.append("|---|---|---|---|---|---|")
    for prompt, own, f, e in zip(goldens()["prompts"], ours, flash, exact, strict=True):
        tokens = np.array(prompt["tokens"])
        gap = first_gap.get(prompt["name"])
        reached = " | ".join(
            [
                reach(own.choices, tokens),
                f"{gap.gap:.3f}" if gap is not None else "",
                reach(f.choices, tokens),
                reach(e.choices, tokens),
            ]
        )
        lines.append(f"| {prompt['name']} | {len(tokens)} | {reached} |")
    equal = " | ".join(str(real_model.num_equal_continuations(views)) for views in (flash, exact))
    lines.append(f"| equal to the end | {len(llama)} | {real_model.num_equal_continuations(ours)} | | {equal} |")
    return "\n".join([*lines, ""])


def reach(choices: np.ndarray, tokens: np.ndarray) -> str:
    different = np.flatnonzero(choices != tokens)
    return "all" if len(different) == 0 else str(int(different[0]))


if __name__ == "__main__":
    main()
