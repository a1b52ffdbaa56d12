"""What lm-eval finds through the server, beside what transformers finds with the same weights and token ids.

    PYTHONPATH=src python tests/oracle/lm_eval_choices.py --bbh bbh.jsonl.gz [--model MODEL]
    PYTHONPATH=src python tests/oracle/lm_eval_choices.py --samples samples_TASK_DATE.jsonl [--model MODEL]

The first serves the model and has lm-eval (`make lm-eval`) ask 200 questions of BBH in two forms: the choices are the
texts of the answers, or their letters alone behind a question that lists them. The second reads what `lm_eval
--log_samples` has written of a task of multiple choice (docs/operate/quality.md). Each choice then gets its log
likelihood by transformers at float32, and how many choices are the same is printed, with both scores. It needs torch
and transformers. A text is split where lm-eval splits it: the tokens of context and choice together, behind as many as
the context has alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import real_model

from tokenmill.formats.hub import resolve_model
from tokenmill.text.text_model import fetch_text

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS / "live")]

from serving import Server  # noqa: E402

from lm_eval_task import CHOSEN, COMMAND, run_task  # noqa: E402

NUM_ITEMS = 200
ASKED = {"doc_to_text": "Q: {{question}}\nA:"}


def likelihoods(model: Any, encode: Callable[[str], list[int]], context: str, choices: Sequence[str]) -> list[float]:
    """Log likelihood of each choice behind the context, which is computed once."""
    import torch

    num_before = len(encode(context))
    whole = [encode(context + choice) for choice in choices]
    before = whole[0][:num_before]
    assert all(ids[:num_before] == before for ids in whole), "a choice changes how the context is split"
    with torch.inference_mode():
        given = model(torch.tensor([before[:-1]]), use_cache=True)
        found = []
        for ids in whole:
            rest = ids[num_before:]
            logits = model(torch.tensor([[before[-1], *rest[:-1]]]), past_key_values=given.past_key_values).logits[0]
            given.past_key_values.crop(-len(rest))
            logprobs = logits.double().log_softmax(dim=1)
            found.append(float(logprobs[torch.arange(len(rest)), torch.tensor(rest)].sum()))
    return found


def bbh_items(bbh: str) -> dict[str, list[dict[str, Any]]]:
    """Items by form, the same at each call: of questions of up to 400 characters with up to 5 answers."""
    rows = []
    with gzip.open(bbh, "rt") as file:
        for row in map(json.loads, file):
            question, _, rest = row["input"].partition("\nOptions:\n")
            options = re.findall(r"^\(([A-Z])\) (.+)$", rest, re.MULTILINE)
            letters = [f"({letter})" for letter, _ in options]
            if len(options) >= 2 and row["target"] in letters:
                texts = [text for _, text in options]
                rows.append((question, row["input"], texts, letters, letters.index(row["target"])))
    random.Random(1).shuffle(rows)
    chosen = [row for row in rows if len(row[0]) < 400 and len(row[2]) <= 5][:NUM_ITEMS]
    return {
        "texts": [{"question": row[0], "choices": row[2], "answer": row[4]} for row in chosen],
        "letters": [{"question": row[1], "choices": row[3], "answer": row[4]} for row in chosen],
    }


def compare(samples: Sequence[dict[str, Any]], model: Any, encode: Callable[[str], list[int]]) -> None:
    """Prints how the server's choices and those of transformers differ."""
    num_same, right, errors = 0, np.zeros(2, dtype=int), []
    for sample in samples:
        asked = list(sample["arguments"].values())
        served = [float(log_likelihood) for log_likelihood, _ in sample["filtered_resps"]]
        ours = likelihoods(model, encode, asked[0]["arg_0"], [each["arg_1"] for each in asked])
        errors += [abs(one - other) for one, other in zip(served, ours, strict=True)]
        chosen = int(np.argmax(served)), int(np.argmax(ours))
        num_same += chosen[0] == chosen[1]
        right += [choice == int(sample["target"]) for choice in chosen]
    print(f"same choice       {num_same} of {len(samples)}, {100 * num_same / len(samples):.1f} %")
    print(f"score, server     {100 * right[0] / len(samples):.1f} %")
    print(f"score, float32    {100 * right[1] / len(samples):.1f} %")
    print(f"log likelihoods   differ by {np.mean(errors):.4f} in the mean, {np.max(errors):.3f} at most", flush=True)


def ask_bbh(bbh: str, name: str) -> dict[str, list[dict[str, Any]]]:
    """Samples by form, asked by lm-eval of a server that ends before any is compared."""
    if not COMMAND.exists():
        raise SystemExit(f"There is no lm-eval at {COMMAND}: make lm-eval installs it.")
    found = {}
    with Server("--enable-tokenizer-info-endpoint", "--served-model-name", "asked", model=name) as server:
        for form, items in bbh_items(bbh).items():
            with tempfile.TemporaryDirectory() as folder:
                found[form] = run_task(server.url, Path(folder), items, CHOSEN | ASKED, served_name="asked")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Choices through the server, beside those of transformers.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--bbh", metavar="FILE", help="questions of BBH: input and target, JSON lines, gzip")
    what.add_argument("--samples", metavar="FILE", help="what lm_eval --log_samples has written")
    parser.add_argument("--model", default="smollm2", metavar="MODEL", help="(default: smollm2)")
    args = parser.parse_args()
    if args.bbh:
        asked = ask_bbh(args.bbh, args.model)
    else:
        asked = {"samples": [json.loads(line) for line in Path(args.samples).read_text().splitlines()]}
    tokenizer = fetch_text(args.model).tokenizer
    model = real_model.transformers_model(resolve_model(args.model).path)
    for form, samples in asked.items():
        print(f"{form}:")
        compare(samples, model, lambda text: list(tokenizer.encode(text, add_special=False)))


if __name__ == "__main__":
    main()
