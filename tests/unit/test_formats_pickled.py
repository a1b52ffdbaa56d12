"""pytorch_model.bin: read as torch wrote it, by torch's reader of weights alone, or not at all."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.digest import weight_files
from tokenmill.formats.safetensors import open_safetensors

torch = pytest.importorskip("torch", reason="what is read is a format of torch's")

NAME, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
KINDS = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8_e4m3": "float8_e4m3fn",
         "f8_e5m2": "float8_e5m2", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8",
         "bool": "bool"}  # fmt: skip


def read(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (t.kind, t.shape, bytes(t.data)) for name, t in open_safetensors(folder).items()}


@pytest.mark.parametrize("is_zip", [True, False])
def test_every_kind(tmp_path: Path, is_zip: bool) -> None:
    """In files of today and in those of before 1.6, when there were no 8-bit floats."""
    values = 3 * torch.randn(4, 6)
    kinds = {kind: dtype for kind, dtype in KINDS.items() if is_zip or not kind.startswith("f8")}
    stored = {kind: values.to(getattr(torch, dtype)) for kind, dtype in kinds.items()}
    torch.save(stored, tmp_path / NAME, _use_new_zipfile_serialization=is_zip)
    wanted = {kind: (kind, (4, 6), each.view(torch.uint8).numpy().tobytes()) for kind, each in stored.items()}
    assert read(tmp_path) == wanted


def test_views_of_a_storage(tmp_path: Path) -> None:
    """Rows of a larger tensor, a transposed one, a parameter, a scalar and an empty one are what they look like."""
    whole = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    stored = {"rows": whole[1:], "turned": whole.T, "parameter": torch.nn.Parameter(torch.ones(2))}
    torch.save({**stored, "scalar": torch.tensor(7), "empty": torch.empty(0, 3)}, tmp_path / NAME)
    turned = np.arange(12, dtype="<i4").reshape(3, 4).T.tobytes()
    assert read(tmp_path) == {
        "rows": ("i32", (2, 4), np.arange(4, 12, dtype="<i4").tobytes()),
        "turned": ("i32", (4, 3), turned),
        "parameter": ("f32", (2,), np.ones(2, "<f4").tobytes()),
        "scalar": ("i64", (), np.int64(7).tobytes()),
        "empty": ("f32", (0, 3), b""),
    }


def test_views_that_would_have_to_be_copied_take_no_more_than_their_file(tmp_path: Path) -> None:
    """Each is as large as the storage that all of them share."""
    whole = torch.zeros(256, 300)
    torch.save({f"turned{i}": whole.T for i in range(9)}, tmp_path / NAME)
    with pytest.raises(BadCheckpoint, match="not stored row by row would take 2764800 bytes"):
        open_safetensors(tmp_path)
    torch.save({f"rows{i}": whole for i in range(9)}, tmp_path / NAME)
    assert len(open_safetensors(tmp_path)) == 9


def test_what_an_index_lists(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "unlisted": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(1)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    torch.save({"optimizer": torch.ones(1)}, tmp_path / "training_args.bin")
    shards = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}))
    assert sorted(open_safetensors(tmp_path)) == ["a", "b"]
    assert [file.name for file in weight_files(tmp_path)] == ["config.json", *shards.values()]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(BadCheckpoint, match="not a shard of the same folder"):
        open_safetensors(tmp_path)


def test_safetensors_beside_it_are_what_counts(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / NAME).write_bytes(b"not looked at")
    assert list(open_safetensors(tmp_path)) == ["a"]
    assert [file.name for file in weight_files(tmp_path)] == ["config.json", "model.safetensors"]


class Runs:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_nothing_in_it_is_run(tmp_path: Path, is_zip: bool) -> None:
    made = tmp_path / "made"
    torch.save({"a": torch.ones(1), "b": Runs(made)}, tmp_path / NAME, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(BadCheckpoint, match="cannot be read as weights alone"):
        open_safetensors(tmp_path)
    assert not made.exists()


DAMAGE = {
    "a list": ([torch.ones(1)], "does not hold tensors by name"),
    "a number": ({"a": 3}, "'a' is int and no tensor"),
    "one value for a million": ({"a": torch.ones(1).expand(1000, 1000)}, "'a' of torch.float32 on cpu is not stored"),
    "complex numbers": ({"a": torch.ones(1, dtype=torch.complex64)}, "'a' of torch.complex64"),
    "no values": ({"a": torch.ones(1, device="meta")}, "'a' of torch.float32 on meta"),
    "sparse values": ({"a": torch.eye(2).to_sparse()}, "'a' of torch.float32 on cpu"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_no_plain_tensor_is_named(tmp_path: Path, name: str) -> None:
    stored, named = DAMAGE[name]
    torch.save(stored, tmp_path / NAME)
    with pytest.raises(BadCheckpoint, match=named):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_file_that_is_cut_short(tmp_path: Path, share: float) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / NAME)
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(BadCheckpoint, match=r"cannot be read as weights alone|is empty"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (None, "torch is not installed"),
        (types.SimpleNamespace(__version__="2.9.1"), r"torch is 2\.9\.1"),
        (types.SimpleNamespace(__version__="2.5.1+cpu"), r"torch is 2\.5\.1\+cpu"),
        (types.SimpleNamespace(__version__="1.13.0"), r"torch is 1\.13\.0"),
    ],
)
def test_without_a_safe_torch_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, found: str
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / NAME)
    monkeypatch.setitem(sys.modules, "torch", module)
    with pytest.raises(BadCheckpoint, match=rf"torch 2\.10 or later .*{found}: install tokenmill\[torch\]"):
        open_safetensors(tmp_path)
