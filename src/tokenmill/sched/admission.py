"""Whether an engine takes a request at all: a pure policy that returns the refusal, for the caller to phrase."""

from __future__ import annotations

from ..core.config import EngineConfig
from ..core.errors import ContextTooLong, InvalidRequest, Overloaded, TokenmillError
from ..core.request import Request


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` slots."""
    return -(-num_tokens // block_size)


def refusal(request: Request, config: EngineConfig, num_waiting: int) -> TokenmillError | None:
    """Why `request` cannot be admitted, or None.

    A request is refused for good when its whole length exceeds the context or the pool, since nothing that others do
    would ever make it fit; it is refused for now when the queue is full.
    """
    error = _vector_refusal(request, config) if request.pooling is not None else _text_refusal(request, config)
    if error is None and num_waiting >= config.max_num_waiting:
        return Overloaded(f"{num_waiting} requests are waiting already. Try again shortly.")
    return error


def _vector_refusal(request: Request, config: EngineConfig) -> TokenmillError | None:
    num_prompt = len(request.prompt_tokens)
    most, holder = config.max_model_len, "this model's context"
    if not config.num_blocks and config.max_num_batched_tokens < most:
        most, holder = config.max_num_batched_tokens, "a step, in which this model must see the whole input,"
    if config.num_blocks and config.num_blocks * config.block_size < most:
        most, holder = config.num_blocks * config.block_size, "the KV cache"
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
    if blocks_for(num_total - 1, config.block_size) > config.num_blocks:  # The last token's KV is never computed.
        return ContextTooLong(
            f"The prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}: {num_total} together, but the "
            f"KV cache holds {config.num_blocks * config.block_size}. Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    if num_output >= request.max_tokens:
        return InvalidRequest(
            f"output_tokens already holds {num_output} tokens and max_tokens is {request.max_tokens}: nothing is left "
            "to produce.",
            param="output_tokens",
        )
    return None
