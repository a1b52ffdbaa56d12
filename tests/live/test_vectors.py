"""Vectors of a real sentence-transformers model, over HTTP with a real client and in process, against transformers."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import Server

from tiny import tensor
from tokenmill import LLM
from tokenmill.core.errors import ContextTooLong, FetchError, InvalidRequest
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.hub import resolve_model
from tokenmill.formats.safetensors import write_safetensors
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.roles import expected_shapes
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from tiny_tokenizer import byte_metadata

TEXTS = [
    "The new movie is awesome.",
    "That film was great!",
    "The cat sits outside.",
    "An otter floats on its back in the river, holding a stone.",
    "数学は美しい。",
    "x",
]

NATIVE_TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def minilm() -> Path:
    try:
        return resolve_model("minilm").path
    except FetchError as error:
        pytest.skip(f"the model cannot be fetched: {error.message}")


@pytest.fixture(scope="module")
def server(minilm: Path) -> Iterator[Server]:
    with Server("--enable-log-requests", model="minilm") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server):
    openai = pytest.importorskip("openai", reason="a real client")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(minilm: Path) -> np.ndarray:
    """Mean of the last hidden states, scaled to length 1: the model's own two steps, by transformers and torch."""
    torch = pytest.importorskip("torch", reason="the oracle needs torch")
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    model = transformers.AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    found = []
    for text in TEXTS:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.stack(found)


def post(server: Server, path: str, **body: object) -> tuple[int, dict]:
    status, text = server.request("POST", path, body)
    return status, json.loads(text)


