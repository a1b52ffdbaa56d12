"""Long lists of token ids: bounded in number, and held once for all choices of a call, on both sides of the link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripted import READY, make_text_model
from tokenmill.api.encoder import text_call
from tokenmill.api.openai.parse import parse_completion
from tokenmill.api.rules import Rules
from tokenmill.cluster.request_queue import held_tokens
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.events import Abort, Submit
from tokenmill.core.request import Request
from tokenmill.core.sampling import MAX_STOP_TOKENS, SamplingParams
from tokenmill.core.step import Introduction
from tokenmill.core.terms import USUAL
from tokenmill.engine.core import EngineCore
from tokenmill.net.codec import decode, encode
from tokenmill.ops.reference import ReferenceOps
from tokenmill.text.calls import make_requests
from tokenmill.worker.sampler import Sampler

RULES = Rules(vocab_size=5000)
BODY = {"prompt": ["a", "b"], "n": 32, "max_tokens": 4, "stop_token_ids": [7, 3, 7], "allowed_token_ids": [*range(900)]}


def requests_of(body: dict[str, object]) -> list[Request]:
    call, _ = parse_completion(body, RULES)
    given = text_call(call, make_text_model(), "", USUAL, "")
    return make_requests(given, [(1, 2, 3), (4, 5)], READY, root_id="r", arrival_s=0.0, new_seed=lambda: 1)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_the_number_of_ids_is_bounded_and_the_message_says_by_what(name: str) -> None:
    most = {"stop_token_ids": MAX_STOP_TOKENS, "allowed_token_ids": 5000}[name]
    assert parse_completion({"prompt": "a", name: [1] * most}, RULES)
    with pytest.raises(InvalidRequest, match=f"{name} may hold at most {most} tokens, got 400000") as error:
        parse_completion({"prompt": "a", name: [1] * 400_000}, RULES)
    assert error.value.param == name
    with pytest.raises(InvalidRequest, match="at most 1024"):
        SamplingParams(stop_token_ids=(1,) * 1025)


def test_ids_are_kept_in_order_and_once() -> None:
    sampling = SamplingParams(stop_token_ids=[9, 2, 9], allowed_token_ids=(5, 5, 1))  # type: ignore[arg-type]
    assert (sampling.stop_token_ids, sampling.allowed_token_ids) == ((2, 9), (1, 5))
    for wrong in (True, -1, 2**31, "3", 1.0):
        with pytest.raises(InvalidRequest, match="stop_token_ids must be"):
            SamplingParams(stop_token_ids=(1, wrong))  # type: ignore[arg-type]


def test_the_choices_of_a_call_have_their_settings_and_prompts_in_common() -> None:
    requests = requests_of(BODY)
    assert len(requests) == 64 and len({id(request.sampling) for request in requests}) == 1
    assert len({id(request.prompt_tokens) for request in requests}) == 2
    assert held_tokens(requests) == 3 + 2 + 2 + 900
    words = ((1, 2), (3,))
    assert held_tokens([replace(request, bad_words=words) for request in requests]) == 3 + 2 + 2 + 900 + 3


def test_a_message_carries_what_is_shared_once_and_it_is_shared_behind_the_link() -> None:
    requests = tuple(requests_of(BODY))
    data = encode(Submit(requests), 0.0)
    assert len(data) < len(encode(Submit(requests[:1]), 0.0)) + 63 * 60
    received = decode(data, 0.0)
    assert received == Submit(requests) and isinstance(received, Submit)
    assert len({id(request.sampling) for request in received.requests}) == 1
    assert len({id(request.prompt_tokens) for request in received.requests}) == 2


def test_the_engine_shares_what_came_in_different_messages_and_lets_go_of_it() -> None:
    core = EngineCore(EngineConfig(groups=full_groups(64), max_model_len=64))
    for request in requests_of(BODY)[:8]:
        message = decode(encode(Submit((request,)), 0.0), 0.0)
        assert isinstance(message, Submit)
        core.handle(message, 0.0)
    sequences = list(core.state.by_id.values())
    assert len({id(seq.request.sampling) for seq in sequences}) == len({id(seq.stop_ids) for seq in sequences}) == 1
    assert sequences[0].stop_ids == {2, 3, 7}
    for seq in sequences:
        core.handle(Abort((seq.request.id,)), 0.0)
    core.check()
    assert not len(core.state.settings)


def test_the_sampler_shares_the_arrays_of_one_call() -> None:
    sampler = Sampler(ReferenceOps(), 5000, 4, 64)
    sampling = SamplingParams(allowed_token_ids=tuple(range(4000)), min_tokens=1, stop_token_ids=(3,))
    for slot in range(4):
        sampler.introduce(slot, Introduction((1,), (), sampling, 0, slot, (2,)))
    assert len({id(adjustment.mask) for adjustment in sampler._adjustments.values()}) == 1
    other = SamplingParams(allowed_token_ids=(1, 9))
    sampler.introduce(0, Introduction((1,), (), other, 0, 0, (2,)))
    assert len({id(adjustment.mask) for adjustment in sampler._adjustments.values()}) == 2
    assert len(sampler._lists) == 2
    for slot in range(4):
        sampler.release(slot)
    sampler.hand_over_masks()
    assert not len(sampler._lists), "what no slot uses any more is kept"
