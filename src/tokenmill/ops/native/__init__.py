"""The CPU backend: hand-written kernels in one shared library, driven a whole step at a time.

    library   finds and binds the C interface
    memory    aligned arrays, and which values of a program may share bytes
    pack      weights and adapters in the form that kernels read
    record    runs a forward pass, or one function of it, once and keeps what it asked for
    offload   weights on disk, of which a bounded part is in memory
    fuse      joins neighbours of the recorded list
    program   a recorded list as one callable
    queue     one call after another, beside the event loop
    backend   NativeOps: all of it as one backend

`available()` says whether it can be used here, and if not, why.
"""

from __future__ import annotations

from .backend import NativeOps
from .library import available

__all__ = ["NativeOps", "available"]
