"""Joins neighbours of a recorded list, where the joined kernel gives the same bits and saves a trip through memory.

    rms_norm, layer_norm, gelu -> quantise  the same, writing codes
    paged_attention -> quantise             attention that writes codes
    rope, write_kv                          rope that also stores K and V
    latent_kv, write_latent                 the same of latents
    linear -> add                           linear that starts from a residual
    linear(gate, up) -> silu_mul or gelu_mul -> quantise   one pass per group of 32 outputs; on tiles, whose inputs
                                           have no scales of groups, without the quantise
    norm_heads, rope, linear                write over their input, or the residual, whose last readers they are; dense
                                           linears on tiles only

Only values with a single reader are joined away.
"""

from __future__ import annotations

import dataclasses

from ..api import GROUP
from .operation import WIDE, Operation, Value


def fuse(operations: list[Operation], output: Value) -> list[Operation]:
    """The same program in fewer operations; `output` stays a value of it."""
    operations = _quantise_at_source(operations, output)
    operations = _store_while_rotating(operations)
    operations = _join_gated(operations, output)
    operations = _join_residual(operations, output)
    return _write_over(operations, output)


def readers(operations: list[Operation]) -> dict[Value, list[Operation]]:
    found: dict[Value, list[Operation]] = {}
    for operation in operations:
        for value in operation.inputs:
            if value is not None:
                found.setdefault(value, []).append(operation)
    return found


def _only_reader(found: dict[Value, list[Operation]], value: Value | None, output: Value) -> Operation | None:
    if value is None or value is output or len(found.get(value, ())) != 1:
        return None
    return found[value][0]


def _quantise_at_source(operations: list[Operation], output: Value) -> list[Operation]:
    found = readers(operations)
    replaced: dict[Operation, Operation | None] = {}
    for operation in operations:
        if operation.kind in ("attention", "latent_attention"):
            assert operation.heads is not None
            if operation.heads.head_dim % GROUP:
                continue
        elif operation.kind not in ("rms_norm", "layer_norm", "activate"):
            continue
        reader = _only_reader(found, operation.out, output)
        if reader is not None and reader.kind == "quantise" and reader.out is not None:
            if operation.heads is not None and reader.out.form == WIDE:
                continue
            replaced[operation] = dataclasses.replace(operation, out=reader.out)
            replaced[reader] = None
    return _replace(operations, replaced)


def _store_while_rotating(operations: list[Operation]) -> list[Operation]:
    """Stores move up to the rotation, so nothing in between may touch KV."""
    replaced: dict[Operation, Operation | None] = {}
    rotation: Operation | None = None
    for operation in operations:
        if operation.kind in ("rope", "latent_kv"):
            rotation = operation
        elif (
            operation.kind in ("write_kv", "write_latent")
            and rotation is not None
            and operation.inputs[0] is rotation.out
        ):
            replaced[rotation] = dataclasses.replace(rotation, kv=operation.kv, layer=operation.layer)
            replaced[operation] = None
            rotation = None
        elif operation.kv is not None:
            rotation = None
    return _replace(operations, replaced)


def _join_gated(operations: list[Operation], output: Value) -> list[Operation]:
    found = readers(operations)
    replaced: dict[Operation, Operation | None] = {}
    for operation in operations:
        weight = operation.weight
        if operation.kind != "linear" or weight is None or weight.struct.num_parts != 1:
            continue
        if weight.dense and not weight.on_tiles:
            continue
        product = _only_reader(found, operation.out, output)
        if product is None or product.kind != "gated" or product.width % GROUP:
            continue
        joined = dataclasses.replace(
            operation, kind="linear_gated", out=product.out, width=product.width, activation=product.activation
        )
        if weight.on_tiles:
            replaced[operation], replaced[product] = None, joined
            continue
        quantise = _only_reader(found, product.out, output)
        if quantise is None or quantise.kind != "quantise" or quantise.out is None or quantise.out.form == WIDE:
            continue
        replaced[operation] = replaced[product] = None
        replaced[quantise] = dataclasses.replace(joined, out=quantise.out)
    return _replace(operations, replaced)


def _join_residual(operations: list[Operation], output: Value) -> list[Operation]:
    found = readers(operations)
    replaced: dict[Operation, Operation | None] = {}
    for operation in operations:
        if operation.kind != "linear":
            continue
        total = _only_reader(found, operation.out, output)
        if total is None or total.kind != "add" or total in replaced:
            continue
        left, right, _ = total.inputs
        if left is right:
            continue
        residual = right if left is operation.out else left
        replaced[operation] = None
        dense, codes, _ = operation.inputs
        replaced[total] = dataclasses.replace(operation, inputs=(dense, codes, residual), out=total.out)
    return _replace(operations, replaced)


def _write_over(operations: list[Operation], output: Value) -> list[Operation]:
    """What is written then lies in the nearer caches already."""
    found = readers(operations)
    renamed: dict[Value, Value] = {}
    kept = []
    for operation in operations:
        given, made = _written_over(operation), operation.out
        first, second, third = (None if v is None else renamed.get(v, v) for v in operation.inputs)
        out = None if made is None else renamed.get(made, made)
        operation, before = dataclasses.replace(operation, inputs=(first, second, third), out=out), operation
        if given is not None and made is not None and found[given][-1] is before:
            is_inside = given.array is None and given is not output and made is not output
            if is_inside and (given.rows, given.width, given.form) == (made.rows, made.width, made.form):
                renamed[made] = renamed.get(given, given)
                operation = dataclasses.replace(operation, out=renamed[made])
        kept.append(operation)
    return kept


def _written_over(operation: Operation) -> Value | None:
    """The input each value of which is read only where the output's is written. Dense kernels, but for those of tiles,
    let sums wait in the output, which then must not be the residual."""
    first, _, third = operation.inputs
    if operation.kind in ("norm_heads", "rope", "latent_kv"):
        return first
    weight = operation.weight
    if operation.kind != "linear" or weight is None or (weight.dense and not weight.on_tiles):
        return None
    return third if third is not first else None


def _replace(operations: list[Operation], replaced: dict[Operation, Operation | None]) -> list[Operation]:
    kept = (replaced.get(operation, operation) for operation in operations)
    return [operation for operation in kept if operation is not None]
