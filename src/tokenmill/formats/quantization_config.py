"""The tensors of a folder by its `quantization_config`: those that make up one quantised matrix are joined into one
that reads like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..core.errors import BadCheckpoint
from . import compressed_tensors as compressed
from .compressed_tensors import read_form, read_modelopt, refuse_unknown, refuse_unknown_algorithm
from .config_keys import model_type_of
from .experts import MODEL_TYPE, split_experts
from .quantised import (
    BITSANDBYTES,
    QuantisedTensor,
    read_auto_round,
    read_awq,
    read_bitsandbytes,
    read_fp8,
    read_gptq,
    refuse_unknown_packing,
)
from .tensor import Tensor

_SUFFIXES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "auto-round": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": compressed.SUFFIXES,
    "fp8": ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
    "bitsandbytes": BITSANDBYTES,
    "modelopt": compressed.MODELOPT,
}
_READERS = {
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "compressed-tensors": read_form,
    "fp8": read_fp8,
    "bitsandbytes": read_bitsandbytes,
    "modelopt": read_modelopt,
}
_REFUSE = {
    "compressed-tensors": refuse_unknown,
    "modelopt": refuse_unknown_algorithm,
    "auto-round": refuse_unknown_packing,
}
"""What raises BadCheckpoint for settings of a method that are not read."""
_CODES = ("qweight", "weight_packed", "weight", "compressed")
"""Of which a matrix has one."""


def join_quantised(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor | QuantisedTensor]:
    """`tensors` of a folder with the parts of each quantised matrix replaced by one `<module>.weight`. Raises
    BadCheckpoint for a method that is not known, and for parts that do not fit each other."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings and not isinstance(settings, Mapping):
        raise BadCheckpoint("quantization_config is not an object.")
    method = _method(settings) if settings else ""
    if model_type_of(config) == MODEL_TYPE and method in ("", "mxfp4"):
        return split_experts(tensors)
    if not settings:
        return dict(tensors)
    if method not in _SUFFIXES:
        raise BadCheckpoint(f"quantisation method {method!r} is not supported (supported: {', '.join(_SUFFIXES)}).")
    _REFUSE.get(method, lambda settings: None)(settings)
    suffixes = _SUFFIXES[method]
    split = re.compile(rf"(.+)\.({'|'.join(map(re.escape, ('weight', *suffixes)))})")
    found = {name: match.groups() for name in tensors if (match := split.fullmatch(name))}
    modules: dict[str, dict[str, Tensor]] = {}
    for name, (module, suffix) in found.items():
        if suffix in suffixes:
            modules.setdefault(module, {})[suffix] = tensors[name]
    joined: dict[str, Tensor | QuantisedTensor] = {}
    for name, tensor in tensors.items():
        module, suffix = found.get(name, ("", ""))
        if module not in modules:
            joined[name] = tensor
        elif suffix in _CODES:
            parts = modules[module] | {suffix: tensor}
            joined[f"{module}.weight"] = _join(f"{module}.weight", method, parts, settings)
    return joined


def _method(settings: Mapping[str, Any]) -> str:
    """As `quant_method` says; older files of bitsandbytes say only how they are to be loaded, older ones of AutoRound
    name its maker too."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return str(settings.get("quant_method", "compressed-tensors")).lower().removeprefix("intel/")


def _join(name: str, method: str, parts: dict[str, Tensor], settings: Mapping[str, Any]) -> QuantisedTensor:
    try:
        return _READERS[method](name, parts, settings)
    except KeyError as error:
        raise BadCheckpoint(f"{name}: tensor {error} of its {method} form is missing.") from None
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:  # settings are of any kind
        raise BadCheckpoint(f"{name}: {error}") from None
