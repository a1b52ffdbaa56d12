"""Request validation: each bad value is refused with the field named, and each good one reaches the engine's terms."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.api.common_fields import NO_LIMITS, with_drafts
from tokenmill.api.fields import parse_object
from tokenmill.api.openai.parse import parse_chat, parse_completion
from tokenmill.api.openai.tokenize import parse_detokenize, parse_tokenize
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import EXPORT, IMPORT
from tokenmill.core.terms import Terms
from tokenmill.text.chat_format import ChatFormat

RULES = Rules(vocab_size=100, defaults={"temperature": 0.5, "top_k": 7})
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}

BAD_BOTH: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("n", 1.5), ("n", True), ("n", "2"),
    ("temperature", -0.1), ("temperature", "hot"), ("temperature", True), ("temperature", 10**400),
    ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("min_p", [0.1]),
    ("repetition_penalty", 0), ("presence_penalty", 2.5), ("frequency_penalty", -2.5),
    ("seed", "x"), ("seed", 2**64), ("seed", 1.5), ("max_tokens", -1), ("max_tokens", "16"), ("max_tokens", 0),
    ("min_tokens", -1), ("stop", 5), ("stop", [1]), ("stop", ["a"] * 17), ("stop", ""), ("stop", "x" * 1025),
    ("stop_token_ids", 3), ("stop_token_ids", [-1]), ("stop_token_ids", [100]), ("stop_token_ids", ["a"]),
    ("logit_bias", []), ("logit_bias", {"a": 1}), ("logit_bias", {"100": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": 101}), ("logit_bias", {"1": "x"}), ("logit_bias", {"1": 10**400}),
    ("logit_bias", {"9" * 5000: 1}), ("logit_bias", {"0" * 12 + "999": 1}),
    ("allowed_token_ids", []), ("allowed_token_ids", [100]), ("ignore_eos", 1), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("prompt_logprobs", 21), ("prompt_logprobs", -1),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncation_side", "middle"), ("priority", 0.5),
    ("cache_salt", ""), ("cache_salt", 1), ("request_id", "a\nb"), ("request_id", ""), ("return_token_ids", "no"),
    ("skip_special_tokens", 0), ("include_stop_str_in_output", "x"), ("add_special_tokens", 3), ("model", 3),
    ("best_of", 2), ("use_beam_search", 1), ("length_penalty", 2.0), ("early_stopping", True), ("bad_words", [1]),
    ("bad_words", "x"), ("bad_words", ["a"] * 513), ("structured_outputs", "regex"),
    ("guided_json", 3), ("response_format", "json"), ("kv_transfer_params", 1),
    ("kv_transfer_params", {"do_remote_decode": True, "do_remote_prefill": True}),
    ("slo", "chatty"), ("slo", 3), ("slo", []),     ("logits_processors", ["x"]), ("thinking_token_budget", 5),
]  # fmt: skip
BAD_CHAT: list[tuple[str, Any]] = [
    ("messages", None), ("messages", []), ("messages", "hi"), ("messages", ["hi"]), ("messages", [{"role": "user"}]),
    ("messages", [{"role": "robot", "content": "x"}]), ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"content": "x"}]), ("messages", [{"role": ["user"], "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("max_completion_tokens", 0), ("max_completion_tokens", "x"), ("logprobs", 3), ("top_logprobs", 21),
    ("top_logprobs", 3), ("tools", [{"type": "function", "function": {"name": ""}}]), ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("functions", [{"name": "f g"}]),
    ("function_call", {"name": "f"}),
    ("reasoning_budget", 5), ("reasoning_format", "x"), ("parallel_tool_calls", 1), ("include_reasoning", "no"),
    ("echo", True),
    ("audio", {"voice": "x"}), ("modalities", ["text", "audio"]), ("documents", [{"text": "x"}]),
    ("web_search_options", {}), ("verbosity", "loud"), ("chat_template", "x"), ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"messages": []}), ("reasoning_effort", 3), ("add_generation_prompt", "x"),
]  # fmt: skip
BAD_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", []), ("prompt", 5), ("prompt", {}), ("prompt", ["a", 1]), ("prompt", [1, "a"]),
    ("prompt", [[1], 2]), ("prompt", [[]]), ("prompt", [1.5]), ("prompt", [True]), ("prompt", [100]), ("prompt", [-1]),
    ("prompt", [[1], [100]]), ("prompt", ["x"] * 1025), ("logprobs", True), ("logprobs", 21), ("logprobs", -1),
    ("echo", "yes"), ("suffix", "x"), ("prompt_embeds", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_BOTH + BAD_CHAT)
def test_a_bad_chat_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(CHAT | {field: value}, RULES)
    assert caught.value.param == field, caught.value.message
    assert field in caught.value.message


@pytest.mark.parametrize(("field", "value"), BAD_BOTH + BAD_COMPLETION)
def test_a_bad_completion_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(COMPLETION | {field: value}, RULES)
    assert caught.value.param == field, caught.value.message
    assert field in caught.value.message


NEUTRAL: dict[str, Any] = {
    "best_of": 1, "use_beam_search": False, "bad_words": [], "response_format": {"type": "text"}, "user": "me",
    "store": True, "metadata": {}, "length_penalty": 1.0, "logit_bias": {}, "stop": [], "service_tier": "auto",
}  # fmt: skip


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_null_and_neutral_values_ask_for_nothing(parse: Any) -> None:
    base = CHAT if parse is parse_chat else COMPLETION
    call, unknown = parse(base | NEUTRAL, RULES)
    assert call == parse(base, RULES)[0] and unknown == []
    names = {field for field, _ in BAD_BOTH + (BAD_CHAT if parse is parse_chat else BAD_COMPLETION)} - base.keys()
    assert parse(base | dict.fromkeys(names), RULES) == (call, [])


def test_unknown_fields_are_handed_back() -> None:
    assert parse_chat(CHAT | {"colour": 1, "temperature": 0}, RULES)[1] == ["colour"]


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_a_call_bounds_what_is_drafted_for_it(parse: Any) -> None:
    """By an object, or by llama-server's names; the server's own bounds are never raised."""
    base = CHAT if parse is parse_chat else COMPLETION
    call, unknown = parse(base | {"speculative": {"n_max": 4, "n_min": 2}, "speculative.p_min": 0.5}, RULES)
    assert call.drafts == (4, 2, 0.5) and unknown == []
    assert with_drafts(Terms(), call.drafts) == Terms(draft_n_max=4, draft_n_min=2, draft_p_min=0.5)
    call, _ = parse(base | {"speculative.n_max": 1000}, RULES)
    assert with_drafts(Terms(), call.drafts) == with_drafts(Terms(), NO_LIMITS) == Terms()
    off, _ = parse(base | {"speculative": {"n_max": 0}}, RULES)
    assert with_drafts(Terms(), off.drafts).draft_n_max == 0
    for given in ({"p_min": 2}, {"p_min": "x"}, {"n_max": -1}, {"n_mx": 1}, 3):
        with pytest.raises(InvalidRequest, match="speculative"):
            parse(base | {"speculative": given}, RULES)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_what_a_caller_expects_of_an_answer(parse: Any) -> None:
    """A text or parts of text, which may be empty; anything else is refused by name."""
    base = CHAT if parse is parse_chat else COMPLETION

    def predicted(content: Any, **more: Any) -> str | None:
        call, unknown = parse(base | {"prediction": {"type": "content", "content": content} | more}, RULES)
        assert unknown == []
        return call.prediction

    part = {"type": "text", "text": "ab"}
    assert (predicted("ab"), predicted([part, part]), predicted("")) == ("ab", "abab", "")
    assert parse(base, RULES)[0].prediction is None
    for content in (None, 3, ["ab"], [part, {"type": "image_url"}], [{"type": "text", "text": 1}]):
        with pytest.raises(InvalidRequest, match=r"prediction\.content"):
            predicted(content)
    for more in ({"type": "tokens"}, {"type": None}, {"other": 1}):
        with pytest.raises(InvalidRequest, match="prediction"):
            predicted("ab", **more)


def test_every_sampler_has_defaults_of_the_server() -> None:
    given = {
        "typical_p": 0.9, "top_n_sigma": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dry_multiplier": 0.8,
        "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 64, "dry_sequence_breakers": ["x"],
    }  # fmt: skip
    body = {"messages": [{"role": "user", "content": "x"}]}
    by_default, _ = parse_chat(body, Rules(100, defaults=given))
    asked, _ = parse_chat(body | given, Rules(100))
    assert by_default.sampling == asked.sampling != parse_chat(body, Rules(100))[0].sampling


def test_the_models_own_defaults_apply_where_the_caller_is_silent() -> None:
    sampling = parse_completion(COMPLETION, RULES)[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 1.0)
    sampling = parse_completion(COMPLETION | {"temperature": 0, "top_k": 0}, RULES)[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", ""], ("a", "")), ([1, 2], ((1, 2),)), ([[1, 2], [3]], ((1, 2), (3,)))],
)
def test_prompts_come_in_four_shapes(prompt: Any, prompts: Any) -> None:
    assert parse_completion({"prompt": prompt}, RULES)[0].prompts == prompts


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    call = parse_chat(CHAT | {"max_tokens": 5, "max_completion_tokens": 6}, RULES)[0]
    assert (call.sampling.max_tokens, call.limit_field) == (6, "max_completion_tokens")


def test_logprobs_mean_a_switch_for_chat_and_a_number_for_completions() -> None:
    assert parse_chat(CHAT | {"logprobs": True}, RULES)[0].sampling.logprobs == 0
    assert parse_chat(CHAT | {"logprobs": True, "top_logprobs": 3}, RULES)[0].sampling.logprobs == 3
    assert parse_chat(CHAT | {"logprobs": False}, RULES)[0].sampling.logprobs is None
    assert parse_completion(COMPLETION | {"logprobs": 0}, RULES)[0].sampling.logprobs == 0


def test_echo_with_logprobs_scores_the_prompt() -> None:
    call = parse_completion(COMPLETION | {"echo": True, "logprobs": 2, "max_tokens": 0}, RULES)[0]
    assert (call.score_only, call.sampling.max_tokens, call.sampling.prompt_logprobs) == (True, 1, 2)
    assert call.prompt_logprobs is None


def test_kv_transfer_params_say_which_way_kv_goes() -> None:
    """As vLLM's proxies send them, with places that mean nothing here; the answer that says so is not streamed."""
    nowhere = {"remote_engine_id": None, "remote_block_ids": [1], "remote_host": "x", "remote_port": 5600, "tp_size": 1}
    for params, handoff in (
        ({"do_remote_decode": True, "do_remote_prefill": False}, EXPORT),
        ({"do_remote_prefill": True}, IMPORT),
        ({}, ""),
    ):
        call, unknown = parse_completion({"prompt": "x", "kv_transfer_params": params | nowhere}, RULES)
        assert call.handoff == handoff and not unknown
    with pytest.raises(InvalidRequest, match="while streaming"):
        parse_completion({"prompt": "x", "stream": True, "kv_transfer_params": {"do_remote_decode": True}}, RULES)
    with pytest.raises(InvalidRequest, match="do_remote_decode must be true or false"):
        parse_completion({"prompt": "x", "kv_transfer_params": {"do_remote_decode": 1}}, RULES)


