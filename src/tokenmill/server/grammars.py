"""Constraints made into grammars: in the sandbox process, and the last ones are remembered."""

from __future__ import annotations

import time
from collections import OrderedDict

from ..api.jobs import CompileGrammar, packed
from ..api.sandbox import Caller, Sandbox
from ..control.observe.metrics import Metrics
from ..core.errors import InvalidRequest
from ..text.grammar.constraint import Constraint

MAX_KEPT = 256
MAX_KEPT_BYTES = 8 << 20
"""Of constraints and grammars together."""

_NOBODY = Caller()


class GrammarCompiler:
    """metrics: told of each compilation; None: nobody is."""

    def __init__(self, sandbox: Sandbox, metrics: Metrics | None = None) -> None:
        self._sandbox = sandbox
        self._metrics = metrics
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._num_bytes = 0

    async def compile(self, constraint: Constraint, caller: Caller = _NOBODY) -> str:
        """The constraint as a grammar that the engine takes. Raises InvalidRequest naming the field and, where it can
        be told, the place at fault, or that it takes too long or too much memory."""
        salt = caller.tenant.salt  # whether another has asked for the same would show in the time
        key = packed((salt, constraint) if salt else constraint, constraint.param)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        began_s = time.monotonic()
        try:
            compiled = await caller.stay(self._sandbox.run(CompileGrammar(constraint), caller.name))
        except InvalidRequest:
            if self._metrics is not None:
                self._metrics.grammar_refused()
            raise
        if self._metrics is not None:
            self._metrics.grammar_compiled(time.monotonic() - began_s)
        grammar = compiled.decode()
        self._keep(key, grammar)
        return grammar

    def _keep(self, key: bytes, grammar: str) -> None:
        if key in self._kept:  # compiled for two calls at once
            return
        self._kept[key] = grammar
        self._num_bytes += len(key) + len(grammar)
        while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            old, text = self._kept.popitem(last=False)
            self._num_bytes -= len(old) + len(text)
