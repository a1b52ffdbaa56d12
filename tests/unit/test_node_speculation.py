"""What --speculative-config asks for: vLLM's keys and defaults, several drafters, and one line for what is not here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.speculation import CorpusConfig, SpeculationConfig
from tokenmill.core.units import GiB
from tokenmill.node.machine import MachineFacts
from tokenmill.node.options import EngineOptions
from tokenmill.node.resolve import ModelFacts, resolve
from tokenmill.node.speculation import read_speculation, without_models


def read(**given: Any) -> SpeculationConfig | None:
    return read_speculation(given)[0]


def test_keys_and_defaults_are_those_of_vllm() -> None:
    assert read_speculation(None) == (None, ()) and read() == SpeculationConfig()
    assert read(method="none") is None and read(method="none,none") is None
    assert read(method="ngram", prompt_lookup_max=4) == SpeculationConfig(
        ("ngram",), prompt_lookup_max=4, prompt_lookup_min=4
    )
    assert read(model="[ngram]") == read(method="ngram") == SpeculationConfig(("ngram",))
    both = read(method="ngram-mod, ngram", num_speculative_tokens=3, p_min=1, rejection_sample_method="standard")
    assert both == SpeculationConfig(("suffix", "ngram"), num_speculative_tokens=3, p_min=1)
    assert read(method=["suffix", "ngram-mod"]) == SpeculationConfig()
    drafting = SpeculationConfig(("draft_model",), model="small", quantization="q4_1")
    assert read(model="small", quantization="q4") == read(method="draft-simple", model="small", quantization="q4_1")
    assert read(model="small", quantization="q4") == drafting
    head = SpeculationConfig(("eagle3",), model="head")
    assert read(method="eagle3", model="head") == read(method="draft-eagle3", model="head") == head
    assert read(method="eagle", model="head") == head
    heads = SpeculationConfig(("medusa", "suffix"), model="heads", num_speculative_tokens=5)
    assert read(method="medusa,suffix", model="heads", num_speculative_tokens=5) == heads
    found = SpeculationConfig()
    assert (found.suffix_decoding_max_tree_depth, found.suffix_decoding_max_cached_requests) == (24, 10_000)
    assert (found.suffix_decoding_max_spec_factor, found.suffix_decoding_min_token_prob) == (1.0, 0.1)


def test_a_corpus_is_for_tenants_by_name_or_for_all() -> None:
    given = {
        "corpora": [{"path": "laws.index", "tenants": ["acme", "1-ab"]}, {"path": "public", "tenants": "*"}],
        "num_speculative_tokens": 8,
    }
    corpora = (CorpusConfig("laws.index", ("acme", "1-ab")), CorpusConfig("public", None))
    assert read(**given) == SpeculationConfig(num_speculative_tokens=8, corpora=corpora)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (None, None),
        ({"method": "none"}, None),
        ({"model": "small"}, None),
        ({"method": "mtp", "num_speculative_tokens": 2}, None),
        ({"method": "draft_model,suffix", "model": "small", "quantization": "q4_0", "n_min": 2}, {"n_min": 2}),
        ({"method": ["ngram", "mtp"], "p_min": 0.5}, {"method": "ngram", "p_min": 0.5}),
        ({"num_speculative_tokens": 3}, {"num_speculative_tokens": 3}),
        (
            {"model": "small", "method": "draft_model,suffix", "suffix_decoding_store": "kept"},
            {"suffix_decoding_store": "kept"},
        ),
        ({"model": "[ngram]"}, {"method": "ngram"}),
        ({"corpora": [{"path": "laws", "tenants": "*"}], "n_min": 2}, {"n_min": 2}),
    ],
)
def test_what_is_left_where_no_model_drafts(given: Any, left: Any) -> None:
    assert read_speculation(without_models(given)) == read_speculation(left)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"method": "draft_model"},
            "model of speculative_config must be the name or the path of what drafts, for draft_model",
        ),
        ({"method": "eagle3"}, "model of speculative_config must be the name or the path of what drafts, for eagle3"),
        ({"method": "medusa"}, "the name or the path of what drafts, for medusa, got None"),
        (
            {"method": "ngram", "model": "x"},
            "model of .* is for a model that drafts; name draft_model or eagle3 or medusa as method, too",
        ),
        ({"quantization": "q4_0"}, "quantization of speculative_config is for a model that drafts"),
        ({"model": "x", "quantization": "q5"}, "quantization of .* must be one of q8_0, q4_0"),
        ({"model": "x", "revision": "main"}, "revision of speculative_config is not for here"),
        ({"method": "qwen3_next_mtp"}, "Nothing drafts by qwen3_next_mtp yet"),
        (
            {"method": "mtp,draft_model", "model": "x"},
            "method of .* must be one of draft_model, eagle3, medusa, mtp at most",
        ),
        (
            {"method": "sufix"},
            "method of .* must be one or several of ngram, suffix, draft_model, eagle3, medusa, mtp, got 'sufix'",
        ),
        ({"method": 3}, "method of speculative_config must be one or several of"),
        ({"methd": "suffix"}, "Did you mean 'method'?"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method of speculative_config must be standard"),
        (
            {"num_speculative_tokens": 0},
            "num_speculative_tokens of .* must be an integer from 1 to 64, got 0",
        ),
        ({"num_speculative_tokens": 1000}, "from 1 to 64, got 1000"),
        ({"num_speculative_tokens": True}, "got True"),
        (
            {"prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "prompt_lookup_min of .* must be at most prompt_lookup_max",
        ),
        ({"num_speculative_tokens": 3, "n_min": 4}, "n_min of .* must be at most num_speculative_tokens .3., got 4"),
        ({"corpora": "laws"}, "corpora of speculative_config must be a list such as"),
        ({"corpora": ["laws"]}, "corpora of speculative_config must be a list such as"),
        ({"corpora": [{"tenants": "*"}]}, "path of corpora of .* must be the file that `tokenmill draft index` has"),
        ({"corpora": [{"path": "laws"}]}, "tenants of corpora of .* must be a list of ids of tenants, or .* got None"),
        ({"corpora": [{"path": "laws", "tenants": []}]}, "tenants of corpora of .* must be a list of ids of tenants"),
        ({"corpora": [{"path": "laws", "tenants": "acme"}]}, "tenants of corpora of .* got 'acme'"),
        ({"corpora": [{"path": "laws", "tenants": [""]}]}, "tenants of corpora of .* must be a list of ids of tenants"),
        ({"corpora": [{"path": "laws", "tenant": "*"}]}, "Unknown key 'tenant' in corpora of .*Did you mean 'tenants'"),
        ({"corpora": [{"path": "laws", "tenants": "*"}] * 17}, "corpora of speculative_config must be 16 at most"),
        (
            {"method": "ngram", "corpora": [{"path": "laws", "tenants": "*"}]},
            "method of speculative_config must be suffix, or several with it, where there are corpora, got 'ngram'",
        ),
        ({"suffix_decoding_store": 3}, "suffix_decoding_store of .* must be the name of a file, got 3"),
        (
            {"method": "ngram", "suffix_decoding_store": "kept"},
            "suffix_decoding_store of .* must be left out where suffix does not draft, or from no earlier answers",
        ),
        ({"suffix_decoding_max_cached_requests": 0, "suffix_decoding_store": "kept"}, "store of .* must be left out"),
        ({"adaptive": 1}, "adaptive of speculative_config must be true or false, got 1"),
        ({"p_min": "high"}, "p_min of speculative_config must be a number from 0 to 1, got 'high'"),
    ],
)
def test_what_is_not_here_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        EngineOptions(speculative_config=given)
    assert caught.value.param in ("speculative_config", "methd", "tenant") and "\n" not in caught.value.message


def test_a_text_is_no_object() -> None:
    with pytest.raises(ConfigError, match="must be an object such as"):
        EngineOptions(speculative_config="suffix")  # type: ignore[arg-type]


def test_models_that_nothing_can_be_drafted_for_refuse() -> None:
    machine = MachineFacts(num_cpus=4, cpu_quota=None, memory_available=8 * GiB, cgroup_headroom=None)
    model = ModelFacts(max_context=2048, kv_bytes_per_token=46_080, weights_bytes=1 << 27)
    options = EngineOptions(speculative_config={"method": "suffix", "draft_sample_method": "greedy"})
    found = resolve(options, machine, model)
    assert found.config.speculation == SpeculationConfig()
    (decision,) = [each for each in found.decisions if each.name == "speculation"]
    assert "draft_sample_method: without effect" in decision.reason
    always = EngineOptions(speculative_config={"num_speculative_tokens": 4, "adaptive": False})
    assert ("speculation", "suffix, always 4 tokens a step") in [
        (each.name, each.value) for each in resolve(always, machine, model).decisions
    ]
    vectors = replace(model, gives_vectors=True)
    with pytest.raises(ConfigError, match="this model gives vectors"):
        resolve(EngineOptions(speculative_config={"model": "small"}), machine, vectors)
    found = resolve(options, machine, vectors)  # it may be one of several models of a server
    assert found.config.speculation is None
    assert ("speculation", "none") in [(each.name, each.value) for each in found.decisions]
    with pytest.raises(ConfigError, match="sees a whole input in one step"):
        EngineConfig(groups=full_groups(0), max_model_len=64, speculation=SpeculationConfig())


def test_models_with_states_have_room_for_those_behind_drafts() -> None:
    machine = MachineFacts(num_cpus=4, cpu_quota=None, memory_available=8 * GiB, cgroup_headroom=None)
    model = ModelFacts(max_context=2048, kv_bytes_per_token=46_080, weights_bytes=1 << 27, state_bytes=1 << 20)
    plain, drafting = (
        resolve(EngineOptions(speculative_config=given), machine, model) for given in (None, {"method": "suffix"})
    )
    states = [each.config.groups[-1] for each in (plain, drafting)]
    room = [each.config.pool_blocks(group) for each, group in zip((plain, drafting), states, strict=True)]
    assert room == [states[0].num_blocks, states[1].num_blocks + 16]
    whole = [sum(group.num_bytes for group in each.config.groups) for each in (plain, drafting)]
    assert whole[0] - whole[1] - 16 * (1 << 20) in range(-model.kv_bytes_per_token * 16, model.kv_bytes_per_token * 16)
    (decision,) = [each for each in drafting.decisions if each.name == "kv_states"]
    assert "16 more behind drafts" in decision.reason


def test_states_stay_as_far_apart_as_asked() -> None:
    machine = MachineFacts(num_cpus=4, cpu_quota=None, memory_available=8 * GiB, cgroup_headroom=None)
    model = ModelFacts(max_context=2048, kv_bytes_per_token=46_080, weights_bytes=1 << 27, state_bytes=1 << 20)
    intervals = [
        resolve(EngineOptions(mamba_block_size=asked), machine, model).config.groups[-1].interval
        for asked in (None, 256, 257, 1)
    ]
    assert intervals == [8, 16, 17, 1]
