"""Whether an engine accepts a request at all, and whether a waiting one fits its KV pools now. Pure."""

from __future__ import annotations

from collections.abc import Sequence as List

from ..core.block import STATE, KVGroupSpec
from ..core.config import EngineConfig
from ..core.errors import ContextTooLong, InvalidRequest, Overloaded, TokenmillError
from ..core.request import Request
from ..core.sequence import Sequence
from ..kv.blocks.groups import Match


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` slots."""
    return -(-num_tokens // block_size)


def most_blocks(config: EngineConfig, group: KVGroupSpec) -> int:
    """Blocks of the group that one sequence is expected to keep from others at most: with a window, what a query sees
    and what the chunks in flight write; of states, the one that each of these ends with."""
    if not group.window:
        return group.num_blocks
    if group.kind == STATE:
        return min(group.num_blocks, 1 + config.steps_in_flight)
    num_in_flight = config.max_num_batched_tokens * config.steps_in_flight
    return min(group.num_blocks, 1 + blocks_for(group.window - 1 + num_in_flight, config.block_size))


def max_running(config: EngineConfig) -> int:
    """Most sequences running at once: every one of them must get a token in a step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)


def capacity(config: EngineConfig) -> int:
    """Slots that one sequence can have, alone in the engine. A pool with a window bounds nothing if what a query sees
    fits it, wherever the borders of blocks fall."""
    size = config.block_size
    bounds = (
        group.num_blocks * size
        for group in config.groups
        if not group.window or group.num_blocks <= blocks_for(group.window - 1, size)
    )
    return min(bounds, default=config.max_model_len)


def refusal(request: Request, config: EngineConfig, num_waiting: int) -> TokenmillError | None:
    """Why `request` cannot be admitted, or None.

    A request is refused for good when its whole length exceeds the context or a pool, since nothing that others do
    would ever make it fit; it is refused for now when the queue is full, unless another engine had let it in.
    """
    num_contents = len({one.digest for one in request.embeds})
    if config.encoder is not None and num_contents > config.encoder.num_blocks:
        return ContextTooLong(
            f"The prompt has {num_contents} different images or sounds, but the cache of what is made of them holds "
            f"{config.encoder.num_blocks}.",
            param="prompt",
        )
    error = _vector_refusal(request, config) if request.pooling is not None else _text_refusal(request, config)
    if error is None and num_waiting >= config.max_num_waiting and not request.is_resumed:
        return Overloaded(f"{num_waiting} requests are waiting already. Try again shortly.")
    return error


def _vector_refusal(request: Request, config: EngineConfig) -> TokenmillError | None:
    num_prompt = len(request.prompt_tokens)
    most, holder = config.max_model_len, "this model's context"
    if not config.keeps_kv and config.max_num_batched_tokens < most:
        most, holder = config.max_num_batched_tokens, "a step, in which this model must see the whole input,"
    if config.keeps_kv and capacity(config) < most:
        most, holder = capacity(config), "the KV cache"
    if num_prompt <= most:
        return None
    return ContextTooLong(
        f"The input has {num_prompt} tokens, but {holder} holds {most}. Shorten it, or have it cut by "
        "truncate_prompt_tokens.",
        param="input",
    )


def _text_refusal(request: Request, config: EngineConfig) -> TokenmillError | None:
    num_prompt, num_output = len(request.prompt_tokens), len(request.output_tokens)
    num_total = num_prompt + request.max_tokens
    if num_total > config.max_model_len:
        return ContextTooLong(
            f"The prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}: {num_total} together, but "
            f"this model's context holds {config.max_model_len}. Shorten the prompt or lower max_tokens.",
            param="max_tokens" if num_prompt < config.max_model_len else "prompt",
        )
    room = capacity(config)
    if num_total - 1 > room:  # The last token's KV is never computed.
        return ContextTooLong(
            f"The prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}: {num_total} together, but the "
            f"KV cache holds {room}. Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    if num_output >= request.max_tokens:
        return InvalidRequest(
            f"output_tokens already holds {num_output} tokens and max_tokens is {request.max_tokens}: nothing is left "
            "to produce.",
            param="output_tokens",
        )
    return None


def has_room(
    config: EngineConfig,
    seq: Sequence,
    matched: Match,
    available: List[int],
    num_others: int,
    prefilling: List[Sequence],
) -> bool:
    """Beside `num_others` that run, which may grow by a block each, and of whom some are still `prefilling`."""
    to_come = blocks_to_come(config, seq, matched)
    for index, group in enumerate(config.groups):
        needed = to_come[index] + num_others
        for other in prefilling:
            table = other.tables[index]
            needed += _num_to_come(config, group, other, table.num_released, table.num_held)
        if needed > available[index]:
            return False
    return True


def blocks_to_come(config: EngineConfig, seq: Sequence, matched: Match) -> list[int]:
    """Blocks of each group that a waiting sequence takes beyond those in `matched`."""
    return [
        _num_to_come(config, group, seq, matched.num_blocks - len(blocks), len(blocks))
        for group, blocks in zip(config.groups, matched.blocks, strict=True)
    ]


def blocks_given(available: List[int], given: List[Sequence]) -> list[int]:
    """Blocks of each group that are available if those in `given` are preempted."""
    return [num + sum(seq.tables[index].num_held for seq in given) for index, num in enumerate(available)]


def _num_to_come(config: EngineConfig, group: KVGroupSpec, seq: Sequence, num_released: int, num_held: int) -> int:
    """Blocks of one group that the known tokens of a sequence take beyond those it holds."""
    num_blocks = blocks_for(len(seq.tokens), config.block_size)
    return max(0, min(num_blocks - num_released, most_blocks(config, group)) - num_held)
