"""Whether a model gives vectors, and how: what is asked, what the files say, what the kind is made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiny import tiny_checkpoint
from tokenmill.core.errors import ConfigError
from tokenmill.core.request import PoolingParams
from tokenmill.core.units import GiB
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.node.load import choose_pooling
from tokenmill.node.machine import MachineFacts
from tokenmill.node.options import EngineOptions
from tokenmill.node.resolve import ModelFacts, resolve

BERT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 512,
}  # fmt: skip
MACHINE = MachineFacts(num_cpus=8, cpu_quota=None, memory_available=10 * GiB, cgroup_headroom=None)
ENCODER = ModelFacts(max_context=512, kv_bytes_per_token=0, weights_bytes=10**6, advised_len=256)


def bert(folder: Path, architecture: str = "BertModel", **more: Any) -> Checkpoint:
    return Checkpoint("hf", folder, {"architectures": [architecture], **BERT, **more}, {})


def test_a_language_model_gives_tokens_unless_asked(tmp_path: Path) -> None:
    assert choose_pooling(tiny_checkpoint(), "auto", None) is None
    for runner, pooling, how in (("pooling", None, "last"), ("auto", "mean", "mean"), ("pooling", "cls", "cls")):
        choice = choose_pooling(tiny_checkpoint(), runner, pooling)
        assert choice is not None and choice.params == PoolingParams(how, activation="unit")


def test_a_gguf_file_may_say_how_it_pools() -> None:
    checkpoint = tiny_checkpoint(kind="gguf")
    checkpoint.metadata["llama.pooling_type"] = 3
    choice = choose_pooling(checkpoint, "auto", None)
    assert choice is not None and choice.params.how == "last" and choice.reason == "the model's file"
    assert choose_pooling(checkpoint, "generate", None) is None


def test_encoders(tmp_path: Path) -> None:
    """Usually the mean; a classifier of pairs scores, through the sigmoid unless its makers left that out."""
    choice = choose_pooling(bert(tmp_path), "auto", None)
    assert choice is not None and choice.params == PoolingParams("mean", activation="unit")
    one_label = {"id2label": {"0": "LABEL_0"}}
    scorer = bert(tmp_path, "BertForSequenceClassification", **one_label)
    choice = choose_pooling(scorer, "auto", None)
    assert choice is not None and choice.params == PoolingParams("score", activation="sigmoid")
    raw = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    choice = choose_pooling(bert(tmp_path, "BertForSequenceClassification", **one_label, **raw), "auto", None)
    assert choice is not None and choice.params == PoolingParams("score")
    for checkpoint, runner, pooling in ((scorer, "auto", "mean"), (bert(tmp_path), "generate", None)):
        with pytest.raises(ConfigError):
            choose_pooling(checkpoint, runner, pooling)


def test_a_sentence_transformers_folder_says_it(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": "x.Pooling"}]))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    choice = choose_pooling(bert(tmp_path), "auto", None)
    assert choice is not None and (choice.params, choice.advised_len) == (PoolingParams("cls"), 128)
    asked = choose_pooling(bert(tmp_path), "auto", "mean")
    assert asked is not None and (asked.params, asked.reason) == (PoolingParams("mean"), "as asked")


def test_an_encoder_gets_no_pool_and_a_budget_for_whole_inputs() -> None:
    """The length its makers advise, or what is asked up to its positions; a step always holds the longest input."""
    settings = resolve(EngineOptions(), MACHINE, ENCODER)
    assert (
        settings.config.groups[0].num_blocks,
        settings.config.max_model_len,
        settings.config.enable_prefix_caching,
    ) == (0, 256, False)
    long = resolve(EngineOptions(max_model_len=512, max_num_seqs=8), MACHINE, ENCODER)
    assert (long.config.max_model_len, long.config.max_num_batched_tokens) == (512, 576)
    with pytest.raises(ConfigError, match="whole input"):
        resolve(EngineOptions(max_num_batched_tokens=255, max_num_seqs=8), MACHINE, ENCODER)
    with pytest.raises(ConfigError, match="512"):
        resolve(EngineOptions(max_model_len=513), MACHINE, ENCODER)
