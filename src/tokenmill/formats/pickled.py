"""Weights that torch pickled (pytorch_model.bin), read by torch itself and by nothing else.

Unpickling runs what a file says. torch.load with `weights_only` makes tensors and nothing else of it, and does so
safely since 2.10 (CVE-2025-32434, CVE-2026-24747); without such a torch these files are refused. Nothing else here
needs torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint
from .mapping import map_file
from .tensor import Tensor

_OLDEST = (2, 10)
_ZIP = b"PK\x03\x04"
"""What files begin with whose bytes torch can map; older ones are read whole."""
_KINDS = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2", "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8",
    "bool": "bool",
}  # fmt: skip


def open_pickled(path: Path) -> dict[str, Tensor]:
    """Raises BadCheckpoint for a file that holds anything but tensors by name, and where torch is not there or old."""
    view = map_file(path)
    is_zip = bytes(view[: len(_ZIP)]) == _ZIP
    torch = require_torch(path)
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # whatever the file made of torch's reader
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadCheckpoint(f"{path} cannot be read as weights alone: {reason[:200]}") from error
    if not isinstance(stored, dict):
        raise BadCheckpoint(f"{path} does not hold tensors by name.")
    kinds = {str(name): _kind(path, str(name), value, torch) for name, value in stored.items()}
    num_copied = sum(value.nbytes for value in stored.values() if not value.is_contiguous())
    if num_copied > len(view):  # any number of them may be views of the same values
        raise BadCheckpoint(f"{path}: tensors that are not stored row by row would take {num_copied} bytes.")
    return {str(name): _tensor(str(name), kinds[str(name)], value, torch) for name, value in stored.items()}


def require_torch(path: Path | str) -> Any:
    """The module that reads the file. Raises BadCheckpoint where it is not there or old."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        found = "torch is not installed"
    else:
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= _OLDEST:
            return torch
        found = f"torch is {torch.__version__}"
    oldest = ".".join(map(str, _OLDEST))
    raise BadCheckpoint(
        f"{path} is a pickle, which only torch {oldest} or later reads safely, and {found}: install tokenmill[torch],"
        " or save the model as safetensors."
    )


def _kind(path: Path, name: str, value: Any, torch: Any) -> str:
    """Raises BadCheckpoint for what is no plain tensor."""
    if not isinstance(value, torch.Tensor):
        raise BadCheckpoint(f"{path}: {name!r} is {type(value).__name__} and no tensor.")
    kind = _KINDS.get(str(value.dtype).removeprefix("torch."))
    is_plain = value.layout == torch.strided and value.device.type == "cpu" and kind is not None
    if not is_plain or value.nbytes > value.untyped_storage().nbytes():
        raise BadCheckpoint(f"{path}: tensor {name!r} of {value.dtype} on {value.device} is not stored plainly.")
    return str(kind)


def _tensor(name: str, kind: str, value: Any, torch: Any) -> Tensor:
    """Maps the values where they lie row by row, and copies them where not."""
    values = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return Tensor(name, kind, tuple(value.shape), memoryview(values).toreadonly())