def test_prompt_logprobs_are_refused_while_streaming() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(CHAT | {"stream": True, "prompt_logprobs": 1}, RULES)
    assert caught.value.param == "prompt_logprobs"


def test_roles_and_parts_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts, "name": "ann"}]}
    conversation = parse_chat(body, RULES)[0].conversation
    assert conversation is not None
    assert conversation.messages == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts, "name": "ann"},
    )


def test_continuing_a_message_leaves_out_the_generation_prompt() -> None:
    conversation = parse_chat(CHAT | {"continue_final_message": True}, RULES)[0].conversation
    assert conversation is not None and not conversation.add_generation_prompt
    with pytest.raises(InvalidRequest):
        parse_chat(CHAT | {"continue_final_message": True, "add_generation_prompt": True}, RULES)


def test_tools_may_be_listed_where_their_use_is_forbidden() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse_chat(CHAT | {"tools": tools, "tool_choice": "none"}, RULES)[0].conversation is not None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999}', b"[" * 200_000, b'{"a":1}}'],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_object(body)


def test_history_of_an_assistant_may_lack_content() -> None:
    """As OpenAI's clients send it back: with calls of tools, or with nothing."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "ok"}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}, result, {"role": "assistant"}]
    rules = Rules(100, chat_format=ChatFormat("hermes", True, knows_calls=True))
    found, _ = parse_chat({"messages": [*history, {"role": "user", "content": "x"}]}, rules)
    assert found.conversation is not None
    assert [message["content"] for message in found.conversation.messages] == [None, "ok", None, "x"]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content"):
        parse_chat({"messages": [{"role": "user", "content": None}]}, Rules(100))


def test_fields_of_a_history_that_are_null_count_as_absent() -> None:
    """As clients write out messages that they hold as objects with all fields."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "tool_calls": [call], "reasoning": "Hm.", "reasoning_content": None}
    result = {"role": "tool", "tool_call_id": "1", "content": "ok", "name": None}
    rules = Rules(100, chat_format=ChatFormat("hermes", True, knows_calls=True))
    found, _ = parse_chat({"messages": [said, result]}, rules)
    assert found.conversation is not None
    first, second = found.conversation.messages
    assert first["reasoning_content"] == "Hm." and second["name"] == "f"


def test_tokenize_reads_what_chat_reads() -> None:
    conversation = {"messages": [{"role": "user", "content": "hi"}]}
    assert parse_tokenize({"prompt": "hi", "messages": None}, RULES) == parse_tokenize({"prompt": "hi"}, RULES)
    with pytest.raises(InvalidRequest) as caught:
        parse_tokenize(conversation | {"tools": [{"type": "function"}]}, RULES)
    assert caught.value.param == "tools"
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    call, unknown = parse_tokenize(conversation | tools, RULES)
    assert call.conversation == parse_chat(conversation | tools, RULES)[0].conversation and unknown == []


def test_unknown_fields_of_tokenize_and_detokenize_are_told() -> None:
    assert parse_tokenize({"prompt": "hi", "verbose": 1}, RULES)[1] == ["verbose"]
    assert parse_detokenize({"tokens": [1], "verbose": 1}, RULES)[1] == ["verbose"]
