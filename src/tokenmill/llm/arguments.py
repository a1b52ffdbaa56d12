"""What callers of `LLM` and `AsyncLLM` pass, in vLLM's forms as well: options, prompts, conversations, progress.

Whatever has the wrong type is answered with one line that names it, before anything has run.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from ..api.call import Call
from ..api.constraints import structured_outputs
from ..api.conversations import parse_conversation
from ..api.fields import Fields
from ..api.rules import Rules
from ..api.tools import demand, read_tools
from ..core.config import check_keys
from ..core.errors import ConfigError, InvalidRequest
from ..core.options import options_of, size
from ..core.request import SamplingParams
from ..core.units import GiB, parse_bytes
from ..kv.store.options import TierOptions
from ..node import foreign
from ..node.options import EngineOptions, TextOptions
from ..text.grammar.constraint import Constraint
from ..text.text_model import TextModel

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]
StructuredOutputs = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
"""vLLM's structured_outputs, as a dict: for all prompts, or one or None for each."""
"""A text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, each with a "cache_salt" if wanted."""


def read_options(options: Mapping[str, Any]) -> tuple[EngineOptions, TextOptions, TierOptions]:
    """Keyword options of LLM(). Sizes may be text, such as "2GiB". Those of vLLM that have nothing to do here are said
    to have none; those that would change what runs are refused. Raises ConfigError."""
    kinds = (EngineOptions, TextOptions, TierOptions)
    known = {name: declared for kind in kinds for name, (declared, _, _) in options_of(kind).items()}
    groups = dict(foreign.flags())
    given: dict[str, Any] = {}
    for name, value in _spelled(options):
        group = None if name in known else groups.get("--" + name.replace("_", "-"))
        if group is None:
            given[name] = value
        elif group.refused and value not in (None, False) and not group.asks_for_nothing([str(value)]):
            raise ConfigError(f"{name}={value!r}: {group.why}.", param=name)
        elif not group.refused:
            warnings.warn(f"{name} has no effect here: {group.why}.", stacklevel=3)
    check_keys(given, known, "LLM()")
    for name, value in given.items():
        if known[name].read is size and isinstance(value, str):
            given[name] = parse_bytes(value, name)
    engine, text, tiers = ({name: given[name] for name in options_of(kind) if name in given} for kind in kinds)
    return EngineOptions(**engine), TextOptions(**text), TierOptions(**tiers)


def _spelled(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """vLLM's name for host memory, in GiB."""
    for name, value in options.items():
        if name != "kv_offloading_size":
            yield name, value
        elif isinstance(value, (int, float)) and value > 0:
            yield "kv_host", int(value * GiB)


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """text or tokens, the other is None; cache_salt: of this prompt alone, or ""."""

    text: str | None
    tokens: tuple[int, ...] | None
    cache_salt: str = ""

    @property
    def content(self) -> str | tuple[int, ...]:
        if self.text is not None:
            return self.text
        assert self.tokens is not None, "a prompt of nothing"
        return self.tokens


def read_prompts(prompts: Any) -> list[GivenPrompt]:
    """One prompt or several, as several. Raises InvalidRequest."""
    if isinstance(prompts, (str, Mapping)) or _are_ids(prompts):
        return [_prompt(prompts)]
    if isinstance(prompts, (bytes, int, float, type(None))) or not hasattr(prompts, "__iter__"):
        raise _wrong(prompts)
    return [_prompt(prompt) for prompt in prompts]


def _prompt(prompt: Any) -> GivenPrompt:
    if isinstance(prompt, str):
        return GivenPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return GivenPrompt(None, _ids(prompt))
    known = ("prompt", "prompt_token_ids", "cache_salt")
    unknown = [key for key in prompt if key not in known]
    if unknown:
        raise InvalidRequest(f"A prompt has no {unknown[0]!r} here; known are {', '.join(known)}.", param="prompt")
    text, tokens, salt = (prompt.get(key) for key in known)
    if (text is None) == (tokens is None):
        raise InvalidRequest('A prompt holds either "prompt" or "prompt_token_ids".', param="prompt")
    if not isinstance(text, (str, type(None))):
        raise InvalidRequest(f'"prompt" must be a string, got {type(text).__name__}.', param="prompt")
    if not isinstance(salt, (str, type(None))):
        raise InvalidRequest(f'"cache_salt" must be a string, got {type(salt).__name__}.', param="cache_salt")
    return GivenPrompt(text, None if tokens is None else _ids(tokens), salt or "")


def _are_ids(value: Any) -> bool:
    """Whether it is one list (or array) of token ids rather than one of prompts."""
    if isinstance(value, (bytes, bytearray)):
        return False
    try:
        return len(value) > 0 and hasattr(value[0], "__index__")
    except (TypeError, KeyError, IndexError):
        return False


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, bytearray)):
        raise _wrong(value)
    try:
        return tuple(operator.index(token) for token in value)
    except TypeError:
        raise _wrong(value) from None


