"""What a client saw of its request, against the same request run alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.block import num_hidden_blocks
from ..core.errors import EngineFailed, Overloaded
from ..core.events import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, Output
from ..core.request import EXPORT, Request
from ..core.step import TokenLogprob
from ..sched.admission import refusal
from .store import Stored, keys_of
from .toy_model import SoloAnswer, solo_answer
from .workload import VOCAB_SIZE, Scenario


@dataclass(slots=True, eq=False)
class ClientStream:
    """What a client has seen of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Output | None = None
    is_cancelled: bool = False

    def take(self, output: Output) -> None:
        """An output has come; counts must be those of what has been seen."""
        assert self.end is None, f"{output.request_id} went on after its end: {output}"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        num_new = len(self.tokens) + (output.stop_token is not None)
        assert output.num_output == len(self.request.output_tokens) + num_new, output
        if output.finish_reason is not None:
            self.end = output


def check_stream(stream: ClientStream, scenario: Scenario, num_failures: int) -> str:
    """Compare one stream with its solo run; returns how it ended."""
    request, end = stream.request, stream.end
    assert end is not None
    answer = solo_answer(request, VOCAB_SIZE)
    tokens = tuple(stream.tokens)
    assert tokens == answer.tokens[: len(tokens)], f"{request.id}: {tokens} instead of {answer.tokens}"
    wants = request.sampling.logprobs is not None
    assert len(stream.logprobs) == (len(tokens) if wants else 0), f"{request.id}: {stream.logprobs}"
    if wants:
        assert all(entry.token == token for entry, token in zip(stream.logprobs, tokens, strict=True)), request.id
    if tokens or end.stop_token is not None:
        assert tuple(stream.prompt_logprobs) == answer.prompt_logprobs, f"{request.id}: prompt logprobs"
    if end.finish_reason == FINISH_ABORT:
        assert stream.is_cancelled, f"{request.id} was aborted by nobody"
        return FINISH_ABORT
    if end.finish_reason == FINISH_ERROR:
        _check_error(end, request, scenario, num_failures)
        return end.error_kind
    _check_whole(stream, end, answer)
    return str(end.finish_reason)


def check_saved(stream: ClientStream, scenario: Scenario, stored: Stored) -> None:
    """To be asked as the stream's end has come: whether the KV that was promised lies in the store."""
    request, end, config = stream.request, stream.end, scenario.config
    assert end is not None
    if not end.is_saved:
        has_ended = end.finish_reason in (FINISH_STOP, FINISH_LENGTH)
        assert request.handoff != EXPORT or not has_ended or scenario.failure_rate, f"{request.id} was not saved"
        return
    assert request.handoff == EXPORT, f"{request.id} was saved unasked"
    num_computed = len(request.prompt_tokens) + end.num_output - 1
    keys = keys_of(request, stream.tokens, config)[: num_computed // config.block_size]
    for number, group in enumerate(config.groups):
        # Rows that were in flight when it ended may have moved a window on.
        hidden = num_hidden_blocks(num_computed + config.steps_in_flight, group.window, config.block_size)
        missing = [index for index, key in enumerate(keys) if index >= hidden and (number, key) not in stored]
        assert not missing, f"{request.id}: blocks {missing} of group {number} were said to be saved"


def _check_error(end: Output, request: Request, scenario: Scenario, num_failures: int) -> None:
    lasting = refusal(request, scenario.config, 0)
    if end.error_kind == EngineFailed.kind:
        assert num_failures > 0, f"{request.id}: {end.error}"
    elif end.error_kind == Overloaded.kind:
        assert scenario.config.max_num_waiting < len(scenario.requests), f"{request.id}: {end.error}"
    else:
        assert lasting is not None and end.error == lasting.message, f"{request.id}: {end.error}"


def _check_whole(stream: ClientStream, end: Output, answer: SoloAnswer) -> None:
    name = stream.request.id
    assert tuple(stream.tokens) == answer.tokens, f"{name}: {stream.tokens} instead of {answer.tokens}"
    assert (end.finish_reason, end.stop_token) == (answer.finish_reason, answer.stop_token), f"{name}: {end}"
    timing = end.timing
    assert timing is not None, name
    # A timer may fire a clock resolution early.
    assert timing.arrival_s < timing.scheduled_s + 1e-6, f"{name}: {timing}"
    assert timing.scheduled_s < timing.first_token_s <= timing.finished_s, f"{name}: {timing}"
