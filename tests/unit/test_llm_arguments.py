"""What LLM's callers pass: vLLM's forms are read, and what has the wrong type is one clear line that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenmill import SamplingParams
from tokenmill.core.errors import ConfigError, InvalidRequest
from tokenmill.kv.store.options import TierOptions
from tokenmill.llm.arguments import GivenPrompt, read_conversations, read_options, read_prompts, read_sampling
from tokenmill.node.options import TextOptions

IDS = GivenPrompt(None, (1, 2))
TEXT = GivenPrompt("a", None)
MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompts", "read"),
    [
        ("a", [TEXT]),
        (["a", "a"], [TEXT, TEXT]),
        ([1, 2], [IDS]),
        (np.array([1, 2]), [IDS]),
        ([[1, 2], (1, 2), np.array([1, 2]), "a"], [IDS, IDS, IDS, TEXT]),
        ({"prompt": "a"}, [TEXT]),
        ({"prompt_token_ids": [1, 2], "prompt": None}, [IDS]),
        ([{"prompt_token_ids": [1, 2]}, {"prompt": "a", "cache_salt": "s"}], [IDS, GivenPrompt("a", None, "s")]),
        (("a",), [TEXT]),
        ([], []),
    ],
)
def test_prompts_come_in_every_form(prompts: Any, read: list[GivenPrompt]) -> None:
    assert read_prompts(prompts) == read


@pytest.mark.parametrize(
    "prompts",
    [
        5, None, b"a", 1.5, [None], [1, "a"], [[1.5]], {}, {"prompt": 5}, {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt": "a", "multi_modal_data": {}}, {"prompt_token_ids": "ab"}, {"prompt": "a", "cache_salt": 5}, object(),
    ],
)  # fmt: skip
def test_a_prompt_of_another_type_is_one_clear_line(prompts: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_prompts(prompts)
    assert "\n" not in caught.value.message and caught.value.param in ("prompt", "cache_salt")


def test_one_conversation_or_several() -> None:
    assert read_conversations([MESSAGE]) == [[MESSAGE]]
    assert read_conversations([[MESSAGE], [MESSAGE]]) == [[MESSAGE], [MESSAGE]]
    assert read_conversations([[MESSAGE]]) == [[MESSAGE]]


@pytest.mark.parametrize("messages", ["hi", [], [[]], [[MESSAGE], "hi"], MESSAGE, None, ["hi"], [MESSAGE, "hi"]])
def test_what_is_no_conversation_is_shown_one(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="role") as caught:
        read_conversations(messages)
    assert caught.value.param == "messages"


def test_sampling_is_one_for_all_or_one_for_each() -> None:
    one, default = SamplingParams(n=2), SamplingParams()
    assert read_sampling(None, 2, lambda: default) == [default, default]
    assert read_sampling(one, 2, lambda: default) == [one, one]
    assert read_sampling([one, default], 2, lambda: default) == [one, default]
    for wrong in ([one], {"n": 2}, "x", 5, [one, {}]):
        with pytest.raises(InvalidRequest) as caught:
            read_sampling(wrong, 2, lambda: default)
        assert caught.value.param == "sampling_params"


def test_options_are_checked_by_name_and_type() -> None:
    options, text, tiers = read_options(
        {"kv_cache_memory_bytes": "2GiB", "threads": 3, "chat_template": "x", "enable_lora": True, "kv_host": "4GB"}
    )
    assert (options.kv_cache_memory_bytes, options.threads, options.enable_lora) == (2 << 30, 3, True)
    assert text == TextOptions(chat_template="x")
    assert tiers == TierOptions(kv_host=4_000_000_000)
    assert read_options({"kv_offloading_size": 2})[2] == TierOptions(kv_host=2 << 30)
    assert read_options({"kv_offloading_size": None})[2] == TierOptions()
    for name, value, says in (
        ("max_modl_len", 5, "max_model_len"),
        ("kv_cache_memory_bytes", "lots", "kv_cache_memory_bytes"),
        ("threads", "2", "threads must be int or None, got str"),
        ("threads", True, "threads must be"),
        ("enable_lora", 1, "enable_lora must be bool, got int"),
        ("kv_cache_dtype", None, "kv_cache_dtype must be str"),
        ("threads", 0, "--threads must be at least 1, got 0"),
        ("backend", "cuda", "--backend must be one of auto, native, numpy"),
        ("generation_config", "mine", "must be one of auto, vllm"),
        ("tensor_parallel_size", 2, "one process"),
        ("tokenizer", "other", "own files"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            read_options({name: value})
        assert caught.value.param == name


def test_options_of_vllm_that_do_nothing_here_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="gpu_memory_utilization has no effect here"):
        read_options({"gpu_memory_utilization": 0.9})
    assert read_options({"tensor_parallel_size": 1, "tokenizer": None}) == read_options({})
