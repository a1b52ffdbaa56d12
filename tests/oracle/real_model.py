"""The real model seen by three engines: ours, llama.cpp (recorded) and transformers in float32 (live).

Everything is compared on the same tokens: llama.cpp's greedy continuation of each prompt, and the windows of each
passage. An engine is first reduced to a `View`: what log probability it gives each of those tokens, and which token it
would have chosen instead.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill import LLM, SamplingParams
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.models.config import ModelConfig, config_from_checkpoint

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[2] / "shared" / "data"


Score = Callable[[list[int], int], np.ndarray]
"""(token ids, n) -> log probabilities [n, V] of what follows each of the last n."""


@cache
def goldens() -> dict[str, Any]:
    """What make_llama_goldens.py wrote."""
    return json.loads(gzip.decompress((HERE / "llama_goldens.json.gz").read_bytes()))


@dataclass(frozen=True)
class View:
    """One engine's opinion of given tokens: the log probability of each, its own first choice in its place, and (where
    the engine serves as judge) its best tokens with their log probabilities."""

    logprobs: np.ndarray
    choices: np.ndarray
    best: list[dict[int, float]] | None = None


@dataclass(frozen=True)
class Gap:
    """A token at which an engine chose otherwise than a judge, and by how much the judge preferred its own choice:
    natural log, infinite if the engine's choice is not among the judge's best."""

    prompt: str
    position: int
    gap: float


def llama_views(*, flash: bool = False) -> list[View]:
    """llama.cpp's view of its own continuations; `flash`: with flash attention, which it did not use to make them."""
    if flash:
        return [View(np.array(p["flash_logprobs"]), np.array(p["flash_choice"])) for p in goldens()["prompts"]]
    views = []
    for prompt in goldens()["prompts"]:
        pairs = zip(prompt["top_ids"], prompt["top_logprobs"], strict=True)
        best = [dict(zip(ids, values, strict=True)) for ids, values in pairs]
        first = np.array([values[0] for values in prompt["top_logprobs"]])
        views.append(View(first, np.array(prompt["tokens"]), best))
    return views