def _wrong(value: Any) -> InvalidRequest:
    return InvalidRequest(
        "A prompt must be a string, a list of token ids, or a dict with one of them as prompt or prompt_token_ids, got "
        f"{type(value).__name__}.",
        param="prompt",
    )


def read_conversations(messages: Any) -> list[Sequence[Message]]:
    """One is a list of messages, several are a list of lists of them. Raises InvalidRequest."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise _no_messages()
    several = not isinstance(messages[0], Mapping)
    conversations = cast(list[Sequence[Message]], list(messages) if several else [messages])
    for conversation in conversations:
        if isinstance(conversation, (str, bytes, Mapping)) or not isinstance(conversation, Sequence):
            raise _no_messages()
        if not conversation or not all(isinstance(message, Mapping) for message in conversation):
            raise _no_messages()
    return conversations


def _no_messages() -> InvalidRequest:
    return InvalidRequest(
        'messages must be a list such as [{"role": "user", "content": "..."}], or a list of such lists.',
        param="messages",
    )


def read_sampling(sampling: Any, number: int, default: Callable[[], SamplingParams]) -> list[SamplingParams]:
    """One for each of `number` prompts. Raises InvalidRequest."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or default()] * number
    if not isinstance(sampling, Sequence) or not all(isinstance(each, SamplingParams) for each in sampling):
        got = type(sampling).__name__
        raise InvalidRequest(
            f"sampling_params must be SamplingParams or a list of them, got {got}.", param="sampling_params"
        )
    if len(sampling) != number:
        raise InvalidRequest(
            f"{number} prompts came with {len(sampling)} sampling parameters.", param="sampling_params"
        )
    return list(sampling)


def read_structured(wanted: Any, number: int) -> list[Constraint | None]:
    """One for each of `number` prompts; None: any answer will do. Raises InvalidRequest."""
    if wanted is None or isinstance(wanted, Mapping):
        return [None if wanted is None else structured_outputs(dict(wanted))] * number
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        message = f"structured_outputs must be a dict or a list of them, got {type(wanted).__name__}."
        raise InvalidRequest(message, param="structured_outputs")
    if len(wanted) != number:
        message = f"{number} prompts came with {len(wanted)} structured outputs."
        raise InvalidRequest(message, param="structured_outputs")
    return [constraint for each in wanted for constraint in read_structured(each, 1)]


@contextmanager
def progress_of(total: int, wanted: bool) -> Iterator[Callable[[], None]]:
    """Gives what is to be called as each of `total` prompts is done; draws a bar on a terminal's standard error."""
    if not wanted or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What may go with a conversation, in OpenAI's words. constraint: what the answer must be; None: it is free."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    constraint: Constraint | None = None


def read_chat(
    messages: Sequence[Message],
    text: TextModel,
    options: ChatOptions | None = None,
    *,
    add_generation_prompt: bool | None = None,
) -> Call:
    """A call without settings. Raises InvalidRequest naming the argument."""
    options = options or ChatOptions()
    fields = Fields(
        {
            "messages": [dict(message) for message in messages],
            "tools": None if options.tools is None else [dict(tool) for tool in options.tools],
            "tool_choice": options.tool_choice,
            "parallel_tool_calls": options.parallel_tool_calls,
            "chat_template_kwargs": None
            if options.chat_template_kwargs is None
            else dict(options.chat_template_kwargs),
            "add_generation_prompt": add_generation_prompt,
        }
    )
    tools = read_tools(fields)
    rules = Rules(text.tokenizer.vocab_size, chat_format=text.chat_format)
    return Call(
        model=None,
        sampling=SamplingParams(),
        conversation=parse_conversation(fields, rules, tools.shown),
        tool_use=tools.use,
        constraint=demand(tools, options.constraint, text.chat_format),
    )
