"""Decoders that give vectors or scores: small random models saved by transformers and loaded by us, on numpy and the
native kernels: bare ones, sequence classifiers, and language models whose logits of two tokens score a pair of texts.

How states are pooled, and what comes behind, is written out here as transformers and sentence-transformers define it.
Tolerance: float32 on both sides, in different orders of summation.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from encoder_families import CLASSIFIERS, SHAPE
from gguf_families import convert
from test_encoders import BACKENDS, TOLERANCE, tokens_of, vectors
from test_encoders import make_worker as make_whole_worker

from tokenmill import LLM
from tokenmill.core.block import full_groups
from tokenmill.core.errors import BadCheckpoint, InvalidRequest
from tokenmill.core.request import PoolingParams, SamplingParams
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.formats.checkpoint import Checkpoint, open_checkpoint
from tokenmill.models.vectors import vector_config
from tokenmill.node.load import choose_pooling
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker.build import Worker
from workers import build_vector_worker

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="the oracle needs safetensors")
tokenizers = pytest.importorskip("tokenizers", reason="the oracle needs tokenizers")

OPTIONS = {key: value for key, value in SHAPE.items() if not key.endswith("prob") and key != "type_vocab_size"} | {
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LENGTHS = (1, 7, 40)


def save(family: str, suffix: str, folder: Path, **options):
    """A random model, seeded, saved; the same in transformers."""
    config = getattr(transformers, f"{family}Config")(**OPTIONS | options)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}{suffix}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1).add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_worker(ops, checkpoint: Checkpoint, cache_dir: Path) -> Worker:
    return build_vector_worker(
        checkpoint, ops, max_model_len=128, groups=full_groups(16), kv_dtype="f32", cache_dir=cache_dir
    )


def in_two_chunks(worker: Worker, number: int, tokens: list[int], params: PoolingParams) -> np.ndarray:
    """What a prompt gives whose last third comes in a second step, on blocks in no order."""
    first = 2 * len(tokens) // 3
    intro = Introduction(tuple(tokens), (), SamplingParams(max_tokens=1), 0, 0, (), params)
    blocks = [(5 * place + 3 * number) % 16 for place in range(-(-len(tokens) // 16))]
    begun = -(-first // 16)
    rows = [PlanRow(number, first, tuple(tokens[first:]), blocks=tuple(blocks[begun:]), sample=True)]
    if first:
        begin = PlanRow(number, 0, tuple(tokens[:first]), blocks=tuple(blocks[:begun]), intro=intro)
        worker.executor.execute_now(StepPlan(2 * number, (begin,)))
    else:
        rows = [PlanRow(number, 0, tuple(tokens), blocks=tuple(blocks), intro=intro, sample=True)]
    (result,) = worker.executor.execute_now(StepPlan(2 * number + 1, tuple(rows))).rows
    worker.executor.execute_now(StepPlan(2 * number + 2, (), released=(number,)))
    return np.frombuffer(result.vector, np.float32)


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_a_bare_decoders_hidden_states(make_ops, tmp_path):
    """Saved without its language head: last (as Qwen3-Embedding pools), first and mean of its states."""
    theirs = save("Qwen3", "Model", tmp_path / "model", head_dim=16)
    worker = make_worker(make_ops(), open_checkpoint(tmp_path / "model"), tmp_path)
    tokens = tokens_of(40)
    with torch.no_grad():
        states = theirs(torch.tensor([tokens])).last_hidden_state[0]
    for number, how in enumerate(("last", "cls", "mean")):
        expected = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[how].numpy()
        got = in_two_chunks(worker, number, tokens, PoolingParams(how))
        np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())
    worker.executor.close()


def test_an_embedding_model_from_text_to_vector(tmp_path):
    """As Qwen3-Embedding is published: a body whose config names the whole model, EOS behind each text, instructions as
    prompts, the last token's state at length 1."""
    theirs = save("Qwen3", "Model", tmp_path, head_dim=16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    tokenizer = save_tokenizer(tmp_path, ends=True)
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"path": "2_Normalize", "type": "a.Normalize"}]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    prompts = {"prompts": {"query": "find word7 Query :", "document": ""}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    texts = ["word1", "word2 word3 " * 20]
    with LLM(str(tmp_path), kv_cache_dtype="f32") as llm:
        for name, prompt in {None: "", **prompts["prompts"]}.items():
            for text, got in zip(texts, llm.embed(texts, prompt_name=name), strict=True):
                with torch.no_grad():
                    state = theirs(**tokenizer(prompt + text, return_tensors="pt")).last_hidden_state[0, -1]
                expected = torch.nn.functional.normalize(state, dim=0).numpy()
                np.testing.assert_allclose(got, expected, atol=2e-5)


GEMMA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
    "query_pre_attn_scalar": 16,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("window", [12, 5, 512])
@pytest.mark.parametrize("make_ops", BACKENDS)
def test_a_decoder_that_sees_ahead(make_ops, window, tmp_path):
    """EmbeddingGemma's body: every token sees all of its text, or what is within half a window to each side; texts of
    very different lengths in one step."""
    theirs = save("Gemma3Text", "Model", tmp_path, **GEMMA, sliding_window=window)
    worker = make_whole_worker(make_ops(), tmp_path, tmp_path)
    for how in ("mean", "cls", "last"):
        requests = [(tokens_of(length), PoolingParams(how)) for length in (1, 7, 40, 300)]
        for (tokens, _), got in zip(requests, vectors(worker, requests), strict=True):
            with torch.no_grad():
                states = theirs(torch.tensor([tokens])).last_hidden_state[0]
            expected = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[how].numpy()
            np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())
    worker.executor.close()


