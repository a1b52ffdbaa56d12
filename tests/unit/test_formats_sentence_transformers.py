"""What a sentence-transformers folder says, and what it may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.sentence_transformers import DenseModule, LogitScore, SentenceConfig, read_sentence_config

PREFIX = "sentence_transformers.models."
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": PREFIX + "Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": PREFIX + "Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": PREFIX + "Normalize"}


def write(folder: Path, modules: Any, pooling: dict[str, Any] | None = None, **files: Any) -> Path:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_other_folders_have_none(tmp_path: Path) -> None:
    assert read_sentence_config(tmp_path) is None


def test_pooling_scaling_length_and_prompts(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        [TRANSFORMER, POOLING, NORMALIZE],
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 3},
        sentence_bert_config={"max_seq_length": 99, "do_lower_case": False},
        config_sentence_transformers={"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"},
    )
    prompts = {"query": "find: ", "document": ""}
    assert read_sentence_config(folder) == SentenceConfig("cls", True, 99, prompts, "query")
    plain = write(tmp_path, [TRANSFORMER, POOLING], {"pooling_mode_lasttoken": True}, config_sentence_transformers={})
    assert read_sentence_config(plain) == SentenceConfig("last", False, 99)
    newer = write(tmp_path, [TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"})
    assert read_sentence_config(newer).pooling == "last"


def test_linears_behind_the_pooling(tmp_path: Path) -> None:
    """In their order; without a name of its own, the activation is the tanh, and there is a bias."""
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": PREFIX + "Dense"}
    folder = write(tmp_path, [TRANSFORMER, POOLING, dense, {**dense, "path": "3_Dense"}, NORMALIZE])
    for name, config in (
        ("2_Dense", {"in_features": 3, "out_features": 5, "bias": False, "activation_function": "a.Identity"}),
        ("3_Dense", {"in_features": 5, "out_features": 4}),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    config = read_sentence_config(folder)
    assert config is not None and config.normalize
    assert config.dense == (
        DenseModule(folder / "2_Dense", 3, 5, False, ""),
        DenseModule(folder / "3_Dense", 5, 4, True, "tanh"),
    )


def test_scores_of_a_language_models_logits(tmp_path: Path) -> None:
    score = {"idx": 1, "name": "1", "path": "1_Pooling", "type": PREFIX + "LogitScore"}
    folder = write(
        tmp_path,
        [TRANSFORMER, score],
        {"true_token_id": 7, "false_token_id": 5},
        config_sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"},
        sentence_bert_config={"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
    )
    config = read_sentence_config(folder)
    assert config is not None and config.logit_score == LogitScore(7, 5)
    assert config.activation.endswith("Identity") and config.opens_answer


@pytest.mark.parametrize(
    ("modules", "pooling", "files", "said"),
    [
        ({}, None, {}, "list of modules"),
        ([TRANSFORMER, {**POOLING, "type": PREFIX + "LayerNorm"}], None, {}, "'LayerNorm'"),
        ([NORMALIZE, {**POOLING, "type": PREFIX + "Dense"}], None, {}, "'Dense' is not supported there"),
        ([{**POOLING, "type": PREFIX + "Dense"}], {"activation_function": "torch.nn.ReLU"}, {}, "ReLU"),
        ([{**POOLING, "type": PREFIX + "Dense"}], {"in_features": 3}, {}, "out_features"),
        ([{**POOLING, "type": PREFIX + "Dense"}], {"module_input_name": "token_embeddings"}, {}, "module_input_name"),
        ([{**POOLING, "type": PREFIX + "LogitScore"}], {"true_token_id": None}, {}, "true_token_id"),
        (
            [POOLING],
            None,
            {"sentence_bert_config": {"processing_kwargs": {"chat_template": {"tools": []}}}},
            "templates with tools",
        ),
        ([{**POOLING, "path": "../elsewhere"}], None, {}, "not a folder inside"),
        ([{**POOLING, "path": "/etc"}], None, {}, "not a folder inside"),
        ([POOLING], {"pooling_mode_max_tokens": True}, {}, "pooling_mode_max_tokens"),
        ([POOLING], {"pooling_mode_max_tokens": False}, {}, "pooling by nothing"),
        ([POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, {}, "cls_token"),
        ([POOLING], {"pooling_mode_mean_tokens": True, "include_prompt": False}, {}, "include_prompt"),
        ([POOLING], None, {"sentence_bert_config": {"max_seq_length": "many"}}, "max_seq_length"),
        ([POOLING], None, {"config_sentence_transformers": {"prompts": ["a"]}}, "prompts"),
        ([POOLING], None, {"config_sentence_transformers": {"default_prompt_name": "q"}}, "default_prompt_name"),
    ],
)
def test_what_is_refused(tmp_path: Path, modules: Any, pooling: Any, files: dict[str, Any], said: str) -> None:
    with pytest.raises(BadCheckpoint, match=said):
        read_sentence_config(write(tmp_path, modules, pooling, **files))
