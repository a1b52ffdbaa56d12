"""Conversations in ShareGPT's form, filtered as `vllm bench serve --dataset-name sharegpt` filters them.

Of each conversation with at least two turns the first is the prompt and the length of the second that of the answer,
counted by the tokenizer. Left out are prompts or answers shorter than MIN_TOKENS, prompts longer than MAX_PROMPT, and
both together longer than MAX_TOTAL. Counts of what was left out are in the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .datasets import read_jsonl, read_lines
from .material import Vocabulary
from .plan import Call, Literal, Message, Plan, generator

MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048


def sharegpt(path: Path, num: int, seed: int, vocabulary: Vocabulary | None, output_len: int | None) -> Plan:
    """num requests of a file: one JSON list, or a conversation a line (.gz too), in an order drawn by the seed, again
    from the beginning where there are too few. output_len: of all answers, instead of the answers' own. Raises
    ConfigError."""
    if vocabulary is None:
        raise ConfigError(
            "--dataset-name sharegpt needs --tokenizer: lengths of prompts and answers are counted by it.",
            param="tokenizer",
        )
    if output_len is not None and output_len < 1:
        raise ConfigError("--sharegpt-output-len must be at least 1.", param="sharegpt_output_len")
    rows = list(_conversations(path))
    order = list(range(len(rows)))
    generator(seed, "order").shuffle(order)
    kept: list[tuple[str, int]] = []
    num_left_out = 0
    for i in order:
        if len(kept) == num:
            break
        found = _first_exchange(rows[i], vocabulary, output_len)
        num_left_out += found is None
        kept += [found] if found is not None else []
    if not kept:
        raise ConfigError(f"{path} has no conversation of two turns of fitting length.", param="dataset_path")
    calls = []
    for i in range(num):
        prompt, answer_len = kept[i % len(kept)]
        calls.append(Call(i, (Message("user", (Literal(prompt),)),), answer_len, session=f"request-{i}"))
    remarks = []
    if num_left_out:
        remarks.append(f"ShareGPT: {num_left_out} conversations were left out, too short, too long or of one turn.")
    if len(kept) < num:
        remarks.append(f"ShareGPT: {len(kept)} conversations are used again and again for {num} requests.")
    facts = {"name": "sharegpt", "path": str(path), "num_rows": len(rows), "num_left_out": num_left_out}
    return Plan(tuple(calls), seed, facts | {"output_len": output_len}, remarks=tuple(remarks))


def _conversations(path: Path) -> Iterator[dict[str, Any]]:
    first = next((line.lstrip() for line in read_lines(path) if line.strip()), "")
    if not first.startswith("["):
        yield from read_jsonl(path)
        return
    try:
        rows = json.loads("".join(read_lines(path)))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.", param="dataset_path") from None
    yield from (row for row in rows if isinstance(row, dict))


def _first_exchange(row: dict[str, Any], vocabulary: Vocabulary, output_len: int | None) -> tuple[str, int] | None:
    """(prompt, tokens of the answer), or None where it is left out."""
    turns = row.get("conversations", row.get("conversation"))
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    prompt, answer = texts
    if not isinstance(prompt, str) or not isinstance(answer, str):
        return None
    prompt_len = len(vocabulary.encode(prompt))
    answer_len = output_len if output_len is not None else len(vocabulary.encode(answer))
    is_short = prompt_len < MIN_TOKENS or (output_len is None and answer_len < MIN_TOKENS)
    is_long = prompt_len > MAX_PROMPT or prompt_len + answer_len > MAX_TOTAL
    return None if is_short or is_long else (prompt, answer_len)
