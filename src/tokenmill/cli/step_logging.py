"""`--step-log FILE`: wires an engine's step log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..core.block import KVGroupSpec
from ..core.step_records import LogFacts
from ..node.machine import read_machine
from ..node.pools import longest

if TYPE_CHECKING:
    from ..engine.recorders import Watcher
    from ..node.load import Engine


@contextmanager
def step_logging(path: str, engine: Engine, model: str, beside: Watcher | None) -> Iterator[Watcher | None]:
    """What hears of an engine's steps: its step log in the file at `path`, and `beside`; "": `beside` alone."""
    from ..engine.recorders import StepLog
    from ..net.mapped_files import step_file

    if not path:
        yield beside
        return
    with step_file(path, _facts(engine, model)) as writer:
        yield beside if writer is None else StepLog(writer, beside)


def num_blocks_of(groups: Sequence[KVGroupSpec]) -> int:
    """Of the pool that says how many tokens there is KV for: those of windows hold the last tokens alone."""
    most = max(group.num_blocks for group in groups)
    return longest(groups, block_size=1, max_context=most)  # in blocks, not tokens


def _facts(engine: Engine, model: str) -> LogFacts:
    config = engine.config
    return LogFacts(
        model=model,
        numerics_id=config.numerics_id,
        processor=read_machine().cpu_model,
        isa=engine.kernels.partition(", threads")[0],
        threads=engine.settings.threads,
        block_size=config.block_size,
        num_blocks=num_blocks_of(config.groups),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chosen_experts=config.chosen_experts,
        cores=read_machine().num_cpus,
    )
