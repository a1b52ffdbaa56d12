"""Chooses the backend by name; 'auto' prefers the native kernels and says so once where they are missing."""

from __future__ import annotations

import logging
import os

from ..core.errors import ConfigError
from .api import Ops
from .native import NativeOps, available
from .native.library import ISAS, TILE_ISAS, available_isas
from .reference import ReferenceOps

BACKENDS = ("auto", "native", "numpy")
_log = logging.getLogger(__name__)


def select_ops(backend: str, num_threads: int | None = None, isa: str | None = None, *, lossless: bool = False) -> Ops:
    """The backend called `backend`. lossless: see NativeOps; numpy keeps bf16 as it is. Raises ConfigError for an
    unknown name, for 'native' where its library cannot be used, and for an instruction set that cannot run here."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.", param="backend")
    if num_threads is not None and not 1 <= num_threads <= 1024:
        raise ConfigError(f"num_threads must be between 1 and 1024, got {num_threads}.", param="num_threads")
    missing = None if backend == "numpy" else available()
    if backend == "native" and missing is not None:
        raise ConfigError(f"The native backend cannot be used: {missing}.", param="backend")
    if backend == "numpy" or missing is not None:
        if missing is not None:
            _log.warning("Running on the slow numpy backend: %s.", missing)
        return ReferenceOps()
    isa = isa or os.environ.get("TOKENMILL_ISA")
    variants = available_isas(TILE_ISAS + ISAS)
    if isa is not None and isa not in variants:
        known = ", ".join(variants)
        raise ConfigError(f"isa {isa!r} cannot run on this machine; it has {known}.", param="isa")
    return NativeOps(num_threads, isa, lossless=lossless)
