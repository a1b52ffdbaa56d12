"""Every encoder family: small random models saved by transformers and loaded by us, on numpy and the native kernels.

What a request gets (its vector or score) is compared, since that is what pooling, places, types of text and the head
come down to. Pooling is written out here as sentence-transformers defines it. Tolerance: float32 on both sides, in
different orders of summation.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from encoder_families import CASES, SHAPE, EncoderCase

from tokenmill import LLM
from tokenmill.core.block import full_groups
from tokenmill.core.errors import BadCheckpoint, InvalidRequest
from tokenmill.core.request import PoolingParams, SamplingParams
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.models.encoder_config import encoder_config
from tokenmill.models.encoder_families import NOMIC_OWN
from tokenmill.models.unsupported_keys import unread_keys
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker.build import Worker
from workers import build_vector_worker

torch = pytest.importorskip("torch", reason="the oracle needs torch")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="the oracle needs safetensors")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

LENGTHS = (1, 7, 40, 300)
TOLERANCE = 5e-6

NATIVE_REASON = available()
BACKENDS = [
    pytest.param(lambda: ReferenceOps(exact_activations=True), id="numpy"),
    pytest.param(
        NativeOps, id="native", marks=pytest.mark.skipif(NATIVE_REASON is not None, reason=str(NATIVE_REASON))
    ),
]


def save_model(case: EncoderCase, folder):
    """A random model of the case, seeded, saved; the same in transformers."""
    config = getattr(transformers, f"{case.family}Config")(**SHAPE | case.options)
    torch.manual_seed(1)
    model = getattr(transformers, f"{case.family}{case.suffix}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1).add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(params=CASES, ids=[case.title.replace(" ", "_") for case in CASES], scope="module")
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    return request.param, folder, save_model(request.param, folder)


def make_worker(ops, folder, cache_dir) -> Worker:
    return build_vector_worker(
        open_checkpoint(folder),
        ops,
        max_model_len=sum(LENGTHS),
        groups=full_groups(0),
        max_num_batched_tokens=sum(LENGTHS),
        max_num_seqs=len(LENGTHS),
        cache_dir=cache_dir,
    )


def vectors(worker: Worker, requests: list[tuple[list[int], PoolingParams]]) -> list[np.ndarray]:
    """All in one step."""
    rows = []
    for number, (tokens, params) in enumerate(requests):
        intro = Introduction(tuple(tokens), (), SamplingParams(max_tokens=1), 0, 0, (), params)
        rows.append(PlanRow(number, 0, tuple(tokens), intro=intro, sample=True))
    result = worker.executor.execute_now(StepPlan(0, tuple(rows)))
    return [np.frombuffer(row.vector, np.float32) for row in result.rows]


def tokens_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(5, SHAPE["vocab_size"], length).tolist()


def their_output(case: EncoderCase, model, tokens: list[int], second_from: int = 0):
    ids = torch.tensor([tokens])
    types = {}
    if second_from and SHAPE["type_vocab_size"] > 1 and case.has_types:
        types["token_type_ids"] = torch.tensor([[int(place >= second_from) for place in range(len(tokens))]])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **types)


def expected_vector(case: EncoderCase, model, tokens: list[int], params: PoolingParams) -> np.ndarray:
    output = their_output(case, model, tokens, params.second_from)
    if params.how == "score":
        score = output.logits[0]
        return (torch.sigmoid(score) if params.activation else score).numpy()
    states = output.last_hidden_state[0]
    state = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[params.how]
    if params.dimensions:
        state = state[: params.dimensions]
    return (torch.nn.functional.normalize(state, dim=0) if params.activation == "unit" else state).numpy()


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("make_ops", BACKENDS)
def test_vectors_and_scores(saved, make_ops, tmp_path):
    """Sequences of very different lengths in one step, each way of pooling, pairs with two types of text."""
    case, folder, theirs = saved
    hows = ("score",) if case.suffix == "ForSequenceClassification" else ("mean", "cls", "last")
    worker = make_worker(make_ops(), folder, tmp_path)
    for how in hows:
        for activation in ("", "sigmoid" if how == "score" else "unit"):
            for second_from, dimensions in ((0, 0), (5, 0 if how == "score" else 24)):
                params = PoolingParams(how, dimensions, activation, second_from)
                requests = [(tokens_of(length), params) for length in LENGTHS]
                for (tokens, _), got in zip(requests, vectors(worker, requests), strict=True):
                    expected = expected_vector(case, theirs, tokens, params)
                    assert got.shape == expected.shape
                    bound = TOLERANCE * max(1.0, float(np.abs(expected).max()))
                    np.testing.assert_allclose(got, expected, atol=bound, err_msg=f"{params} {len(tokens)}")
    worker.executor.close()


def test_the_oracle_tells_types_apart(saved):
    """Else the pairs above would prove nothing."""
    case, _, theirs = saved
    if not case.has_types:
        pytest.skip("this family has one type of text")
    params = PoolingParams("score" if case.suffix == "ForSequenceClassification" else "mean")
    one, two = (
        expected_vector(case, theirs, tokens_of(40), PoolingParams(params.how, second_from=place)) for place in (0, 5)
    )
    assert np.abs(one - two).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    "family",
    ["Bert", "Roberta", "DistilBert", "ModernBert", "NomicBert", "Electra", "Gte", "JinaEmbeddingsV3"],
)
def test_masked_language_models_give_their_hidden_states(family, tmp_path):
    """Their heads are left where they are."""
    case = next(case for case in CASES if case.family == family)
    save_model(EncoderCase(case.title, family, "ForMaskedLM", case.options), tmp_path)
    theirs = getattr(transformers, f"{family}Model").from_pretrained(tmp_path, dtype=torch.float32).eval()
    worker = make_worker(ReferenceOps(exact_activations=True), tmp_path, tmp_path)
    params = PoolingParams("mean")
    (got,) = vectors(worker, [(tokens_of(40), params)])
    worker.executor.close()
    np.testing.assert_allclose(got, expected_vector(case, theirs, tokens_of(40), params), atol=2e-5)


@pytest.mark.parametrize("family", ["Bert", "ModernBert", "NomicBert"])
def test_pairs_of_texts_from_text_to_score(family, tmp_path):
    """Tokenizer, types of text, head and sigmoid together, as the tokenizer and the model of transformers have it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(100))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    case = next(case for case in CASES if case.family == family and case.suffix == "ForSequenceClassification")
    theirs = save_model(case, tmp_path)
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    query, texts = "word1 word2", ["word3", "word4 word5 word6 " * 20, "word1 word2", ""]
    expected = []
    for text in texts:
        with torch.no_grad():
            given = dict(tokenizer([query], [text], return_tensors="pt"))
            types = {} if case.has_types else {"token_type_ids": None}
            given = {key: value for key, value in (given | types).items() if value is not None}
            expected.append(float(torch.sigmoid(theirs(**given).logits)))
    with LLM(str(tmp_path)) as llm:
        np.testing.assert_allclose(llm.score(query, texts), expected, atol=1e-5)
        with pytest.raises(InvalidRequest, match="scores pairs"):
            llm.embed("word1")
    assert max(expected) - min(expected) > 0.01


