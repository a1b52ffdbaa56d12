"""Files of an adapter over the link, for a worker that has none of the front end's disks: it asks for one part after
the other, so neither end holds more than a part, and messages of steps pass in between.

    front end                            worker
    LoadAdapter(number, ...)        ->
                                    <-   WantPart(number, name, offset)
    FilePart(number, ...)           ->   ... until it has all files; then its engine loads them
                                    <-   AdapterLoaded(number, ...)

A worker that has an adapter of that digest asks for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PART_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class WantPart:
    """Of the adapter whose LoadAdapter has this number: file `name`, from byte `offset` on."""

    number: int
    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """Up to PART_BYTES of a file of `size` bytes; or why there is none, for whoever asked for the adapter."""

    number: int
    size: int = 0
    data: bytes = b""
    error: str = ""
