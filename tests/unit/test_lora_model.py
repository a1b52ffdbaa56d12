"""LoRA on a whole model: equal to weights with the adapter merged in; in a mixed batch, each as if it were alone."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import EMBED, merged, random_magnitudes, random_pairs, safetensors, write_adapter
from tiny import VOCAB_SIZE, tensor, tiny_checkpoint
from tokenmill.cli import main as cli
from tokenmill.core.block import full_groups
from tokenmill.core.effects import DropAdapter
from tokenmill.core.errors import BadCheckpoint, InvalidRequest
from tokenmill.core.events import LoadAdapter
from tokenmill.formats.adapter import open_adapter
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.loader import Model, load_model
from tokenmill.models.lora import Base, LoraLimits
from tokenmill.models.tensor_names import GLOBAL_NAMES, LAYER_NAMES
from tokenmill.ops.api import RawTensor, StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_weights import dequantise
from tokenmill.worker import build
from tokenmill.worker.adapters import Adapters
from workers import build_worker

LENGTH = 24
LIMITS = LoraLimits(max_loras=3, max_rank=8)
native = pytest.param(NativeOps, marks=pytest.mark.skipif(available() is not None, reason=str(available())))
TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, LENGTH).astype(np.int32)


class Running:
    """A model with adapters, and its logits for sequences that each have their own."""

    def __init__(
        self, ops: Any, checkpoint: Checkpoint, lora: LoraLimits | None = LIMITS, quantization: str | None = None
    ) -> None:
        self.ops = ops
        how: dict[str, Any] = {"max_model_len": 64, "block_size": 8, "kv_dtype": "f32", "quantization": quantization}
        self.model: Model = load_model(checkpoint, ops, lora=lora, **how)
        pool = ops.new_pool(self.model.kv_group, 16)
        self.pool = pool
        self.kv = pool.kv
        limits = StepLimits(4 * LENGTH, 4, 3, 4 * LENGTH)
        self.program = ops.compile(lambda recorder, batch: self.model.forward(recorder, self.kv, batch), limits)
        if lora is not None:
            base = Base(checkpoint, self.model.config, ops, quantization)
            self.adapters = Adapters(base, self.model.weights, lora)

    def load(self, folder: Path) -> int:
        return self.adapters.slot_of(self.adapters.install(self.adapters.prepare(str(folder), "")))

    def logits(self, slots: list[int]) -> np.ndarray:
        """[sequences, positions, V]: the same text in every sequence, each by the adapter in its slot."""
        count = len(slots)
        batch = StepBatch(
            tokens_T=np.tile(TOKENS, count),
            positions_T=np.tile(np.arange(LENGTH, dtype=np.int32), count),
            row_starts_S1=np.arange(0, count * LENGTH + 1, LENGTH, dtype=np.int32),
            context_lens_S=np.full(count, LENGTH, np.int32),
            block_tables_SB=np.arange(3 * count, dtype=np.int32).reshape(count, 3),
            logit_rows_L=np.arange(count * LENGTH, dtype=np.int32),
            adapters_T=np.repeat(np.array(slots, np.int32), LENGTH),
        )
        return self.program(batch).copy().reshape(count, LENGTH, -1)


def close(got: np.ndarray, want: np.ndarray) -> None:
    """As near as float32 sums in another order are."""
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("make_ops", [ReferenceOps, native])
def test_logits_are_those_of_merged_weights(make_ops: Any, tmp_path: Path) -> None:
    """Two adapters and the base in one batch; the second changes few modules, with ranks and scales of their own."""
    base = tiny_checkpoint()
    first = write_adapter(tmp_path / "first", random_pairs(base, seed=1))
    few = dict(random_pairs(base, seed=2, rank=8, modules=("v_proj", "down_proj")))
    few |= random_pairs(base, seed=3, rank=3, modules=("up_proj",))
    second = write_adapter(
        tmp_path / "second",
        few,
        rank=8,
        use_rslora=True,
        rank_pattern={"up_proj": 3},
        alpha_pattern={"layers.1.mlp.down_proj": 3.5},
    )
    running = Running(make_ops(), base)
    one, two = running.load(first), running.load(second)
    got = running.logits([one, 0, two])
    for logits, checkpoint in zip(got, (merged(base, first), base, merged(base, second)), strict=True):
        close(logits, Running(make_ops(), checkpoint, lora=None).logits([0])[0])
    assert np.abs(got[0] - got[1]).max() > 0.1 < np.abs(got[2] - got[1]).max(), "adapters must say something"


@pytest.mark.parametrize("make_ops", [ReferenceOps, native])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_embeddings_and_dora(tied: bool, make_ops: Any, tmp_path: Path) -> None:
    """Each by itself and all together, beside rows of the base model; a tied head does not follow the embedding, as
    PEFT has it. PEFT saves the matrices of adapted heads and embeddings too."""
    base = tiny_checkpoint(tied=tied)
    running = Running(make_ops(), base, LoraLimits(4, 8))
    folders = []
    all_linears = dict(random_pairs(base, seed=1))
    embed = dict(random_pairs(base, seed=2, modules=(EMBED,)))
    head = {"lm_head": (all_linears.get("lm_head") or random_pairs(tiny_checkpoint(), modules=("lm_head",))["lm_head"])}
    weight = np.zeros((VOCAB_SIZE, 64), np.float32)
    for number, (pairs, dora) in enumerate(
        ((embed, False), (head, True), (all_linears, True), (all_linears | embed | head, True))
    ):
        folder = tmp_path / str(number)
        copied = {module: weight for module in pairs if module.endswith((EMBED, "lm_head"))}
        magnitudes = random_magnitudes(pairs, seed=number) if dora else None
        folders.append(write_adapter(folder, pairs, magnitudes=magnitudes, copied=copied))
    slots = [running.load(folder) for folder in folders]
    plain = running.logits([0])[0]
    for mix in ([*slots[:2], 0, slots[2]], [slots[3], 0]):
        for logits, slot in zip(running.logits(mix), mix, strict=True):
            changed = base if slot == 0 else merged(base, folders[slots.index(slot)])
            close(logits, Running(make_ops(), changed, lora=None).logits([0])[0])
            assert slot == 0 or np.abs(logits - plain).max() > 0.1, "adapters must say something"


@pytest.mark.parametrize("quantization", [None, "q8_0", "q4_0"])
def test_doras_lengths_are_of_the_weights_that_are_computed_with(quantization: str | None, tmp_path: Path) -> None:
    """Quantised ones too, and in GGUF, whose q and k are in another order."""
    base = tiny_checkpoint()
    pairs = random_pairs(base, seed=1)
    magnitudes = random_magnitudes(pairs)
    folder = write_adapter(tmp_path / "a", pairs, magnitudes=magnitudes)
    ops = ReferenceOps()
    changes = Running(ops, base, quantization=quantization).adapters.prepare(str(folder), "").changes
    other = Running(ops, as_gguf(base), quantization=quantization).adapters.prepare(str(folder), "").changes
    for (layer, linear, index), module in {
        (0, "qkv", 0): "model.layers.0.self_attn.q_proj",
        (1, "qkv", 1): "model.layers.1.self_attn.k_proj",
        (1, "gate_up", 1): "model.layers.1.mlp.up_proj",
        (0, "down", 0): "model.layers.0.mlp.down_proj",
        (-1, "head", 0): "lm_head",
    }.items():
        stored = base.tensors[f"{module}.weight"]
        raw = RawTensor("f32", *stored.shape, np.frombuffer(stored.data, np.uint8))
        if quantization is not None:
            raw = ops.quantise(raw, "q8_0" if linear == "head" else quantization)
        a, b = pairs[module]
        expected = magnitudes[module] / np.linalg.norm(dequantise(raw) + 2.0 * (b @ a), axis=1)
        for found in (changes, other):
            change = found[layer, linear][index]
            assert change is not None and change.factors is not None
            np.testing.assert_allclose(change.factors, expected, rtol=1e-5)


def as_gguf(checkpoint: Checkpoint) -> Checkpoint:
    """The same model as GGUF has it: other names, and q and k in the order of interleaved pairs."""
    config = tiny_checkpoint(kind="gguf")
    roles = {role: name for role, name in LAYER_NAMES["gguf"].items() if role in LAYER_NAMES["hf"]}
    tensors = {}
    for name, found in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        layer = module.split(".")[2] if ".layers." in module else ""
        ends = {hf: GLOBAL_NAMES["gguf"][role] for role, hf in GLOBAL_NAMES["hf"].items()}
        inside = {
            LAYER_NAMES["hf"][role].format(layer, e=""): (role, gguf.format(layer)) for role, gguf in roles.items()
        }
        role, new = inside.get(module, ("", ends.get(module, "")))
        values = np.frombuffer(found.data, np.float32).reshape(found.shape)
        if role in ("q", "k"):
            values = values.reshape(-1, 2, 8, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        tensors[f"{new}.weight"] = tensor(f"{new}.weight", values)
    return replace(config, tensors=tensors)


def test_an_adapter_of_a_model_that_sees(tmp_path: Path) -> None:
    """Modules of the language model under the names they have there; what reads images is left out."""
    base = tiny_checkpoint()
    pairs = random_pairs(base, seed=1, modules=("q_proj", "down_proj"))
    of_images = {"model.vision_model.encoder.layers.0.self_attn.q_proj": pairs["model.layers.0.self_attn.q_proj"]}
    plain = Running(ReferenceOps(), base)
    expected = plain.logits([plain.load(write_adapter(tmp_path / "plain", pairs))])
    for number, prefix in enumerate(("model.text_model.", "model.language_model.", "language_model.model.")):
        named = {prefix + module.removeprefix("model."): pair for module, pair in pairs.items()}
        running = Running(ReferenceOps(), base)
        got = running.logits([running.load(write_adapter(tmp_path / str(number), named | of_images))])
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(BadCheckpoint, match="only how images are read"):
        plain.load(write_adapter(tmp_path / "images", of_images))


def test_the_adapters_own_copy_of_a_matrix_is_of_this_models_shape(tmp_path: Path) -> None:
    base = tiny_checkpoint()
    pairs = random_pairs(base, modules=("lm_head",))
    resized = write_adapter(tmp_path / "a", pairs, copied={"lm_head": np.zeros((VOCAB_SIZE + 8, 64), np.float32)})
    with pytest.raises(BadCheckpoint, match=r"lm_head is of shape \(104, 64\)"):
        Running(ReferenceOps(), base).load(resized)


@pytest.mark.parametrize("make_ops", [ReferenceOps, native])
def test_rank_64(make_ops: Any, tmp_path: Path) -> None:
    base = tiny_checkpoint()
    folder = write_adapter(tmp_path / "a", random_pairs(base, rank=64), rank=64, alpha=16)
    running = Running(make_ops(), base, LoraLimits(1, 64))
    got = running.logits([running.load(folder), 0])[0]
    close(got, Running(make_ops(), merged(base, folder), lora=None).logits([0])[0])


def test_scales_are_those_that_peft_defines(tmp_path: Path) -> None:
    """alpha / r, alpha / sqrt(r) with rslora, and the patterns that name a module."""
    pairs = random_pairs(tiny_checkpoint(), modules=("q_proj", "k_proj"))
    pattern = {"layers.0.self_attn.q_proj": 2.0, "^model.layers.1.self_attn.q_proj": 16, "q_proj": 1.0}
    folder = write_adapter(tmp_path / "a", pairs, alpha_pattern=pattern)
    scales = {module.name: module.scale for module in open_adapter(folder).modules}
    assert [scales[f"model.layers.{n}.self_attn.{p}_proj"] for p in "qk" for n in (0, 1)] == [0.5, 4.0, 2.0, 2.0]
    pattern = {r"layers\.[1-9]\..*": 2.0, r"^model\.layers\.(0|7)\.self_attn\.(q|v)_proj$": 16}
    folder = write_adapter(tmp_path / "c", pairs, alpha_pattern=pattern)
    scales = {module.name: module.scale for module in open_adapter(folder).modules}
    assert [scales[f"model.layers.{n}.self_attn.{p}_proj"] for p in "qk" for n in (0, 1)] == [4.0, 0.5, 2.0, 0.5]
    rooted = write_adapter(tmp_path / "b", pairs, use_rslora=True)
    assert {module.scale for module in open_adapter(rooted).modules} == {4.0}


def test_an_adapter_fits_the_model_in_gguf(tmp_path: Path) -> None:
    """GGUF stores q and k of Llama for interleaved pairs; adapters are in the order that weights have once read."""
    base = tiny_checkpoint()
    folder = write_adapter(tmp_path / "a", random_pairs(base, seed=4))
    hf, gguf = Running(ReferenceOps(), base), Running(ReferenceOps(), tiny_checkpoint(kind="gguf"))
    one, other = (running.adapters.prepare(str(folder), "").changes for running in (hf, gguf))
    assert one.keys() == other.keys() and len(one) == 2 * 4 + 1
    for place, changes in one.items():
        for ours, theirs in zip(changes, other[place], strict=True):
            assert ours is not None and theirs is not None and ours.scale == theirs.scale
            assert (ours.a.data == theirs.a.data).all() and (ours.b.data == theirs.b.data).all()


def test_bf16_matrices_are_widened(tmp_path: Path) -> None:
    """A linear of bf16 weights rounds its inputs; an adapter's must not, whatever it is stored as."""
    base = tiny_checkpoint()
    pairs = {
        module: tuple((half.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for half in pair)
        for module, pair in random_pairs(base, seed=5).items()
    }
    wide = write_adapter(tmp_path / "wide", pairs)
    narrow = write_adapter(
        tmp_path / "narrow",
        {
            module: tuple((half.view(np.uint32) >> 16).astype(np.uint16) for half in pair)
            for module, pair in pairs.items()
        },
    )
    running = Running(ReferenceOps(), base)
    one, other = running.logits([running.load(wide), running.load(narrow)])
    close(one, other)
    assert open_adapter(narrow).modules[0].a.kind == "bf16"


@pytest.mark.exact
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_a_mixed_batch_is_bit_for_bit_each_alone(tmp_path: Path) -> None:
    base = tiny_checkpoint()
    running = Running(NativeOps(2), base)
    pairs = dict(random_pairs(base, seed=2)) | dict(random_pairs(base, seed=3, modules=(EMBED,)))
    slots = [
        running.load(write_adapter(tmp_path / "1", random_pairs(base, seed=1))),
        running.load(write_adapter(tmp_path / "2", pairs, magnitudes=random_magnitudes(pairs))),
    ]
    mix = [slots[1], 0, slots[0], slots[1]]
    together = running.logits(mix)
    for logits, slot in zip(together, mix, strict=True):
        np.testing.assert_array_equal(logits.view(np.uint32), running.logits([slot])[0].view(np.uint32))
    plain = Running(NativeOps(1), base, lora=None).logits([0])[0]
    np.testing.assert_array_equal(together[1].view(np.uint32), plain.view(np.uint32))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "has no magnitude, use_dora is True"),
        ({"use_new_kind": {"x": 1}}, "use_new_kind"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"r": 5}, "its rank is 5"),
        ({"r": 0}, "must be a number above 0"),
        ({"lora_alpha": None}, "must be a number above 0"),
        ({"alpha_pattern": {"(?=a)+$": 2}}, "(?=a)"),
        ({"alpha_pattern": [1]}, "must be an object"),
    ],
)
def test_what_is_not_plain_lora_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, random_pairs(tiny_checkpoint(), modules=("q_proj",)), **changes)
    with pytest.raises(BadCheckpoint, match=re.escape(said)):
        open_adapter(folder)


