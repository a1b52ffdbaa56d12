"""What lm-eval found through the server, beside what transformers finds with the same weights and token ids.

    python tests/oracle/lm_eval_choices.py samples_TASK_DATE.jsonl [MODEL.gguf]
    python tests/oracle/lm_eval_choices.py --items bbh.jsonl.gz items.jsonl     # writes 200 short questions of BBH

reads the samples that `lm_eval --log_samples` has written of a task of multiple choice (docs/operate/quality.md), gives
each choice its log likelihood by transformers at float32, and prints how many choices are the same and both scores. It
needs torch and transformers. A text is split where lm-eval splits it: the tokens of context and choice together, behind
as many as the context has alone.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import real_model

from tokenmill.formats.hub import resolve_model
from tokenmill.text.text_model import fetch_text


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


def write_items(bbh: str, out: str) -> None:
    """Questions of up to 400 characters with up to 5 answers, each answer its text without the letter."""
    found = []
    with gzip.open(bbh, "rt") as file:
        for row in map(json.loads, file):
            question, _, rest = row["input"].partition("\nOptions:\n")
            options = re.findall(r"^\(([A-Z])\) (.+)$", rest, re.MULTILINE)
            names = [f"({letter})" for letter, _ in options]
            if len(options) >= 2 and row["target"] in names:
                texts = [text for _, text in options]
                found.append({"question": question, "choices": texts, "answer": names.index(row["target"])})
    random.Random(1).shuffle(found)
    short = [each for each in found if len(each["question"]) < 400 and len(each["choices"]) <= 5]
    Path(out).write_text("".join(json.dumps(each) + "\n" for each in short[:200]))


def main(samples: str, model_name: str = "smollm2") -> None:
    tokenizer = fetch_text(model_name).tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special=False))

    model = real_model.transformers_model(resolve_model(model_name).path)
    num_same, right, errors = 0, np.zeros(2, dtype=int), []
    rows = [json.loads(line) for line in Path(samples).read_text().splitlines()]
    for row in rows:
        asked = list(row["arguments"].values())
        served = [float(log_likelihood) for log_likelihood, _ in row["filtered_resps"]]
        ours = likelihoods(model, encode, asked[0]["arg_0"], [each["arg_1"] for each in asked])
        errors += [abs(one - other) for one, other in zip(served, ours, strict=True)]
        chosen = int(np.argmax(served)), int(np.argmax(ours))
        num_same += chosen[0] == chosen[1]
        right += [choice == int(row["target"]) for choice in chosen]
    print(f"same choice       {num_same} of {len(rows)}, {100 * num_same / len(rows):.1f} %")
    print(f"score, server     {100 * right[0] / len(rows):.1f} %")
    print(f"score, float32    {100 * right[1] / len(rows):.1f} %")
    print(f"log likelihoods   differ by {np.mean(errors):.4f} in the mean, {np.max(errors):.3f} at most")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--items"]:
        write_items(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
