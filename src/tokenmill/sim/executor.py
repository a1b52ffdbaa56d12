"""A checkable toy model behind the Executor port: wrong bookkeeping in the engine fails loudly and fast.

A KV slot stores (position, token), once in each KV group; the token is marked with its sequence's adapter. A row writes
its tokens into the slots that its own block tables name; when it draws, all that it sees is read back through those
tables, and the next token is a hash of the prefix. So a wrong slot, an early free, a bad publication or a lost table
entry changes the answer or trips a check:

    * every slot read must hold the position it stands for, the worker's own record of the token and the adapter's mark
    * a row may not write into a block that another sequence of an unfinished step can still see (quarantine)
    * drafts are verified by rows that draw, in blocks that the sequence has
    * plans arrive in order; a sequence is introduced before its first row; draws of an earlier step exist

Layers that keep a state store a hash of all tokens up to a position, and go on from what they find before a row.

`toy_model.solo_answer` gives the answer of the same request run alone, from tokens only. A step takes modelled time, on
whatever loop runs it. Failures are drawn from a seed: a failed step leaves garbage in the slots it would have written,
and steps that were already submitted run on top of that garbage or fail too. Single rows are corrupted, too. With each
draw a toy drafter proposes tokens to follow, some of them right.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from hashlib import blake2b
from typing import NamedTuple

from ..core.block import NO_BLOCK, STATE, num_hidden_blocks
from ..core.config import EngineConfig
from ..core.cost import Costs, work_of
from ..core.effects import DropAdapter, GiveBack, Job, PrepareGrammar
from ..core.errors import EngineFailed, InvalidRequest
from ..core.events import ForgetTenants, LoadAdapter
from ..core.moves import EndMove, PullBlocks, SendBlocks
from ..core.ports import Clock
from ..core.step import Drafts, PlanRow, RowResult, StepPlan, StepResult, TokenLogprob
from .peers import ToyNetwork, ToyPeer
from .store import Stored, ToyStore
from .tier_store import ToyMachine, ToyTiers
from .toy_model import ToyEncoder, ToyPool, ToySequence, draw, give_back, inputs_of, logprob, mark_of, state_after

BAD_GRAMMAR = "bad"
_GARBAGE = -7


class Violation(BaseException):
    """The engine broke its contract. Not an Exception, so that no shell takes it for a failed step."""


class StepFailure(RuntimeError):
    """A step failed by choice of the seed."""


TOY_COSTS = Costs(step_s=0.004, token_s=0.0001)
"""What steps take where nothing else is said."""


class Failures(NamedTuple):
    """The share of steps and rows that fail, and the seed that says which."""

    seed: int = 0
    rate: float = 0.0


NO_FAILURES = Failures()


class ToyDrafter(NamedTuple):
    """Most tokens that it proposes at a time, the share of them that is right, and what it says that share is."""

    most: int = 0
    right: float = 0.8
    said: float = 0.8


NO_DRAFTER = ToyDrafter()


class ToyExecutor:
    """Executes plans in order against an array of slots for each KV group, a step at a time. peers: the network to
    others, and its address there."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock,
        *,
        vocab_size: int = 64,
        costs: Costs = TOY_COSTS,
        failures: Failures = NO_FAILURES,
        stored: Stored | None = None,
        peers: tuple[ToyNetwork, str] | None = None,
        incarnation: str = "",
        machine: ToyMachine | None = None,
        drafter: ToyDrafter = NO_DRAFTER,
    ) -> None:
        self._block_size = config.block_size
        self._max_tokens = config.max_num_batched_tokens
        self._steps_in_flight = config.steps_in_flight
        self._clock = clock
        self._vocab_size = vocab_size
        self._costs = costs
        self._rng = random.Random(failures.seed)
        self._failure_rate = failures.rate
        self._drafter = drafter
        self._guesses = random.Random(f"drafts of {failures.seed}")
        self.num_drafted = self.num_accepted = 0
        self._pools = tuple(ToyPool(group, config.block_size) for group in config.groups)
        self._encoder = ToyEncoder()
        self._sequences: dict[int, ToySequence] = {}
        self._adapters: dict[str, None] = {}
        self._grammars: set[str] = set()
        self._next_step = 0
        self._void_below = 0
        self._turn: asyncio.Future[None] | None = None
        rng = random.Random(f"transfers of {failures.seed}")
        self.store = ToyStore(self._pools, config.block_size, self._require, rng, failures.rate, dict(stored or {}))
        self.tiers = (
            ToyTiers(machine, incarnation, self._pools, config.block_size, self._require, rng) if machine else None
        )
        self._kv = self.tiers or self.store
        self.num_failures = 0
        self.peer: ToyPeer | None = None
        if peers is not None:
            self.peer = ToyPeer(*peers, incarnation, self._pools, config.block_size, self._require)

    @property
    def num_sequences(self) -> int:
        """Sequences whose state the worker still holds."""
        return len(self._sequences)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Digests of the adapters it holds."""
        return tuple(self._adapters)

    async def run(self, job: Job) -> str:
        match job:
            case LoadAdapter(path=path):
                return await self._load_adapter(path)
            case DropAdapter(digest):
                return await self._drop_adapter(digest)
            case PrepareGrammar(grammar):
                return await self._prepare_grammar(grammar)
            case PullBlocks():
                return await self._reached_peer().pull(job)
            case SendBlocks():
                return await self._reached_peer().send(job)
            case ForgetTenants():
                return ""  # it keeps nothing
            case EndMove():
                return "" if self.peer is None else self.peer.end(job)
            case GiveBack(blocks=blocks):
                self._require(give_back(self._pools, blocks), "a block is used and given back")
                return ""
        return await self._kv.run(job)

    def _reached_peer(self) -> ToyPeer:
        if self.peer is None:
            raise EngineFailed("There is no way to other engines.")
        return self.peer

    async def _load_adapter(self, path: str) -> str:
        """An adapter is nothing but its digest, which follows from the path; loading takes as long as a step."""
        await asyncio.sleep(self._costs.step_s)
        digest = blake2b(path.encode(), digest_size=16).hexdigest()
        self._adapters[digest] = None
        return digest

    async def _drop_adapter(self, digest: str) -> str:
        if self._turn is not None:
            await self._turn
        self._adapters.pop(digest, None)
        return digest

    async def _prepare_grammar(self, grammar: str) -> str:
        """It takes as long as a step; one that says so cannot be used."""
        await asyncio.sleep(self._costs.step_s)
        if grammar == BAD_GRAMMAR:
            raise InvalidRequest("The grammar cannot be used.", param="grammar")
        self._grammars.add(grammar)
        return ""

    async def execute(self, plan: StepPlan) -> StepResult:
        before = self._turn
        turn = self._turn = asyncio.get_running_loop().create_future()
        try:
            rows = self._receive(plan)
            if before is not None:
                await before
            started_s = self._clock.now()
            await asyncio.sleep(self._costs.predict(work_of(plan.rows)))
            return StepResult(plan.step, self._run(plan, rows), self._clock.now() - started_s)
        finally:
            for reach in (self._encoder.reach, *(pool.reach for pool in self._pools)):
                reach.pop(plan.step, None)
            if not turn.done():  # or the engine was killed
                turn.set_result(None)

    def _receive(self, plan: StepPlan) -> list[ToySequence]:
        """Apply table deltas and check the plan, at the moment that it is submitted."""
        self._require(plan.step == self._next_step, f"step {plan.step} came when {self._next_step} was due")
        in_flight = len(self._pools[0].reach)
        self._require(in_flight < self._steps_in_flight, f"{in_flight} steps were in flight already")
        self._require(0 < plan.num_tokens <= self._max_tokens, f"step {plan.step} has {plan.num_tokens} tokens")
        self._next_step += 1
        for number in plan.released:
            self._sequences.pop(number, None)
        rows = [self._receive_row(plan, row) for row in plan.rows]
        self._require(len({row.seq for row in plan.rows}) == len(rows), "a sequence has two rows")
        self._encoder.reach[plan.step] = {block: seq for seq in rows for block in seq.intro.encoded}
        for index, pool in enumerate(self._pools):
            pool.reach[plan.step] = {
                block: seq
                for row, seq in zip(plan.rows, rows, strict=True)
                for block in filter(NO_BLOCK.__ne__, seq.tables[index][self._first_seen(pool, row) :])
            }
        return rows

    def _first_seen(self, pool: ToyPool, row: PlanRow) -> int:
        """The first block that the row sees."""
        return num_hidden_blocks(row.start, pool.window, self._block_size)

    def _receive_row(self, plan: StepPlan, row: PlanRow) -> ToySequence:
        if row.intro is not None:
            adapter = row.intro.adapter
            self._require(not adapter or adapter in self._adapters, f"step {plan.step} uses an adapter that is gone")
            grammar = row.intro.sampling.grammar
            self._require(not grammar or grammar in self._grammars, f"step {plan.step} has a grammar not prepared")
            tables: tuple[list[int], ...] = tuple([] for _ in self._pools)
            self._sequences[row.seq] = ToySequence(row.intro, tables, list(row.intro.output_tokens))
            for block in row.intro.unencoded:
                is_free = all(block not in reach for reach in self._encoder.reach.values())
                self._require(is_free, f"step {plan.step} encodes into block {block} while it may be read")
        self._require(row.seq in self._sequences, f"step {plan.step} runs unknown sequence {row.seq}")
        seq = self._sequences[row.seq]
        num_new = len(row.blocks) // len(self._pools)
        end = row.start + row.num_tokens
        size = self._block_size
        for index, (pool, table) in enumerate(zip(self._pools, seq.tables, strict=True)):
            table.extend(row.blocks[index * num_new : (index + 1) * num_new])
            num_spare = len(table) - -(-end // size)  # taken for drafts that were wrong
            self._require(
                0 <= num_spare <= (self._drafter.most > 0), f"sequence {row.seq}: {len(table)} blocks to {end}"
            )
            seen = [block for block in table[self._first_seen(pool, row) :] if block != NO_BLOCK]
            self._require(len(set(seen)) == len(seen), f"sequence {row.seq} has a block twice")
            self._require(not any(pool.moving.get(block) for block in seen), f"sequence {row.seq} sees blocks to come")
            for block in filter(NO_BLOCK.__ne__, table[row.start // size :]):
                is_moved = block in pool.moving or block in pool.sending
                self._require(not is_moved, f"step {plan.step} writes block {block} while it is moved")
                for step, reach in pool.reach.items():
                    other = reach.get(block)
                    self._require(
                        other is None or other is seq,
                        f"step {plan.step} writes block {block} of sequence {row.seq} while step {step} may touch it",
                    )
        self._require(row.sample or not row.drafts, f"sequence {row.seq} has drafts and does not draw")
        if row.sample and not row.drafts:  # else nobody knows yet which output the last token of the row is
            seq.drawn_in[plan.step] = end - len(seq.intro.prompt_tokens)
        return seq

    def _run(self, plan: StepPlan, rows: list[ToySequence]) -> tuple[RowResult, ...]:
        is_void = plan.step < self._void_below
        if not is_void and self._rng.random() < self._failure_rate:
            self.num_failures += 1
            self._void_below = self._next_step
            self._scribble(plan, rows)
            raise StepFailure(f"step {plan.step} failed by choice")
        if is_void:
            self._scribble(plan, rows)
            if self._rng.random() < 0.5:
                raise StepFailure(f"step {plan.step} was built on a failed one")
            return tuple(RowResult(row.seq, (_GARBAGE,) if row.sample else ()) for row in plan.rows)
        for intro in (row.intro for row in plan.rows if row.intro is not None):
            self._encoder.fill(intro)
        for row, seq in zip(plan.rows, rows, strict=True):
            self._check_states(row, seq)  # rows go on side by side
        for row, seq in zip(plan.rows, rows, strict=True):
            self._require(self._encoder.has(seq.intro), f"sequence {row.seq} reads what was encoded of another content")
            self._write(row, seq)
        return tuple(self._spoil(self._read(plan, row, seq)) for row, seq in zip(plan.rows, rows, strict=True))

    def _spoil(self, result: RowResult) -> RowResult:
        """A row is corrupted as often as a step fails. Rows planned on top of it have their token all the same."""
        if not self._failure_rate or self._rng.random() >= self._failure_rate:
            return result
        self.num_failures += 1
        return RowResult(result.seq, is_corrupted=True)

    def _slots(self, table: list[int], start: int, end: int) -> list[int]:
        """Of these positions, as far as there is one."""
        size = self._block_size
        return [table[p // size] * size + p % size for p in range(start, end) if table[p // size] != NO_BLOCK]

    def _scribble(self, plan: StepPlan, rows: list[ToySequence]) -> None:
        for row, seq in zip(plan.rows, rows, strict=True):
            if row.intro is not None:
                self._encoder.contents.update(dict.fromkeys(row.intro.unencoded, b"garbage"))
            for pool, table in zip(self._pools, seq.tables, strict=True):
                for slot in self._slots(table, row.start, row.start + row.num_tokens):
                    pool.positions[slot] = pool.tokens[slot] = _GARBAGE

    def _write(self, row: PlanRow, seq: ToySequence) -> None:
        tokens = row.tokens
        if row.from_step >= 0:
            self._require(not tokens, f"sequence {row.seq} has tokens and from_step")
            self._require(row.from_step in seq.drawn_in, f"sequence {row.seq} drew nothing in step {row.from_step}")
            tokens = (seq.outputs[seq.drawn_in[row.from_step]],)
        tokens += row.drafts
        if seq.intro.embeds:
            known = [0] * row.start + list(tokens)
            tokens = tuple(inputs_of(known, seq.intro.embeds)[row.start :])
        mark = mark_of(seq.intro.adapter)
        for pool, table in zip(self._pools, seq.tables, strict=True):
            if pool.kind == STATE:
                self._carry_state_on(pool, table, row, seq, tokens)
                continue
            slots = self._slots(table, row.start, row.start + len(tokens))
            for slot, position, token in zip(slots, range(row.start, 2**62), tokens, strict=False):
                pool.positions[slot] = position
                pool.tokens[slot] = token + mark

    def _check_states(self, row: PlanRow, seq: ToySequence) -> None:
        """What a row goes on from is there before its step."""
        for pool, table in zip(self._pools, seq.tables, strict=True):
            if pool.kind == STATE and row.start:
                (slot,) = self._slots(table, row.start - 1, row.start)
                found = pool.positions[slot], pool.tokens[slot]
                is_right = found == (row.start - 1, state_after(self._values_before(row, seq)))
                self._require(is_right, f"sequence {row.seq} goes on from the state {found}")

    @staticmethod
    def _values_before(row: PlanRow, seq: ToySequence) -> array[int]:
        mark = mark_of(seq.intro.adapter)
        known = [*seq.intro.prompt_tokens, *seq.outputs][: row.start]
        return array("q", [value + mark for value in inputs_of(known, seq.intro.embeds)])

    def _carry_state_on(
        self, pool: ToyPool, table: list[int], row: PlanRow, seq: ToySequence, new: tuple[int, ...]
    ) -> None:
        """From the state before the row, position by position; of each block the last one stays."""
        mark, values = mark_of(seq.intro.adapter), self._values_before(row, seq)
        for position, token in enumerate(new, row.start):
            values.append(token + mark)
            for slot in self._slots(table, position, position + 1):
                begin = slot - position % self._block_size
                pool.tokens[begin:slot] = array("q", [0]) * (slot - begin)
                pool.positions[slot], pool.tokens[slot] = position, state_after(values)

    def _read(self, plan: StepPlan, row: PlanRow, seq: ToySequence) -> RowResult:
        """Read back through the tables what the row sees, check it, and draw or score."""
        end = row.start + row.num_tokens - len(row.drafts)
        prompt = seq.intro.prompt_tokens
        where = f"step {plan.step}, sequence {row.seq}"
        known = [*prompt, *seq.outputs][:end]
        prefix = inputs_of(known[: len(prompt)], seq.intro.embeds) + array("q", known[len(prompt) :])
        mark = mark_of(seq.intro.adapter)
        stored = array("q", [value + mark for value in inputs_of([*known, *row.drafts], seq.intro.embeds)])
        for pool, table in zip(self._pools, seq.tables, strict=True):
            # With a window, a row that neither draws nor scores may be the last to see a block.
            if pool.kind != STATE and (pool.window or row.sample or row.score):
                self._check_seen(pool, table, row, stored, where)
        if not (row.sample or row.score):
            return RowResult(row.seq)
        scores: list[TokenLogprob] = []
        if row.score:
            for position in range(row.start, min(end, len(prompt) - 1)):
                scores.append(logprob(self._vocab_size, prefix[: position + 1], prompt[position + 1]))
        if not row.sample:
            return RowResult(row.seq, prompt_logprobs=tuple(scores))
        position = end - len(prompt)
        self._require(position == len(seq.outputs), f"{where}: draws output {position} of {len(seq.outputs)}")
        tokens, entries = self._verify(row, seq, prefix)
        proposed = self._propose(seq) if self._drafter.most else None
        return RowResult(row.seq, tokens, entries, tuple(scores), drafts=proposed)

    def _verify(
        self, row: PlanRow, seq: ToySequence, prefix: array[int]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Draw the token after `prefix`, and after each draft that is right the next; with their scores if wanted."""
        tokens: list[int] = []
        entries: list[TokenLogprob] = []
        for draft in (*row.drafts, None):
            token = draw(self._vocab_size, seq.intro, prefix, len(seq.outputs))
            if seq.intro.sampling.logprobs is not None:
                entries.append(logprob(self._vocab_size, prefix, token))
            seq.outputs.append(token)
            tokens.append(token)
            if token != draft:
                break
            prefix.append(token)
        self._restore_states(row, seq, len(tokens) - 1)
        self.num_drafted += len(row.drafts)
        self.num_accepted += len(tokens) - 1
        return tuple(tokens), tuple(entries)

    def _restore_states(self, row: PlanRow, seq: ToySequence, num_accepted: int) -> None:
        """Where drafts were wrong: the state behind the last right one stays in its block."""
        position = row.start + row.num_tokens - 1 - len(row.drafts) + num_accepted
        for pool, table in zip(self._pools, seq.tables, strict=True):
            if pool.kind == STATE and num_accepted < len(row.drafts):
                slots = self._slots(table, position, position + 1)
                self._require(len(slots) == 1, f"sequence {row.seq} has no state behind position {position}")
                known = self._values_before(row._replace(start=position + 1), seq)
                pool.positions[slots[0]], pool.tokens[slots[0]] = position, state_after(known)

    def _propose(self, seq: ToySequence) -> Drafts:
        """What may follow the outputs."""
        prefix, drafts = inputs_of(seq.intro.prompt_tokens, seq.intro.embeds) + array("q", seq.outputs), list[int]()
        for position in range(len(seq.outputs), len(seq.outputs) + self._guesses.randint(0, self._drafter.most)):
            is_right = self._guesses.random() < self._drafter.right
            token = draw(self._vocab_size, seq.intro, prefix, position) if is_right else 1
            drafts.append(token)
            prefix.append(token)
        return Drafts(tuple(drafts), "toy", (self._drafter.said,) * len(drafts))

    def _check_seen(self, pool: ToyPool, table: list[int], row: PlanRow, known: array[int], where: str) -> None:
        size, end = self._block_size, len(known)
        positions, tokens = array("q"), array("q")
        first_block = self._first_seen(pool, row)
        for block in table[first_block:]:
            positions += pool.positions[block * size : (block + 1) * size]
            tokens += pool.tokens[block * size : (block + 1) * size]
        first = max(0, row.start - pool.window + 1) if pool.window else 0
        within = slice(first - first_block * size, end - first_block * size)
        positions, tokens = positions[within], tokens[within]
        self._require(positions == array("q", range(first, end)), f"{where}: read positions {positions.tolist()}")
        self._require(tokens == known[first:], f"{where}: read tokens {tokens.tolist()} for {known[first:].tolist()}")

    @staticmethod
    def _require(holds: bool, message: str) -> None:
        if not holds:
            raise Violation(message)
