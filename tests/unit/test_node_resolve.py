"""resolve: what was asked + what the machine offers + what the model is -> settings that explain themselves."""

from __future__ import annotations

import dataclasses

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.core.units import GiB, MiB
from tokenmill.node.machine import MachineFacts
from tokenmill.node.options import EngineOptions
from tokenmill.node.resolve import ModelFacts, asked_answering, resolve

MACHINE = MachineFacts(num_cpus=8, cpu_quota=None, memory_available=10 * GiB, cgroup_headroom=None)
MODEL = ModelFacts(max_context=8192, kv_bytes_per_token=23040, weights_bytes=98 * MiB)


def chosen(settings, name):
    return next(choice for choice in settings.decisions if choice.name == name)


def test_defaults_take_every_cpu_and_forty_percent_of_free_memory():
    settings = resolve(EngineOptions(), MACHINE, MODEL)
    assert settings.threads == 8
    assert settings.config.groups[0].num_blocks == int(10 * GiB * 0.4) // (23040 * 16)
    assert settings.config.max_model_len == 8192
    assert "40% of the 10.0 GiB free" in chosen(settings, "kv_cache").reason
    assert f"{settings.config.groups[0].num_blocks * 16} tokens" in chosen(settings, "kv_cache").value


def test_every_number_that_is_set_has_a_printed_reason():
    settings = resolve(EngineOptions(), MACHINE, MODEL)
    names = {choice.name for choice in settings.decisions}
    assert {"threads", "block_size", "kv_cache", "max_model_len", "max_num_seqs", "max_num_batched_tokens"} <= names
    assert all(choice.reason for choice in settings.decisions)


def test_a_container_bounds_cpus_and_memory():
    machine = dataclasses.replace(MACHINE, cpu_quota=2.5, cgroup_headroom=1 * GiB)
    settings = resolve(EngineOptions(), machine, MODEL)
    assert settings.threads == 2
    assert "2.5 of 8 CPUs" in chosen(settings, "threads").reason
    assert settings.config.groups[0].num_blocks * 16 * 23040 <= 0.4 * GiB
    assert "container" in chosen(settings, "kv_cache").reason


def test_engines_of_one_machine_divide_it():
    machine = dataclasses.replace(MACHINE, num_sharing=3)
    settings = resolve(EngineOptions(), machine, MODEL)
    assert settings.threads == 2
    assert chosen(settings, "threads").reason == "8 usable cores for 3 engines"
    whole = resolve(EngineOptions(), MACHINE, MODEL).config.groups[0].num_blocks
    assert settings.config.groups[0].num_blocks == whole // 3
    assert "for each of 3 engines" in chosen(settings, "kv_cache").reason
    with pytest.raises(ConfigError, match="for each of 3 engines"):
        resolve(EngineOptions(kv_cache_memory_bytes=4 * GiB), machine, MODEL)
    assert resolve(EngineOptions(), dataclasses.replace(MACHINE, num_sharing=20), MODEL).threads == 1


def test_what_is_asked_is_kept():
    options = EngineOptions(
        max_model_len=1000, max_num_seqs=4, max_num_batched_tokens=64, block_size=32, threads=3, backend="numpy"
    )
    settings = resolve(dataclasses.replace(options, kv_cache_memory_bytes=1 * GiB), MACHINE, MODEL)
    config = settings.config
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (1000, 4, 64)
    assert (config.block_size, settings.threads, settings.backend) == (32, 3, "numpy")
    assert settings.config.groups[0].num_blocks == GiB // (32 * 23040)
    assert chosen(settings, "threads").reason == "as asked"


def test_a_small_pool_bounds_the_context_and_says_so():
    settings = resolve(EngineOptions(kv_cache_memory_bytes=64 * MiB), MACHINE, MODEL)
    assert settings.config.max_model_len == settings.config.groups[0].num_blocks * 16 < 8192
    assert "the model could take 8192" in chosen(settings, "max_model_len").reason


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (dict(max_model_len=8193), "max_model_len"),
        (dict(max_model_len=0), "max_model_len"),
        (dict(max_model_len=8192, kv_cache_memory_bytes=64 * MiB), "max_model_len"),
        (dict(kv_cache_memory_bytes=11 * GiB), "kv_cache_memory_bytes"),
        (dict(kv_cache_memory_bytes=1000), "kv_cache_memory_bytes"),
        (dict(threads=0), "threads"),
        (dict(block_size=-1), "block_size"),
        (dict(max_num_seqs=64, max_num_batched_tokens=32), "max_num_batched_tokens"),
        (dict(backend="cuda"), "backend"),
        (dict(kv_save=""), "kv_save"),
        (dict(kv_save="kv", enable_prefix_caching=False), "kv_save"),
        (dict(kv_store="socket", kv_save="kv"), "kv_save"),
        (dict(kv_store="socket", enable_prefix_caching=False), "kv_store"),
    ],
)
def test_an_impossible_wish_is_refused_by_name(options, param):
    with pytest.raises(ConfigError) as caught:
        resolve(EngineOptions(**options), MACHINE, MODEL)
    assert caught.value.param == param
    assert param.replace("_", "-") in caught.value.message


def test_a_small_step_bounds_the_sequences_and_says_so():
    settings = resolve(EngineOptions(max_num_batched_tokens=64), MACHINE, MODEL)
    assert (settings.config.max_num_seqs, settings.config.max_num_batched_tokens) == (64, 64)
    assert "token of a step" in chosen(settings, "max_num_seqs").reason
    with pytest.raises(ConfigError, match="max-num-batched-tokens"):
        resolve(EngineOptions(max_num_batched_tokens=0), MACHINE, MODEL)


