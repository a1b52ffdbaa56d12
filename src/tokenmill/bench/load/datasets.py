"""Synthetic loads and prompts from files: random lengths, shared prefixes, conversations, JSONL, ShareGPT.

Each function draws a plan from a seed; nothing is sent and no text is made. The names of settings follow
`vllm bench serve` where it has them, and so does what is left out of ShareGPT's conversations: prompts or answers
shorter than MIN_TOKENS, prompts longer than MAX_PROMPT, and both together longer than MAX_TOTAL. Of each conversation
with at least two turns the first is the prompt and the tokens of the second are the length of the answer. Counts of
what was left out are in the result.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ...core.errors import ConfigError
from ...text.files import read_jsonl, read_lines
from .material import Vocabulary
from .plan import Call, Drawn, Literal, Message, Part, Plan, Reply, generator


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt and of its answer; each drawn evenly from length * (1 - range_ratio) to length *
    (1 + range_ratio), at least 1."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise ConfigError("Input and output lengths must be at least 1 token.", param="random_input_len")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--random-range-ratio is from 0 to below 1, got {self.range_ratio}.")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._around(rng, self.input_len), self._around(rng, self.output_len)

    def _around(self, rng: random.Random, length: int) -> int:
        return rng.randint(
            max(1, math.floor(length * (1 - self.range_ratio))), math.ceil(length * (1 + self.range_ratio))
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of one request where it takes several: num_texts to embed or to rank, and the tokens of a query before
    them (0: none)."""

    num_texts: int = 1
    query_len: int = 0


def random_prompts(num: int, seed: int, lengths: Lengths, prefix_len: int = 0, batch: Batch | None = None) -> Plan:
    """Prompts that share nothing, or the first prefix_len tokens (which come on top of the input length)."""
    rng = generator(seed, "lengths")
    shared: tuple[Part, ...] = (Drawn("prefix", prefix_len),) if prefix_len else ()
    batch = batch or Batch()
    calls = []
    for i in range(num):
        messages: list[Message] = []
        if batch.query_len:
            messages.append(Message("user", (Drawn(f"query/{i}", batch.query_len),)))
        output_len = 0
        for text in range(batch.num_texts):
            input_len, output_len = lengths.draw(rng)
            key = f"request/{i}/{text}" if text else f"request/{i}"
            messages.append(Message("user", (*shared, Drawn(key, input_len))))
        calls.append(Call(i, tuple(messages), output_len, session=f"request-{i}"))
    return Plan(tuple(calls), seed, {"name": "random", **asdict(lengths), "prefix_len": prefix_len, **asdict(batch)})


def shared_prefixes(num: int, seed: int, lengths: Lengths, num_groups: int, prefix_len: int) -> Plan:
    """num_groups groups, each with its own prefix of prefix_len tokens; a request's group is drawn evenly."""
    if num_groups < 1 or prefix_len < 1:
        raise ConfigError("--num-prefixes and --prefix-len must be at least 1.", param="num_prefixes")
    rng = generator(seed, "lengths")
    calls = []
    for i in range(num):
        group = rng.randrange(num_groups)
        input_len, output_len = lengths.draw(rng)
        # The group is a system message, so that in chat too the prompts of a group share their beginning.
        messages = (
            Message("system", (Drawn(f"group/{group}", prefix_len),)),
            Message("user", (Drawn(f"request/{i}", input_len),)),
        )
        calls.append(Call(i, messages, output_len, session=f"request-{i}", group=f"group-{group}"))
    facts = {"name": "shared-prefix", **asdict(lengths), "num_prefixes": num_groups, "prefix_len": prefix_len}
    return Plan(tuple(calls), seed, facts)


