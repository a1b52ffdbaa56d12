"""KV that outlives its worker: a later one with the same weights takes it and gives the same tokens, whatever became of
the files meanwhile."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tiny import VOCAB_SIZE, tiny_checkpoint
from tokenmill.core.block import KVGroupSpec, full_groups, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import StoreOpened
from tokenmill.core.events import Drain, Output, StepOutputs, Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.build import build_engine, local_link
from tokenmill.kv.connector.worker import transfers
from tokenmill.kv.transfer.disk.folder import SharedFolder
from tokenmill.models import loader as registry
from tokenmill.net.system import MonotonicClock
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import build_worker
from tokenmill.worker.spec import WorkerSpec

SIZE = 8
PROMPTS = [tuple(random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)) for seed, length in ((1, 90), (2, 61))]
FULL = full_groups(40)
WINDOWS = (window_group(40, 9), FULL[0], window_group(40, 21))
BACKENDS = [
    pytest.param(ReferenceOps, id="numpy"),
    pytest.param(NativeOps, id="native", marks=pytest.mark.skipif(available() is not None, reason="no kernels")),
]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with windows of two sizes, copied a few blocks at a time."""
    read = registry.config_from_checkpoint

    def read_with_windows(checkpoint):
        config = read(checkpoint)
        windows = checkpoint.metadata["windows"]
        return replace(config, layers=tuple(replace(config.layers[0], window=window) for window in windows))

    monkeypatch.setattr(registry, "config_from_checkpoint", read_with_windows)
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    monkeypatch.setattr(transfers, "COPY_BYTES", 20_000)


def live(
    make_ops: type, folder: Path, groups: tuple[KVGroupSpec, ...] = WINDOWS, *, salt: str = "", seed: int = 0
) -> tuple[list[Output], SharedFolder]:
    """One life of an engine: all prompts are answered, then it is drained. The outputs that ended the requests, with
    all of their tokens, and the folder as the worker left it."""
    order = sorted(groups, key=lambda group: group.window)
    checkpoint = tiny_checkpoint(num_layers=len(groups), seed=seed)
    checkpoint.metadata["windows"] = tuple(group.window for group in groups)
    config = EngineConfig(tuple(order), 128, block_size=SIZE, max_num_seqs=4, max_num_batched_tokens=64)
    worker = build_worker(checkpoint, make_ops(), WorkerSpec(config, "f32", kv_save=str(folder)))
    assert worker.saved is not None
    config = worker.config

    async def run() -> list[Output]:
        engine_end, front_end = local_link()
        first = [StoreOpened(worker.saved.keys)]
        shell = build_engine(config, worker.executor, engine_end, MonotonicClock(), first=first)
        engine = asyncio.create_task(shell.run())
        sampling = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
        requests = [Request(str(i), prompt, sampling, 12, i, cache_salt=salt) for i, prompt in enumerate(PROMPTS)]
        await front_end.send(Submit(tuple(requests)))
        tokens: dict[str, tuple[int, ...]] = {str(i): () for i in range(len(PROMPTS))}
        ended: dict[str, Output] = {}
        while len(ended) < len(requests):
            message = await front_end.receive()
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                tokens[output.request_id] += output.tokens
                if output.finish_reason is not None:
                    assert not output.error
                    ended[output.request_id] = output._replace(tokens=tokens[output.request_id])
        await front_end.send(Drain())
        await engine
        assert shell.core.stats().num_held_blocks == 0
        return [ended[name] for name in sorted(ended)]

    try:
        return asyncio.run(run()), worker.saved
    finally:
        worker.executor.close()


def tokens_of(outputs: list[Output]) -> list[tuple[int, ...]]:
    return [output.tokens for output in outputs]


def cached(outputs: list[Output]) -> list[int]:
    return [output.num_cached for output in outputs]


@pytest.mark.parametrize("groups", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("make_ops", BACKENDS)
def test_a_restart_keeps_its_hits(make_ops: type, groups: tuple[KVGroupSpec, ...], tmp_path: Path) -> None:
    """Every full block of the prompts, in every group as far as it is seen; nothing is saved twice."""
    first, saved = live(make_ops, tmp_path, groups)
    assert cached(first) == [0, 0] and saved.num_saved > 0 and saved.num_read == 0
    second, again = live(make_ops, tmp_path, groups)
    assert tokens_of(second) == tokens_of(first)
    assert cached(second) == [(len(prompt) - 1) // SIZE * SIZE for prompt in PROMPTS]
    assert again.num_read > 0 and again.num_saved == 0


def test_other_salts_other_weights_and_other_groups_find_nothing(tmp_path: Path) -> None:
    """Keys hold the salt; files the weights' id, which says how layers are grouped."""
    plain, _ = live(ReferenceOps, tmp_path)
    salted, folder = live(ReferenceOps, tmp_path, salt="secret")
    assert cached(salted) == [0, 0] and folder.num_read == 0 and tokens_of(salted) == tokens_of(plain)
    _, other = live(ReferenceOps, tmp_path, FULL)
    assert other.num_read == 0 and other.num_saved > 0


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_change_no_token(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Bits flip, or the file ends early: what cannot be read as it was written is computed again, and then saved."""
    rng = random.Random(seed)
    first, _ = live(ReferenceOps, tmp_path)
    (path,) = tmp_path.glob("*.blocks")
    data = bytearray(path.read_bytes())
    if seed % 3 == 0:
        del data[rng.randrange(len(data)) :]
    else:
        for _ in range(40):
            data[rng.randrange(len(data) // 10 if seed % 3 == 1 else 0, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    second, _ = live(ReferenceOps, tmp_path)
    assert tokens_of(second) == tokens_of(first)
    assert "is not used: it" in caplog.text or "a file of it has a damaged block" in caplog.text
    third, _ = live(ReferenceOps, tmp_path)
    assert tokens_of(third) == tokens_of(first) and min(cached(third)) > 0


def test_a_file_that_goes_meanwhile_is_missed_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted after its index was read."""
    first, _ = live(ReferenceOps, tmp_path)
    opened = SharedFolder.open

    def open_and_delete(self: SharedFolder) -> None:
        opened(self)
        for path in tmp_path.glob("*.blocks"):
            path.unlink()

    monkeypatch.setattr(SharedFolder, "open", open_and_delete)
    second, _ = live(ReferenceOps, tmp_path)
    assert tokens_of(second) == tokens_of(first) and cached(second) == [0, 0]