def our_views(llm: LLM) -> list[View]:
    """Ours, from one pass over each prompt with its continuation (prompt log probabilities)."""
    texts = [prompt["prompt_tokens"] + prompt["tokens"] for prompt in goldens()["prompts"]]
    results = llm.generate(texts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    views = []
    for prompt, result in zip(goldens()["prompts"], results, strict=True):
        entries = result.prompt_logprobs[-len(prompt["tokens"]) :]
        views.append(View(np.array([e.logprob for e in entries]), np.array([e.top[0][0] for e in entries])))
    return views


def our_continuations(llm: LLM) -> list[tuple[int, ...]]:
    """Greedy, all prompts at once, as long as llama.cpp's."""
    prompts = goldens()["prompts"]
    wanted = [SamplingParams(max_tokens=len(p["tokens"]), temperature=0.0, ignore_eos=True) for p in prompts]
    return [result.token_ids for result in llm.generate([p["prompt_tokens"] for p in prompts], wanted)]


def transformers_views(score: Score) -> list[View]:
    """transformers' view of the same tokens."""
    views = []
    for prompt in goldens()["prompts"]:
        tokens = prompt["tokens"]
        logprobs = score(prompt["prompt_tokens"] + tokens[:-1], len(tokens))
        top = np.argpartition(-logprobs, 5, axis=1)[:, :5]
        best = [{int(t): float(row[t]) for t in ids} for row, ids in zip(logprobs, top, strict=True)]
        views.append(View(logprobs[np.arange(len(tokens)), tokens], logprobs.argmax(axis=1), best))
    return views


def errors(views: list[View], reference: list[View]) -> np.ndarray:
    """|difference| of the log probability of every continuation token."""
    return np.concatenate([np.abs(a.logprobs - b.logprobs) for a, b in zip(views, reference, strict=True)])


def disagreements(views: list[View], judges: list[View]) -> list[Gap]:
    """Every token at which the first choices differ."""
    found = []
    for prompt, view, judge in zip(goldens()["prompts"], views, judges, strict=True):
        assert judge.best is not None, "this engine's alternatives are not known"
        for at in np.flatnonzero(view.choices != judge.choices).tolist():
            best = judge.best[at]
            gap = best[int(judge.choices[at])] - best.get(int(view.choices[at]), -np.inf)
            found.append(Gap(prompt["name"], at, gap))
    return found


def num_equal_continuations(views: list[View]) -> int:
    """Prompts whose greedy continuation is llama.cpp's to the last token."""
    own = llama_views()
    return sum(bool((a.choices == b.choices).all()) for a, b in zip(views, own, strict=True))


# ---- passages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    """windows: token ids, each window on its own. `golden`: llama.cpp's entry."""

    name: str
    windows: list[list[int]]
    golden: dict[str, Any]


def passages(llm: LLM) -> list[Passage]:
    """Those whose text is here. Fails if our tokenizer reads the text differently from llama.cpp's."""
    found = []
    for golden in goldens()["passages"]:
        path = HERE / "passage.txt" if golden["name"] == "passage" else DATA / golden["name"]
        if not path.exists():
            continue
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()[:65536]
        size = golden["window"]
        ids = llm.encode(text, add_special=False)[: size * golden["num_windows"]]
        digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        assert digest == golden["tokens_sha256"], f"{golden['name']} is tokenised differently from llama.cpp"
        found.append(Passage(golden["name"], [ids[i : i + size] for i in range(0, len(ids), size)], golden))
    return found


def our_window_logprobs(llm: LLM, passage: Passage) -> list[np.ndarray]:
    """Log probability of every token of each window but its first."""
    results = llm.generate(passage.windows, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    return [np.array([entry.logprob for entry in result.prompt_logprobs]) for result in results]


def perplexity(windows: list[np.ndarray]) -> float:
    """Over the second half of each window, so that every scored token has at least 255 others before it."""
    return float(np.exp(-np.concatenate([window[len(window) // 2 :] for window in windows]).mean()))


def transformers_window_logprobs(score: Score, passage: Passage) -> list[np.ndarray]:
    """The same from transformers."""
    scored = []
    for window in passage.windows:
        logprobs = score(window[:-1], len(window) - 1)
        scored.append(logprobs[np.arange(len(window) - 1), window[1:]])
    return scored


# ---- transformers ----------------------------------------------------------------------------------------------------


def transformers_model(path: Path) -> Any:
    """transformers' Llama at float32 with the GGUF's weights, dequantised."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)  # several threads spin for each other, which on a busy machine is slower than one
    checkpoint = open_checkpoint(path)
    config = config_from_checkpoint(checkpoint)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.width,
                intermediate_size=config.ffn_width,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.norm_eps,
                max_position_embeddings=config.max_context,
                tie_word_embeddings=config.tied_embeddings,
                rope_parameters={"rope_type": "default", "rope_theta": config.layers[0].rope.base},
            )
        )
    weights = {}
    for name, tensor in checkpoint.tensors.items():
        values = dequantise(tensor.kind, tensor.data, int(np.prod(tensor.shape))).reshape(tensor.shape)
        weights[transformers_name(name)] = torch.from_numpy(unpermute(name, values, config))
    checkpoint.close()
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not missing, f"the checkpoint did not fill {missing}"
    return model.eval()


def build_transformers(path: Path) -> Score:
    import torch

    model = transformers_model(path)

    def score(tokens: list[int], num_last: int) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), logits_to_keep=num_last).logits[0]
            return logits.double().log_softmax(dim=1).numpy()

    return score


def transformers_name(name: str) -> str:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{parts[part]}.weight"


def unpermute(name: str, values: np.ndarray, config: ModelConfig) -> np.ndarray:
    """GGUF orders q and k rows of a head for RoPE pairs (2i, 2i + 1); transformers pairs (i, i + C/2)."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return values
    heads = values.reshape(-1, config.head_dim // 2, 2, values.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(values.shape))