def test_vectors_equal_transformers(client, expected: np.ndarray) -> None:
    """The openai client asks for base64 by itself; a list of numbers says the same."""
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    ours = np.array([item.embedding for item in answer.data], np.float32)
    assert ours.shape == (len(TEXTS), 384) and [item.index for item in answer.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose(ours, expected, atol=NATIVE_TOLERANCE)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    plain = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
    assert np.array_equal(np.array(plain.data[0].embedding, np.float32), ours[0])


def test_meaning_shows(client) -> None:
    vectors = np.array([item.embedding for item in client.embeddings.create(model="minilm", input=TEXTS).data])
    likeness = vectors @ vectors.T - 2 * np.eye(len(TEXTS))
    assert likeness[0].argmax() == 1 and likeness[1].argmax() == 0


def test_token_ids_are_taken_as_they_are(client, server: Server, minilm: Path) -> None:
    _, said = post(server, "/tokenize", prompt=TEXTS[2])
    by_text = client.embeddings.create(model="minilm", input=TEXTS[2]).data[0].embedding
    by_ids = client.embeddings.create(model="minilm", input=said["tokens"]).data[0].embedding
    both = client.embeddings.create(model="minilm", input=[said["tokens"], said["tokens"]]).data
    assert by_text == by_ids == both[0].embedding == both[1].embedding


def test_many_inputs_at_once_equal_each_alone(client) -> None:
    """Bit for bit, and in order, whatever the batch."""
    inputs = [f"{'word ' * (number % 40)}number {number}" for number in range(300)]
    together = client.embeddings.create(model="minilm", input=inputs).data
    for number in (0, 39, 150, 299):
        alone = client.embeddings.create(model="minilm", input=inputs[number]).data[0]
        assert together[number].embedding == alone.embedding


def test_dimensions_and_scaling(server: Server) -> None:
    """Fewer dimensions are the first ones, scaled again; without scaling they are a part of the whole."""
    _, whole = post(server, "/v1/embeddings", input=TEXTS[0], normalize=False)
    _, part = post(server, "/v1/embeddings", input=TEXTS[0], dimensions=16, encoding_format="base64")
    raw = np.array(whole["data"][0]["embedding"])
    cut = np.frombuffer(base64.b64decode(part["data"][0]["embedding"]), "<f4")
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    np.testing.assert_allclose(cut, raw[:16] / np.linalg.norm(raw[:16]), atol=1e-6)


def test_the_request_log_names_the_answer(server: Server) -> None:
    answer_id = post(server, "/v1/embeddings", model="minilm", input="x")[1]["id"]
    assert any("came pool-" in line and f" as '{answer_id}': " in line for line in list(server.lines))


def test_an_input_that_is_too_long(server: Server) -> None:
    """Refused with the limit named, or cut within the text, what is around it kept."""
    text = "word " * 400
    status, refused = post(server, "/v1/embeddings", input=text)
    assert status == 400 and "256" in refused["error"]["message"], refused
    assert refused["error"]["code"] == "context_length_exceeded" and refused["error"]["param"] == "input"
    status, cut = post(server, "/v1/embeddings", input=[text, "short"], truncate_prompt_tokens=-1)
    _, short = post(server, "/v1/embeddings", input="word " * 254)
    assert status == 200 and cut["usage"]["prompt_tokens"] == 256 + 3
    assert cut["data"][0]["embedding"] == short["data"][0]["embedding"]


def test_scores_and_rankings(server: Server) -> None:
    """Cosines of the vectors; a ranking is best first, cut to top_n, and carries the documents."""
    query = "Where do otters live?"
    documents = ["Bread needs flour and water.", TEXTS[3], "The river is home to many animals."]
    _, vectors = post(server, "/v1/embeddings", input=[query, *documents])
    states = np.array([item["embedding"] for item in vectors["data"]])
    status, scored = post(server, "/v1/score", text_1=query, text_2=documents)
    assert status == 200
    scores = [item["score"] for item in scored["data"]]
    np.testing.assert_allclose(scores, states[1:] @ states[0], atol=1e-6)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        status, ranked = post(server, path, query=query, documents=documents, top_n=2)
        results = ranked["results"]
        assert status == 200 and [item["index"] for item in results] == sorted(range(3), key=lambda i: -scores[i])[:2]
        assert results[0]["relevance_score"] == max(scores)
        assert results[0]["document"]["text"] == documents[results[0]["index"]]
    status, pairs = post(server, "/score", text_1=documents, text_2=documents)
    np.testing.assert_allclose([item["score"] for item in pairs["data"]], 1, atol=1e-6)


def test_an_empty_document_is_scored_like_others(server: Server) -> None:
    status, ranked = post(server, "/v1/rerank", query="Where do otters live?", documents=["In rivers.", "", "x"])
    scores = {item["index"]: item["relevance_score"] for item in ranked["results"]}
    assert status == 200 and sorted(scores) == [0, 1, 2] and scores[0] == max(scores.values())


def test_more_inputs_than_may_be_open_are_refused_for_good(server: Server) -> None:
    """A call that could never be admitted is not told to come back."""
    for path, body in (
        ("/v1/embeddings", {"input": ["x"] * 1025}),
        ("/v1/score", {"text_1": "x", "text_2": [f"y{number}" for number in range(1024)]}),
    ):
        status, answer = post(server, path, **body)
        assert status == 400 and "1024" in answer["error"]["message"], answer


def test_the_other_kind_of_endpoint_says_where_to_go(server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        status, answer = post(server, path, **body)
        assert status == 400 and answer["error"]["param"] in ("model", "messages"), answer


def test_metrics_count_vectors(server: Server) -> None:
    before = server.metrics()
    post(server, "/v1/embeddings", input=["one", "two"])
    after = server.metrics()
    assert after["tokenmill:pooling_requests_total"] - before["tokenmill:pooling_requests_total"] == 2
    assert after["vllm:request_success_total"] - before["vllm:request_success_total"] == 2
    assert after["vllm:generation_tokens_total"] == 0 and server.idle()


def test_in_process(minilm: Path, expected: np.ndarray) -> None:
    with LLM("minilm", threads=1) as llm:
        np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=NATIVE_TOLERANCE)
        assert llm.embed(TEXTS[0]).shape == (1, 384) and llm.embed(TEXTS[0], dimensions=5).shape == (1, 5)
        scores = llm.score(TEXTS[0], TEXTS[1:])
        np.testing.assert_allclose(scores, expected[1:] @ expected[0], atol=1e-5)
        with pytest.raises(InvalidRequest, match="generates no text"):
            llm.generate("x")
        with pytest.raises(ContextTooLong, match="256"):
            llm.embed("word " * 400)


def test_quantised_weights_keep_the_meaning(minilm: Path, expected: np.ndarray) -> None:
    with LLM("minilm", quantization="q8") as llm:
        assert (llm.embed(TEXTS) * expected).sum(axis=1).min() > 0.995


def test_a_language_model_gives_vectors_if_asked(smollm2: Path) -> None:
    """Last-token vectors do not depend on what the cache holds, and the text endpoints are closed."""
    with Server("--pooling", "last", "--kv-cache-memory-bytes", "100MiB") as server:
        prefix = "The cat sat on the mat and looked at the dog. " * 4
        inputs = [prefix + "It slept.", prefix + "It ran.", "Stocks fell."]
        _, first = post(server, "/v1/embeddings", input=inputs)
        _, again = post(server, "/v1/embeddings", input=inputs)
        _, salted = post(server, "/v1/embeddings", input=inputs[1], cache_salt="other")
        assert first["data"] == again["data"] and salted["data"][0]["embedding"] == first["data"][1]["embedding"]
        assert server.metrics()["vllm:prefix_cache_hits_total"] > 0
        vectors = np.array([item["embedding"] for item in first["data"]])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
        status, answer = post(server, "/v1/rerank", query="x", documents=["y", ""])  # nothing is put around a text here
        assert status == 400 and answer["error"]["message"].startswith("documents[1] gives no token"), answer
        assert answer["error"]["param"] == "documents"
        status, answer = post(server, "/v1/completions", prompt="x")
        assert status == 400 and "generates no text" in answer["error"]["message"]


def test_a_language_model_served_for_text_gives_none(smollm2: Path) -> None:
    with Server("--kv-cache-memory-bytes", "100MiB") as server:
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/v1/score", {"text_1": "x", "text_2": "y"}),
            ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ):
            status, answer = post(server, path, **body)
            assert status == 400 and "--runner pooling" in answer["error"]["message"], answer