def test_files_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    pairs = dict(random_pairs(tiny_checkpoint(), modules=("q_proj",)))
    with pytest.raises(BadCheckpoint, match=r"no adapter_config\.json"):
        open_adapter(tmp_path)
    pickled = write_adapter(tmp_path / "pickled", pairs)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(BadCheckpoint, match="pickle, which is never read"):
        open_adapter(pickled)
    a, b = pairs["model.layers.0.self_attn.q_proj"]
    for tensors, said in (
        ({"x.lora_C.weight": a}, "not part of a plain LoRA adapter"),
        ({"lm_head.weight": a}, "resized or trained whole"),
        ({"x.lora_A.weight": a, "x.lora_B.weight": b, "x.lora_magnitude_vector": a[0]}, "has a magnitude"),
        ({"x.lora_A.weight": a}, "lora_A without its other half"),
        ({"x.lora_A.weight": a, "x.lora_B.weight": b[:, :2]}, "its rank is 4"),
        ({"x.lora_A.weight": a[0], "x.lora_B.weight": b}, "a matrix of f32, f16, bf16 was expected"),
        ({}, "holds no tensors"),
    ):
        odd = write_adapter(tmp_path / "odd", pairs)
        (odd / "adapter_model.safetensors").write_bytes(safetensors(tensors))
        with pytest.raises(BadCheckpoint, match=said):
            open_adapter(odd)
    cut = write_adapter(tmp_path / "cut", pairs)
    data = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(data[:-1])
    with pytest.raises(BadCheckpoint, match="cut short"):
        open_adapter(cut)


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint()
    running = Running(ReferenceOps(), base)
    small, wide = np.zeros((2, 64), np.float32), np.zeros((64, 2), np.float32)
    for module, pair, said in (
        ("model.layers.0.self_attn.q_proj", (small[:, :32], wide), "64 x 32, but this model's is 64 x 64"),
        ("model.layers.2.self_attn.q_proj", (small, wide), "beyond this model's 2 layers"),
        ("model.layers.0.self_attn.qkv_proj", (small, wide), "cannot be adapted in LlamaForCausalLM"),
        ("model.layers.0.mlp.router", (small, wide), "these can: self_attn.q_proj, .*, lm_head"),
        ("model.embed_tokens", (small, wide), "64 x 64, but this model's is 64 x 96"),
    ):
        with pytest.raises(BadCheckpoint, match=said):
            running.load(write_adapter(tmp_path / "a", {module: pair}, rank=2))
    high = write_adapter(tmp_path / "b", random_pairs(base, rank=9), rank=9)
    with pytest.raises(BadCheckpoint, match="start with a larger --max-lora-rank"):
        running.load(high)