def conversations(
    num: int, seed: int, lengths: Lengths, num_turns: int, think_time_s: float, system_len: int = 0
) -> Plan:
    """Conversations of num_turns turns, `num` requests in all. Each turn's prompt is the whole conversation so far and
    a new message; it is due an exponential think time (mean think_time_s) after the turn before has ended."""
    if num_turns < 1 or think_time_s < 0:
        raise ConfigError("--num-turns must be at least 1 and --think-time not negative.", param="num_turns")
    rng = generator(seed, "conversations")
    calls: list[Call] = []
    session = -1
    history: tuple[Message, ...] = ()
    for i in range(num):
        turn = i % num_turns
        if turn == 0:
            session += 1
            history = (Message("system", (Drawn("system", system_len),)),) if system_len else ()
        input_len, output_len = lengths.draw(rng)
        asked = (*history, Message("user", (Drawn(f"session/{session}/{turn}", input_len),)))
        think_s = rng.expovariate(1.0 / think_time_s) if think_time_s and turn else 0.0
        after = (i - 1,) if turn else ()
        calls.append(Call(i, asked, output_len, after, think_s, f"session-{session}", turn))
        history = (*asked, Message("assistant", (Reply(i, output_len),)))
    facts = {"name": "multi-turn", **asdict(lengths), "num_turns": num_turns, "think_time_s": think_time_s}
    return Plan(tuple(calls), seed, facts | {"system_len": system_len})


def prompts_of_file(path: Path, num: int, seed: int, output_len: int, column: str | None = None) -> Plan:
    """The rows of a JSONL file (.gz too), each a prompt: `column`, else the first of prompt, text, question, turns,
    messages that a row has. A list of texts is a conversation of user turns, `messages` a chat to continue; `tenant`,
    `group` and `max_tokens` are taken where given. Fewer rows than num: they repeat, shuffled by the seed."""
    rows = list(read_jsonl(path))
    if not rows:
        raise ConfigError(f"{path} has no rows.", param="dataset_path")
    order: list[int] = []
    rng = generator(seed, "order")
    while len(order) < num:
        turn = list(range(len(rows)))
        rng.shuffle(turn)
        order += turn
    calls: list[Call] = []
    for n, row_index in enumerate(order):
        if len(calls) >= num:
            break
        row = rows[row_index]
        limit = row.get("max_tokens") or output_len
        if not isinstance(limit, int) or limit < 1:
            raise ConfigError(f"{path}, row {row_index + 1}, has max_tokens {limit!r}.", param="dataset_path")
        tenant, group = str(row.get("tenant", "")), str(row.get("group", ""))
        history: tuple[Message, ...] = ()
        for turn_index, new in enumerate(_turns_of(row, column, path, row_index)):
            i = len(calls)
            asked = (*history, *new)
            after = (i - 1,) if turn_index else ()
            calls.append(Call(i, asked, limit, after, 0.0, f"row-{n}", turn_index, tenant, group))
            history = (*asked, Message("assistant", (Reply(i, limit),)))
    facts = {"name": "jsonl", "path": str(path), "num_rows": len(rows), "output_len": output_len, "column": column}
    return Plan(tuple(calls[:num]), seed, facts)


PROMPT_COLUMNS = ("prompt", "text", "question", "turns", "messages")


def _turns_of(row: dict[str, Any], column: str | None, path: Path, index: int) -> list[tuple[Message, ...]]:
    """For each turn, the messages it adds."""
    name = column or next((name for name in PROMPT_COLUMNS if name in row), None)
    value = row.get(name) if name is not None else None
    if isinstance(value, str):
        return [(Message("user", (Literal(value),)),)]
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return [(Message("user", (Literal(text),)),) for text in value]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        chat = [
            Message(str(item.get("role", "user")), (Literal(str(item.get("content") or "")),))
            for item in cast("list[dict[str, Any]]", value)
        ]
        return [tuple(chat)]
    wanted = column or ", ".join(PROMPT_COLUMNS)
    raise ConfigError(f"{path}, row {index + 1}, has no text in {wanted}.", param="dataset_path")


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