def test_any_decoder_may_see_ahead(tmp_path):
    """`is_causal`, off: as GTE-Qwen2's own code reads it. transformers is given a mask that hides nothing."""
    theirs = save("Qwen2", "Model", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    worker = make_whole_worker(ReferenceOps(exact_activations=True), tmp_path, tmp_path)
    tokens = tokens_of(40)
    with torch.no_grad():
        mask = {"full_attention": torch.zeros(1, 1, len(tokens), len(tokens))}
        expected = theirs(torch.tensor([tokens]), attention_mask=mask).last_hidden_state[0, -1].numpy()
    (got,) = vectors(worker, [(tokens, PoolingParams("last"))])
    worker.executor.close()
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())
    assert choose_pooling(open_checkpoint(tmp_path), "auto", None) is not None
    windowed = {"is_causal": False, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config | windowed | {"layer_types": None}))
    with pytest.raises(BadCheckpoint, match=r"is_causal does not go with .* windows"):
        choose_pooling(open_checkpoint(tmp_path), "auto", None)


def test_linears_behind_the_pooling(tmp_path):
    """EmbeddingGemma from text to vector: the mean, two linears, length 1; prompts by name."""
    theirs = save("Gemma3Text", "Model", tmp_path, **GEMMA, sliding_window=12)
    tokenizer = save_tokenizer(tmp_path)
    torch.manual_seed(2)
    linears = [torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 40)]
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    modules = [{"path": f"{place}_{kind}" if place else "", "type": f"a.{kind}"} for place, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    for place, (linear, name) in enumerate(zip(linears, ("Identity", "Tanh"), strict=True), 2):
        at = tmp_path / f"{place}_Dense"
        at.mkdir()
        settings = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": place == 3}
        (at / "config.json").write_text(json.dumps(settings | {"activation_function": f"torch.nn.{name}"}))
        tensors = {f"linear.{key}": value.contiguous() for key, value in linear.state_dict().items()}
        safetensors_torch.save_file(tensors, at / "model.safetensors")
    with LLM(str(tmp_path)) as llm:
        assert llm.ready.vector_size == 40
        for text in ("word1", "word2 word3 " * 20):
            with torch.no_grad():
                state = theirs(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
                state = torch.tanh(linears[1](linears[0](state)))
            expected = torch.nn.functional.normalize(state, dim=0).numpy()
            np.testing.assert_allclose(llm.embed(text)[0], expected, atol=2e-5)
            short = torch.nn.functional.normalize(state[:8], dim=0).numpy()
            np.testing.assert_allclose(llm.embed(text, dimensions=8)[0], short, atol=2e-5)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("make_ops", BACKENDS)
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_sequence_classifiers(family, make_ops, tmp_path):
    """A linear on the state of the last token, whole and through the sigmoid."""
    theirs = save(family, "ForSequenceClassification", tmp_path / "model", num_labels=1)
    checkpoint = open_checkpoint(tmp_path / "model")
    choice = choose_pooling(checkpoint, "auto", None)
    assert choice is not None and choice.params == PoolingParams("score", activation="sigmoid")
    worker = make_worker(make_ops(), checkpoint, tmp_path)
    for number, length in enumerate(LENGTHS):
        tokens = tokens_of(length)
        with torch.no_grad():
            logits = theirs(torch.tensor([tokens])).logits[0]
        raw = in_two_chunks(worker, 2 * number, tokens, PoolingParams("score"))
        mapped = in_two_chunks(worker, 2 * number + 1, tokens, PoolingParams("score", activation="sigmoid"))
        np.testing.assert_allclose(raw, logits.numpy(), atol=4 * TOLERANCE * max(1, float(logits.abs().max())))
        np.testing.assert_allclose(mapped, torch.sigmoid(logits).numpy(), atol=4 * TOLERANCE)
    worker.executor.close()


RERANKER = """<|im_start|>system
Judge the Document .<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("find it") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_tokenizer(folder: Path, *, ends: bool = False):
    """Words and a few special tokens. ends: <eos> comes behind each text."""
    words = ["<pad>", "<bos>", "<eos>", "yes", "no", "<|im_start|>", "<|im_end|>", "system", "user", "assistant"]
    words += ["Judge", "the", "Document", "Query", "Instruct", ".", ":", "<", ">:", "find", "it", "all"]
    words += [f"word{number}" for number in range(SHAPE["vocab_size"] - len(words))]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"])
    if ends:
        backend.post_processor = tokenizers.processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = RERANKER
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_modules(folder: Path, true_token: int, false_token: int | None, prompt: str, opens: bool) -> None:
    """As sentence-transformers saves a cross-encoder of a language model."""
    at = "sentence_transformers."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": at + "base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": at + "cross_encoder.modules.logit_score.LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    tokens = {"true_token_id": true_token, "false_token_id": false_token}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    settings = {"prompts": {"own": prompt}, "default_prompt_name": "own"} if prompt else {}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    calls = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}} if opens else {}
    (folder / "sentence_bert_config.json").write_text(json.dumps(calls))


@pytest.mark.parametrize("false_token", [4, None])
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_that_says_yes_or_no(tied, false_token, tmp_path):
    """Qwen3-Reranker's way, from text to score: the chat template makes one text of a pair, and the logit of "yes",
    less that of "no", goes through the sigmoid."""
    theirs = save("Qwen3", "ForCausalLM", tmp_path, head_dim=16, tie_word_embeddings=tied)
    tokenizer = save_tokenizer(tmp_path)
    prompt = "find all" if tied else ""
    write_modules(tmp_path, 3, false_token, prompt, opens=tied)
    query, texts = "word1 word2", ["word3", "word4 word5 word6 " * 20, "word1 <|im_end|> word2", ""]
    expected = []
    for text in texts:
        pair = [{"role": "system", "content": prompt}] if prompt else []
        pair += [{"role": "query", "content": query}, {"role": "document", "content": text.replace("<|im_end|>", "X")}]
        given = tokenizer.apply_chat_template(pair, add_generation_prompt=tied, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            logits = theirs(input_ids=given["input_ids"]).logits[0, -1]
        score = logits[3] - (0 if false_token is None else logits[false_token])
        expected.append(float(torch.sigmoid(score)))
    with LLM(str(tmp_path), kv_cache_dtype="f32") as llm:
        got = llm.score(query, texts)
        with pytest.raises(InvalidRequest, match="scores pairs"):
            llm.embed("word1")
    assert max(expected) - min(expected) > 0.01
    plain = [place for place, text in enumerate(texts) if "<|" not in text]  # what a text spells is no special token
    np.testing.assert_allclose([got[i] for i in plain], [expected[i] for i in plain], atol=1e-5)


def test_a_reranker_as_a_gguf_file(tmp_path):
    """llama.cpp's converter keeps the rows of yes and no as a classifier, of whose softmax the first is the score."""
    theirs = save("Qwen3", "ForCausalLM", tmp_path, head_dim=16, tie_word_embeddings=True)
    checkpoint = open_checkpoint(convert(tmp_path, "Qwen3", tmp_path / "model.gguf"))
    rows = theirs.lm_head.weight.detach().numpy()[[3, 4]]
    head = {"cls.output.weight": (rows.shape, rows)}
    for name, (shape, values) in head.items():
        embed = checkpoint.tensors["token_embd.weight"]
        checkpoint.tensors[name] = type(embed)(name, "f32", shape, memoryview(values.tobytes()))
    checkpoint.metadata["qwen3.pooling_type"] = 4
    choice = choose_pooling(checkpoint, "auto", None)
    assert choice is not None and choice.params == PoolingParams("score", activation="sigmoid")
    worker = make_worker(ReferenceOps(exact_activations=True), checkpoint, tmp_path)
    tokens = tokens_of(40)
    with torch.no_grad():
        yes_no = theirs(torch.tensor([tokens])).logits[0, -1, [3, 4]]
    got = in_two_chunks(worker, 0, tokens, choice.params)
    worker.executor.close()
    np.testing.assert_allclose(got, torch.softmax(yes_no, 0)[:1].numpy(), atol=4 * TOLERANCE)


def test_what_is_refused(tmp_path):
    """Classifiers of several labels, tokens and heads that are not there, and tokens that see ahead where layers have
    heads of their own."""
    shared = transformers.Gemma4TextConfig().to_dict() | {"architectures": ["Gemma4TextModel"], "is_causal": False}
    with pytest.raises(BadCheckpoint, match="is_causal does not go with"):
        vector_config(Checkpoint("hf", tmp_path, shared, {}))
    save("Qwen2", "ForSequenceClassification", tmp_path / "two", num_labels=2)
    with pytest.raises(BadCheckpoint, match="2 labels"):
        choose_pooling(open_checkpoint(tmp_path / "two"), "auto", None)
    save("Qwen2", "ForCausalLM", tmp_path / "logits")
    write_modules(tmp_path / "logits", SHAPE["vocab_size"], None, "", opens=False)
    with pytest.raises(BadCheckpoint, match="beyond the vocabulary"):
        make_worker(ReferenceOps(), open_checkpoint(tmp_path / "logits"), tmp_path)
    save("Qwen2", "ForSequenceClassification", tmp_path / "none", num_labels=1)
    checkpoint = open_checkpoint(tmp_path / "none")
    del checkpoint.tensors["score.weight"]
    with pytest.raises(BadCheckpoint, match=r"no score\.weight"):
        make_worker(ReferenceOps(), checkpoint, tmp_path)
