"""What names of models mean, without disk or network."""

from __future__ import annotations

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.formats.model_names import (
    HubName,
    KnownModel,
    UrlName,
    choose_by_memory,
    choose_gguf,
    find_known,
    known_models,
    parse_name,
)
from tokenmill.models.families import GGUF_FAMILIES


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("org/x", HubName("org/x")),
        ("org/x:Q4_K_M", HubName("org/x", tag="Q4_K_M")),
        ("org/x:latest", HubName("org/x")),
        ("org/x:sub/M.gguf", HubName("org/x", tag="sub/M.gguf")),
        ("org/x@v1.0:Q8_0", HubName("org/x", "v1.0", "Q8_0")),
        ("hf.co/org/x:Q4_K_M", HubName("org/x", tag="Q4_K_M")),
        ("huggingface.co/org/x", HubName("org/x")),
        ("hf://org/x", HubName("org/x")),
        ("https://huggingface.co/org/x", HubName("org/x")),
        ("https://hf.co/org/x/", HubName("org/x")),
        ("https://huggingface.co/org/x/tree/main", HubName("org/x")),
        ("https://huggingface.co/org/x/resolve/main/M-Q8_0.gguf", HubName("org/x", tag="M-Q8_0.gguf")),
        ("https://huggingface.co/org/x/blob/v2/a/M%20b.gguf?download=true", HubName("org/x", "v2", "a/M b.gguf")),
        ("https://mirror.example/org/x:Q8_0", HubName("org/x", tag="Q8_0")),
        ("https://a.example/b/M.gguf?key=1", UrlName("https://a.example/b/M.gguf", "key=1")),
        ("qwen3:4b", HubName("Qwen/Qwen3-4B-GGUF", tag="Q4_K_M")),
        ("Qwen3:4B", HubName("Qwen/Qwen3-4B-GGUF", tag="Q4_K_M")),
        ("qwen3:latest", HubName("Qwen/Qwen3-8B-GGUF", tag="Q4_K_M")),
        ("llama3.2", HubName("bartowski/Llama-3.2-3B-Instruct-GGUF", tag="Q4_K_M")),
        ("llama3.2:3b-instruct-q8_0", HubName("bartowski/Llama-3.2-3B-Instruct-GGUF", tag="Q8_0")),
        ("gemma3:1b-it-fp16", HubName("ggml-org/gemma-3-1b-it-GGUF", tag="F16")),
        ("gpt-oss:20b", HubName("ggml-org/gpt-oss-20b-GGUF", tag="MXFP4")),
        ("bge-small-en", HubName("BAAI/bge-small-en-v1.5")),
        ("bge-small-en-q8_0", None),
        ("qwen3:5b", None),
        ("file:///etc/passwd.gguf", None),
        ("a/b.gguf", None),
        ("a/b/c", None),
        ("../a/b", None),
        ("örg/x", None),
    ],
)
def test_meanings(name: str, meant: HubName | UrlName | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert parse_name(name) == meant


@pytest.mark.parametrize(
    "name",
    [
        "https://huggingface.co/",
        "https://huggingface.co/org",
        "https://huggingface.co/org/x/resolve/main/model.safetensors",
        "hf.co/org/x/y",
        "http://a.example/M.gguf",
        "https://me:password@a.example/M.gguf",
        "https://a.example/M.bin",
        "https://[::1/M.gguf",
    ],
)
def test_addresses_that_no_model_can_be_had_from(name: str) -> None:
    with pytest.raises(ConfigError, match=r"neither a repository of the hub|no model's address|no address") as caught:
        parse_name(name)
    assert caught.value.param == "model"


def test_the_table_of_known_models() -> None:
    """Every name means one model; each has what it takes to choose; one is recommended for each use."""
    models = known_models()
    names = [name for model in models.values() for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names)) and all(name == name.lower() and find_known(name) for name in names)
    assert len(models) >= 24 and isinstance(parse_name("smollm2"), KnownModel)
    for model in models.values():
        assert (model.wheel is None) != (model.hub is None)
        assert model.task in ("chat", "code", "embedding", "rerank") and model.licence
        assert model.size_bytes < model.memory_bytes and model.parameters > 10**7
        bits = 8 * model.size_bytes / model.parameters
        assert 3.5 < bits < 36, f"{model.name}: {bits:.1f} bits for each parameter"
    uses = sorted(use for model in models.values() for use in model.recommended)
    assert uses == ["chat", "code", "embeddings", "tools"]
    assert {"llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "smollm3", "gpt-oss", "phi3", "granite"} <= set(
        GGUF_FAMILIES
    ), "the architectures of the repositories in the table"


def test_choosing_by_memory() -> None:
    giga = 10**9
    sizes = {
        "M-F16.gguf": 16 * giga, "M-Q8_0.gguf": 8 * giga, "a/M-Q4_K_M-00001-of-00002.gguf": 3 * giga,
        "a/M-Q4_K_M-00002-of-00002.gguf": 2 * giga, "M-Q3_K_S.gguf": 3 * giga, "M-IQ2_XS.gguf": 2 * giga,
        "mmproj-F16.gguf": giga,
    }  # fmt: skip
    first = "a/M-Q4_K_M-00001-of-00002.gguf"
    assert choose_by_memory(sizes, None) == choose_by_memory(sizes, 7 * giga) == (first, "")
    name, why = choose_by_memory(sizes, 6 * giga) or ("", "")
    assert name == "M-Q3_K_S.gguf" and "Q4_K_M of" in why and "does not fit" in why
    name, why = choose_by_memory(sizes, giga) or ("", "")
    assert name == "M-IQ2_XS.gguf" and "none fits" in why
    without = {name: size for name, size in sizes.items() if "Q4_K_M" not in name}
    assert choose_by_memory(without, 64 * giga) == (
        "M-Q8_0.gguf", "the smallest of 4 bits or more, as there is no Q4_K_M",
    )  # fmt: skip
    assert choose_by_memory({"M-Q2_K.gguf": giga}, 64 * giga) == ("M-Q2_K.gguf", "")
    assert choose_by_memory({"odd.gguf": giga, "model.safetensors": giga}, None) is None


def test_choosing_a_file() -> None:
    files = ["M-Q8_0.gguf", "b/M-Q4_K_M-00001-of-00002.gguf", "b/M-Q4_K_M-00002-of-00002.gguf", "mmproj-Q8_0.gguf"]
    assert choose_gguf(files, None) == choose_gguf(files, "q4_k_m") == "b/M-Q4_K_M-00001-of-00002.gguf"
    assert choose_gguf(files, "M-Q8_0.gguf") == choose_gguf(files, "Q8_0") == "M-Q8_0.gguf"
    assert choose_gguf(files, "M-Q4_K_M-00002-of-00002.gguf") == "b/M-Q4_K_M-00002-of-00002.gguf"
    assert choose_gguf(files, "Q2_K") is None and choose_gguf(files, "none.gguf") is None
    assert choose_gguf(["odd.gguf"], None) == "odd.gguf" and choose_gguf(["odd.gguf", "b.gguf"], None) is None