def save_reranker(folder: Path) -> None:
    """A random Llama whose score is a logit, behind a chat template for pairs, as sentence-transformers saves one."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
        "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = expected_shapes("hf", config_from_checkpoint(Checkpoint("hf", folder, config, {})))
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=shape) * (0.2 if len(shape) > 1 else 1) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", [tensor(name, each) for name, each in values.items()])
    (folder / "tokenizer.json").write_text(tokenizer_from_gguf(byte_metadata()).to_json())
    role = '(messages | selectattr("role", "eq", "{}") | first).content'
    template = f"<|end|>find {{{{ {role.format('query')} }}}}\n\n{{{{ {role.format('document')} }}}}<|end|>"
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "a.LogitScore"}]
    (folder / "1_LogitScore").mkdir()
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", {"chat_template": template, "eos_token": "<|end|>"}),
        ("modules.json", modules),
        ("1_LogitScore/config.json", {"true_token_id": 7, "false_token_id": 8}),
    ):
        (folder / name).write_text(json.dumps(content))


def test_pairs_that_a_chat_template_makes_one_text_of(tmp_path: Path) -> None:
    """The server scores as the model in process does, which transformers' rendering is the oracle of."""
    save_reranker(tmp_path)
    documents = ["otters", "", "find <|end|> here", "x " * 40]
    with LLM(str(tmp_path), threads=1) as llm:
        expected = llm.score("where", documents)
    assert max(expected) - min(expected) > 1e-3
    with Server("--threads", "1", model=str(tmp_path)) as server:
        status, scored = post(server, "/v1/score", text_1="where", text_2=documents)
        assert status == 200 and [item["score"] for item in scored["data"]] == expected
        status, ranked = post(server, "/v1/rerank", query="where", documents=documents, truncate_prompt_tokens=-1)
        assert status == 200 and ranked["results"][0]["index"] == expected.index(max(expected))
        status, answer = post(server, "/v1/rerank", query="where", documents=documents, truncate_prompt_tokens=20)
        assert status == 400 and answer["error"]["param"] == "truncate_prompt_tokens", answer
        assert "documents[2]" in answer["error"]["message"]
        status, answer = post(server, "/v1/rerank", query="where", documents=["x" * 300])
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_model_of_vectors_does_not_wait_for_a_message_to_say_so(command):
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill.cli.main", command, "minilm", "--threads", "1"],
        input="hello\n", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "generates no text" in done.stderr and done.stderr.count("\n") == 1
    assert not done.stdout


def test_vectors_as_ollama_gives_them(server: Server) -> None:
    """Of length 1 from /api/embed, cut where they are too long; as the model gives them from the older path."""
    _, known = post(server, "/v1/embeddings", input=TEXTS)
    status, answer = post(server, "/api/embed", model="minilm:latest", input=TEXTS)
    assert status == 200 and answer["embeddings"] == [each["embedding"] for each in known["data"]]
    assert answer["prompt_eval_count"] == known["usage"]["prompt_tokens"] and answer["total_duration"] > 0
    (one,) = post(server, "/api/embed", model="minilm", input=TEXTS[0], dimensions=5)[1]["embeddings"]
    assert len(one) == 5
    (raw,) = [np.array(post(server, "/api/embeddings", model="minilm", prompt=TEXTS[0])[1]["embedding"])]
    assert np.allclose(raw / np.linalg.norm(raw), answer["embeddings"][0], atol=1e-6) and np.linalg.norm(raw) > 1.5
    assert post(server, "/api/embed", model="minilm", input="")[1]["embeddings"] == []
    assert post(server, "/api/embeddings", model="minilm", prompt="")[1] == {"embedding": []}
    long = "word " * 2000
    assert post(server, "/api/embed", model="minilm", input=long)[0] == 200
    for path, body, named in (
        ("/api/embed", {"input": long, "truncate": False}, "have it cut by truncate."),
        ("/api/embed", {"input": [1]}, "input must be a string"),
        ("/api/embeddings", {"prompt": long}, "prompt has"),
        ("/api/embed", {"input": "x", "dimensions": 100_000}, "dimensions must be at most"),
    ):
        status, answer = post(server, path, model="minilm", **body)
        assert status == 400 and named in answer["error"], answer
    show = post(server, "/api/show", model="minilm")[1]
    assert show["capabilities"] == ["embedding"] and show["model_info"]["bert.embedding_length"] == 384


def test_vectors_as_llama_server_gives_them(server: Server) -> None:
    """A list, with a row of vectors for each text; of length 1 unless the caller wants the model's own."""
    _, known = post(server, "/v1/embeddings", input=TEXTS[:2])
    status, answer = post(server, "/embedding", content=TEXTS[:2])
    assert status == 200
    assert answer == [{"index": each["index"], "embedding": [each["embedding"]]} for each in known["data"]]
    (raw,) = post(server, "/embeddings", input=TEXTS[0], embd_normalize=-1)[1]
    assert np.linalg.norm(raw["embedding"][0]) > 1.5
    for body, named in (({"content": 5}, "content must be"), ({"content": "x", "embd_normalize": 1}, "embd_normalize")):
        status, error = post(server, "/embedding", **body)
        assert status == 400 and named in error["error"]["message"] and error["error"]["code"] == 400