def test_dtypes_of_vllm_mean_the_weights_that_are_not_quantised():
    assert resolve(EngineOptions(dtype="auto"), MACHINE, MODEL).spec.quantization is None
    assert resolve(EngineOptions(dtype="half"), MACHINE, MODEL).spec.quantization == "f16"
    assert resolve(EngineOptions(dtype="bfloat16", quantization="q8"), MACHINE, MODEL).spec.quantization == "q8_0"
    kept = resolve(EngineOptions(dtype="float32"), MACHINE, MODEL)
    assert kept.spec.quantization is None and "float32" in chosen(kept, "dtype").reason
    with pytest.raises(ConfigError, match="--dtype must be one of auto"):
        resolve(EngineOptions(dtype="fp8"), MACHINE, MODEL)


def test_kv_dtypes_are_named_in_the_fields_words():
    """vLLM's and llama.cpp's names mean ours; int8 says that it changes answers; others are refused with the list."""
    names = {"auto": "f16", "bfloat16": "bf16", "float16": "f16", "q8_0": "int8", "int8": "int8"}
    for asked, kept in {**names, "int8_per_token_head": "int8"}.items():
        assert resolve(EngineOptions(kv_cache_dtype=asked), MACHINE, MODEL).spec.kv_dtype == kept
        asked_for = None if asked == "auto" else kept
        assert resolve(EngineOptions(kv_cache_dtype=asked), MACHINE, MODEL, "bf16").spec.kv_dtype == (
            asked_for or "bf16"
        )
        latent = resolve(EngineOptions(kv_cache_dtype=asked), MACHINE, dataclasses.replace(MODEL, has_latents=True))
        assert latent.spec.kv_dtype == ("bf16" if asked == "auto" else kept)
    choice = chosen(resolve(EngineOptions(kv_cache_dtype="int8"), MACHINE, MODEL), "kv_cache_dtype")
    assert "not the same answers" in choice.reason
    for other in ("fp8", "turboquant_k8v4"):  # as int8, but not in as many bits
        with pytest.raises(ConfigError, match="int8") as refused:
            resolve(EngineOptions(kv_cache_dtype=other), MACHINE, MODEL)
        assert refused.value.param == "kv_cache_dtype"


def test_policies_are_printed_where_they_are_chosen():
    """Defaults say nothing; vLLM's word for the order of arrival is ours; a policy without a use says so."""
    settings = resolve(EngineOptions(), MACHINE, MODEL)
    assert (settings.config.scheduling_policy, settings.config.eviction_policy) == ("short-prompts-first", "lru")
    assert not any(choice.name.endswith("_policy") for choice in settings.decisions)
    settings = resolve(EngineOptions(scheduling_policy="priority", eviction_policy="lfu"), MACHINE, MODEL)
    assert chosen(settings, "scheduling_policy").value == settings.config.scheduling_policy == "fcfs"
    assert chosen(settings, "eviction_policy").reason == "as asked"
    assert chosen(settings, "eviction_policy").value == settings.config.eviction_policy == "lfu"
    options = EngineOptions(eviction_policy="lfu", enable_prefix_caching=False)
    assert "nothing is cached" in chosen(resolve(options, MACHINE, MODEL), "eviction_policy").reason
    with pytest.raises(ConfigError, match=r"--eviction-policy must be one of lru, .* Did you mean 'lfu'"):
        EngineOptions(eviction_policy="lfuu")


def test_adaptive_top_k_is_for_mixtures_that_give_tokens_and_within_its_range():
    moe = dataclasses.replace(MODEL, num_experts=64)
    settings = resolve(EngineOptions(expert_min_share=0.1), MACHINE, moe)
    assert settings.spec.expert_min_share == 0.1
    assert "other answers" in chosen(settings, "expert_min_share").reason
    for options in (EngineOptions(), EngineOptions(expert_min_share=0)):
        plain = resolve(options, MACHINE, moe)
        assert plain.spec.expert_min_share == 0 and plain == resolve(EngineOptions(), MACHINE, MODEL)
    for model, share, why in (
        (moe, 1.5, "from 0 to 1"),
        (MODEL, 0.1, "no mixture of experts"),
        (dataclasses.replace(moe, gives_vectors=True), 0.1, "gives vectors"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            resolve(EngineOptions(expert_min_share=share), MACHINE, model)
        assert caught.value.param == "expert_min_share"
    with pytest.raises(ConfigError, match="at least 0"):
        EngineOptions(expert_min_share=-0.1)
    with pytest.raises(ConfigError, match="at least 0"):
        EngineOptions(expert_min_share=float("nan"))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"max_model_len": 64}, "max_model_len"),
        ({"block_size": 8}, "block_size"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"quantization": "q8"}, "quantization"),
        ({"dtype": "bfloat16"}, "quantization"),
        ({"expert_min_share": 0.1}, "expert_min_share"),
        ({"runner": "generate"}, "runner"),
    ],
)
def test_a_front_end_asks_for_what_an_engine_makes_of_the_same_flags(given, name):
    """And for nothing else: what it was not given, engines may have as they like."""
    asked, model = asked_answering(EngineOptions(**given)), dataclasses.replace(MODEL, num_experts=8)
    assert [each for each, _ in asked] == [name]
    assert set(asked) <= set(resolve(EngineOptions(**given), MACHINE, model).answering)
    assert not set(asked) <= set(resolve(EngineOptions(), MACHINE, model).answering) or name == "runner"
    assert asked_answering(EngineOptions(threads=3, max_num_seqs=4, kv_cache_memory_bytes=GiB)) == ()