def nomics_own(folder, model, biased: bool) -> None:
    """Rewrite a saved Nomic BERT as its makers write it: GPT-2's names in config.json, linears with biases or not."""
    config = json.loads((folder / "config.json").read_text())
    ours = NOMIC_OWN.keys
    own = {theirs: config.pop(name) for name, theirs in ours.items() if name in config} | {
        "activation_function": "swiglu", "architectures": config["architectures"], "causal": False,
        "mlp_fc1_bias": biased, "mlp_fc2_bias": biased, "qkv_proj_bias": biased, "max_trained_positions": 200,
        "prenorm": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2, "use_rms_norm": False,
        "vocab_size": config["vocab_size"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(own))
    if not biased:
        return
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    for number, layer in enumerate(model.layers):
        names = {"o_proj": "attn.out_proj", "up_proj": "mlp.fc11", "gate_proj": "mlp.fc12", "down_proj": "mlp.fc2"}
        linears = {
            **{f"{name}_proj": getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"},
            **{f"{name}_proj": getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")},
        }
        for linear in linears.values():
            linear.bias = torch.nn.Parameter(torch.randn(linear.out_features))
        at = f"encoder.layers.{number}."
        tensors |= {f"{at}{theirs}.bias": linears[name].bias.detach() for name, theirs in names.items()}
        tensors[f"{at}attn.Wqkv.bias"] = torch.cat([linears[f"{name}_proj"].bias.detach() for name in "qkv"])
    safetensors_torch.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("biased", [False, True])
def test_nomics_own_configs(biased, tmp_path):
    """The names that nomic-embed-text-v1.5 has; longer inputs than it can turn by its own rule are refused."""
    case = next(case for case in CASES if case.family == "NomicBert")
    theirs = save_model(case, tmp_path)
    nomics_own(tmp_path, theirs, biased)
    worker = make_worker(ReferenceOps(exact_activations=True), tmp_path, tmp_path)
    params = PoolingParams("mean", second_from=5)
    (got,) = vectors(worker, [(tokens_of(40), params)])
    worker.executor.close()
    np.testing.assert_allclose(got, expected_vector(case, theirs, tokens_of(40), params), atol=2e-5)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert encoder_config(open_checkpoint(tmp_path)).max_context == 512
    path.write_text(json.dumps(config | {"rotary_scaling_factor": 2}))
    assert encoder_config(open_checkpoint(tmp_path)).max_context == 200
    for change, said in (
        ({"use_rms_norm": True}, "use_rms_norm"), ({"moe_every_n_layers": 2}, "moe_every_n_layers"),
        ({"prenorm": True}, "prenorm"), ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
        ({"activation_function": "gelu"}, "gelu"), ({"causal": True}, "causal"), ({"n_head": 5}, "5 heads"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
    ):  # fmt: skip
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(BadCheckpoint, match=said):
            encoder_config(open_checkpoint(tmp_path))


def test_modern_berts_older_configs(tmp_path):
    """Those on the hub say how layers alternate and turn by other keys than transformers writes now."""
    save_model(next(case for case in CASES if case.family == "ModernBert"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    now = encoder_config(open_checkpoint(tmp_path))
    assert [(layer.window, layer.rope.base) for layer in now.layers] == [(0, 160_000), (65, 10_000), (65, 10_000)]
    older = {key: value for key, value in config.items() if key not in ("layer_types", "rope_parameters")}
    older |= {"global_attn_every_n_layers": 2, "global_rope_theta": 5000.0, "local_rope_theta": 50.0}
    path.write_text(json.dumps(older))
    found = encoder_config(open_checkpoint(tmp_path))
    assert [(layer.window, layer.rope.base) for layer in found.layers] == [(0, 5000), (65, 50), (0, 5000)]
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    assert theirs.rope_parameters["sliding_attention"]["rope_theta"] == 50
    for change, said in (
        ({"layer_types": ["full_attention"]}, "layer_types"), ({"hidden_activation": "relu"}, "relu"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"), ({"num_attention_heads": 5}, "5 heads"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "yarn"),
        ({"architectures": ["ModernBertForSequenceClassification"], "id2label": {}}, "0 labels"),
    ):  # fmt: skip
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(BadCheckpoint, match=said):
            encoder_config(open_checkpoint(tmp_path))


def test_gte_as_its_makers_have_it(tmp_path):
    """The same tensors under another type, with RoPE that is stretched by a fixed NTK: the published equations, put
    into transformers' model of the type."""
    case = next(case for case in CASES if case.title == "GTE")
    theirs = save_model(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {key: value for key, value in config.items() if key != "rope_parameters"} | {
        "model_type": "new", "architectures": ["NewModel"], "rope_theta": 500.0, "pack_qkv": True,
        "rope_scaling": {"type": "ntk", "factor": 2.0}, "position_embedding_type": "rope", "unpad_inputs": False,
        "layer_norm_type": "layer_norm", "logn_attention_scale": False, "use_memory_efficient_attention": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(own))
    checkpoint = open_checkpoint(tmp_path)
    assert not unread_keys(checkpoint)
    head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    pairs = torch.arange(0, head_dim, 2).float() / head_dim
    theirs.rotary_emb.inv_freq = (500.0 * 2.0) ** -pairs / 2.0 ** (2 / head_dim)
    worker = make_worker(ReferenceOps(exact_activations=True), tmp_path, tmp_path)
    params = PoolingParams("cls")
    requests = [(tokens_of(length), params) for length in LENGTHS]
    for (tokens, _), got in zip(requests, vectors(worker, requests), strict=True):
        np.testing.assert_allclose(got, expected_vector(case, theirs, tokens, params), atol=2e-5)
    worker.executor.close()
    for change, said in (
        ({"position_embedding_type": "absolute"}, "position_embedding_type"), ({"pack_qkv": False}, "pack_qkv"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type"), ({"logn_attention_scale": True}, "logn_attention"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "rope_scaling"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(own | change))
        with pytest.raises(BadCheckpoint, match=said):
            encoder_config(open_checkpoint(tmp_path))


def test_what_is_refused(tmp_path):
    """Shapes that would run almost right are refused, naming the key."""
    save_model(CASES[0], tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, said in (
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"is_decoder": True}, "made to decode"),
        ({"num_attention_heads": 5}, "5 heads"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "2 labels"),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(BadCheckpoint, match=said):
            encoder_config(open_checkpoint(tmp_path))
    path.write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(BadCheckpoint, match="misshaped"):
        make_worker(ReferenceOps(), tmp_path, tmp_path)