def test_digests_name_content_and_nothing_else(tmp_path: Path) -> None:
    base = tiny_checkpoint()
    pairs = random_pairs(base, seed=1)
    digest = open_adapter(write_adapter(tmp_path / "a", pairs)).digest
    assert open_adapter(write_adapter(tmp_path / "b", pairs, base_model_name_or_path="elsewhere")).digest == digest
    assert open_adapter(write_adapter(tmp_path / "c", pairs, alpha=9)).digest != digest
    assert open_adapter(write_adapter(tmp_path / "d", random_pairs(base, seed=2))).digest != digest


def test_inspect_prints_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_adapter(tmp_path / "a", random_pairs(tiny_checkpoint(), modules=("q_proj", "o_proj")))
    assert cli.main(["inspect", str(folder)]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["digest"] == open_adapter(folder).digest
    assert (shown["modules"], shown["rank"], shown["scale"]) == ("4: o_proj, q_proj", "4", "2")


def test_nothing_outside_the_folder_is_opened(tmp_path: Path) -> None:
    """Not by a path, not by a link to a folder, not by a link to a file; a link that stays inside is fine."""
    pairs = random_pairs(tiny_checkpoint(), modules=("q_proj",))
    inside, secret = tmp_path / "loras", write_adapter(tmp_path / "secret", pairs)
    good = write_adapter(inside / "good", pairs)
    (inside / "same").symlink_to(good)
    (inside / "link").symlink_to(secret)
    mixed = write_adapter(inside / "mixed", pairs)
    (mixed / "adapter_model.safetensors").unlink()
    (mixed / "adapter_model.safetensors").symlink_to(secret / "adapter_model.safetensors")
    for name in ("good", "same"):
        open_adapter(inside / name, inside=inside)
    for name in ("link", "mixed", "../secret", "good/../../secret", str(secret)):
        with pytest.raises(BadCheckpoint, match="does not lie inside"):
            open_adapter(inside / name, inside=inside)


def test_slots_come_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More adapters than places are refused; loading one twice takes one place; unloading gives it back."""
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    base = tiny_checkpoint()
    folders = [write_adapter(tmp_path / str(n), random_pairs(base, seed=n)) for n in range(3)]
    worker = build_worker(base, ReferenceOps(), max_model_len=64, groups=full_groups(8), lora=LoraLimits(2, 8))

    async def scenario() -> None:
        executor = worker.executor
        first = await executor.run(LoadAdapter(0, str(folders[0])))
        assert await executor.run(LoadAdapter(0, str(folders[0]))) == first
        await executor.run(LoadAdapter(0, str(folders[1])))
        with pytest.raises(InvalidRequest, match="All 2 places"):
            await executor.run(LoadAdapter(0, str(folders[2])))
        await executor.run(DropAdapter(first))
        await executor.run(LoadAdapter(0, str(folders[2])))

    asyncio.run(scenario())
    worker.executor.close()
    without = build_worker(base, ReferenceOps(), max_model_len=64, groups=full_groups(8))
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        asyncio.run(without.executor.run(LoadAdapter(0, str(folders[0]))))
    without.executor.close()
