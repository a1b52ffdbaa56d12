"""Chat messages to one prompt, by the model's own Jinja2 template.

The environment is the one Hugging Face templates are written for (trimmed blocks, loop controls, `tojson`,
`raise_exception`, `strftime_now`, `{% generation %}`), in Jinja2's immutable sandbox. Templates come with downloaded
models and messages from clients. The sandbox keeps a template from reaching Python; it does not bound what a template
costs, at compilation or at rendering, and neither does this module: a `Renderer` belongs into a process whose time and
memory are limited (`api.jobs`, `sandbox.child`). Bounded here are the sizes of the template and of the prompt.
What a template cannot render is the client's error and names `messages`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import BadCheckpoint, InvalidRequest
from .special_tokens import Placeholders, Rendered, SpecialTokens

MAX_TEMPLATE_CHARS = 1 << 20
MAX_PROMPT_CHARS = 1 << 23
_MAX_REASON = 500

_CONTINUE_MARK = "\ue000continue-final-message\ue000 "
"""Put behind the message to be continued, to find its end in the prompt; the space shows whether the template trims."""

_PROBE = "\ue000probe\ue000"
_DATA = (str, int, float, list, tuple, dict, type(None), Undefined)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template as it came with a model, not compiled. `bos_token` and `eos_token` are given to it as text."""

    source: str
    bos_token: str = ""
    eos_token: str = ""


class Renderer:
    """A compiled template. What it takes to compile and to render is not bounded here."""

    def __init__(
        self, template: ChatTemplate, specials: Sequence[str] = (), *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`specials`: special tokens that are plain text where a message spells them; none: whatever the prompt holds
        counts. `now`: the date it may print. Raises BadCheckpoint when the template is too large or does not compile.
        """
        if len(template.source) > MAX_TEMPLATE_CHARS:
            raise BadCheckpoint(
                f"The chat template has {len(template.source)} characters; {MAX_TEMPLATE_CHARS} are allowed."
            )
        environment = _Environment({"raise_exception": _raise_exception, "strftime_now": lambda f: now().strftime(f)})
        try:
            self._template = environment.from_string(template.source)
        except Exception as error:  # a template that is made to fail may do so in any way
            raise BadCheckpoint(f"The chat template does not compile: {_reason(error)}.") from error
        self._specials = SpecialTokens(specials)
        self._source = template.source
        self._tokens = {"bos_token": template.bos_token, "eos_token": template.eos_token}
        self._takes_strings: bool | None = None
        self._takes_parts: bool | None = None
        self._takes_null: bool | None = None
        self._takes_objects: bool | None = None
        self._takes_text: bool | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt. `continue_final_message` leaves the last message open (and then no generation prompt is added);
        `extra`: further variables of the template. Raises InvalidRequest naming `messages`."""
        prepared = [self._prepare(index, message) for index, message in enumerate(messages)]
        if not prepared:
            raise InvalidRequest("messages must hold at least one message.", param="messages")
        if continue_final_message:
            if messages[-1].get("content") is None:
                raise InvalidRequest(
                    "continue_final_message: the last message has no content to continue.", param="messages"
                )
            _mark_end(prepared[-1])
        hidden = Placeholders(self._specials, self._source)
        variables = hidden.put(
            {
                **(extra or {}),
                "messages": prepared,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }
        )
        prompt = self._run(variables)
        return hidden.take(_cut_at_mark(prompt) if continue_final_message else prompt)

    def _run(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({"documents": None, **variables, **self._tokens}):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise InvalidRequest(f"The prompt exceeds {MAX_PROMPT_CHARS} characters.", param="messages")
        except (InvalidRequest, MemoryError):
            raise
        except Exception as error:  # a template that is made to fail may do so in any way
            raise InvalidRequest(
                f"The chat template rejected the messages: {_reason(error)}", param="messages"
            ) from error
        return "".join(pieces)

    def _try(self, messages: list[dict[str, Any]]) -> str:
        return self._run({"messages": messages, "tools": None, "add_generation_prompt": False})

    def _prepare(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the message with its content in the form the template reads: a string, or a list of parts."""
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{index}] must be an object.", param="messages")
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [self._readable(call) for call in message["tool_calls"]]}
        content = message.get("content")
        if isinstance(content, list):
            texts = [_part_text(index, part) for part in content]
            parts = [{"type": "text", "text": text} for text in texts]
            return {**message, "content": parts if self._reads_parts() else "\n".join(texts)}
        if content is None:
            is_null = bool(message.get("tool_calls")) and self._reads_null()
            return {**message, "content": None if is_null else ""}
        if not isinstance(content, str):
            raise InvalidRequest(f"messages[{index}].content must be a string or a list of parts.", param="messages")
        if not self._reads_strings() and self._reads_parts():
            return {**message, "content": [{"type": "text", "text": content}]}
        return dict(message)

    def _reads_strings(self) -> bool:
        if self._takes_strings is None:
            self._takes_strings = self._shows(_PROBE)
        return self._takes_strings

    def _reads_parts(self) -> bool:
        """Whether the template takes content apart, rather than printing the list as Python would."""
        if self._takes_parts is None:
            self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        return self._takes_parts

    def _reads_null(self) -> bool:
        """Whether the template knows calls of tools without content, rather than failing or printing None."""
        if self._takes_null is None:
            prompt = self._try_call(None, {} if self._reads_objects() else "{}")
            self._takes_null = prompt is not None and "None" not in prompt
        return self._takes_null

    def _reads_objects(self) -> bool:
        """Whether the template writes the arguments of calls as JSON itself. Some are made for arguments that are text
        already: they fail, or print an object as Python would."""
        if self._takes_objects is None:
            self._takes_objects = True
            for content in (None, ""):
                prompt = self._try_call(content, {_PROBE: 1})
                if prompt is not None and _PROBE in prompt:
                    self._takes_objects = f"'{_PROBE}'" not in prompt
                    break
                prompt = self._try_call(content, json.dumps({_PROBE: 1}, ensure_ascii=False))
                if prompt is not None and _PROBE in prompt:
                    self._takes_objects = False
                    break
        return self._takes_objects

    def _reads_text(self) -> bool:
        """Whether the template writes arguments that are text as they are, rather than as a string of JSON."""
        if self._takes_text is None:
            text = '{"' + _PROBE
            prompts = [self._try_call(content, text) for content in (None, "")]
            self._takes_text = any(prompt is not None and text in prompt for prompt in prompts)
        return self._takes_text

    def _readable(self, call: Any) -> Any:
        """The call with its arguments in the form that the template reads. What is no object comes as text."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = arguments if self._reads_text() else {}
        elif not self._reads_objects():
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def _try_call(self, content: str | None, arguments: Any) -> str | None:
        """A conversation with a call of a tool; None where that cannot be rendered."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        history: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        try:
            return self._try(history)
        except InvalidRequest:
            return None

    def _shows(self, content: Any) -> bool:
        try:
            prompt = self._try([{"role": "user", "content": content}])
        except InvalidRequest:
            return False
        return _PROBE in prompt and f"'{_PROBE}'" not in prompt and f'"{_PROBE}"' not in prompt


def _part_text(index: int, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(
            f"messages[{index}].content: only text parts are supported, got {kind!r}.", param="messages"
        )
    return str(part["text"])


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        last = content[-1]
        message["content"] = [*content[:-1], {**last, "text": last["text"] + _CONTINUE_MARK}]
    else:
        message["content"] = f"{content or ''}{_CONTINUE_MARK}"


def _cut_at_mark(prompt: str) -> str:
    end = prompt.rfind(_CONTINUE_MARK.rstrip())
    if end < 0:
        raise InvalidRequest("continue_final_message: the template does not print the last message.", param="messages")
    trims = not prompt.startswith(_CONTINUE_MARK, end)
    return prompt[:end].rstrip() if trims else prompt[:end]


class _Environment(ImmutableSandboxedEnvironment):
    """In which a template holds nothing but data, and what can only be called or gone through. Functions, methods and
    iterators print where they lie in this process's memory, which is no text of a prompt and nobody else's business:
    wherever one of them comes from, it comes as an `_Opaque`."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters |= {"tojson": _tojson}
        self.filters = {name: _giving_opaque(each) for name, each in self.filters.items()}
        self.globals = {name: _opaque(each) for name, each in {**self.globals, **functions}.items()}
        self.tests["callable"] = lambda value: callable(_bare(value))

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _opaque(super().getattr(_bare(obj), attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _opaque(super().getitem(_bare(obj), argument))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _opaque(super().call(context, _bare(obj), *args, **kwargs))


class _Opaque:
    """What has no text: any way to make one of it is the template's error."""

    __slots__ = ("bare",)

    def __init__(self, bare: Any) -> None:
        self.bare = bare

    def __iter__(self) -> Iterator[Any]:
        return iter(self.bare)

    def __repr__(self) -> str:
        raise TemplateRuntimeError("it prints a function, a method or an iterator, which is no text.")


def _opaque(value: Any) -> Any:
    """`value`; as an `_Opaque` if it would print where it lies."""
    if isinstance(value, _DATA):
        return value
    printer: object = type(value).__repr__
    prints_place = printer is object.__repr__ or callable(value) or hasattr(value, "__next__")
    return _Opaque(value) if prints_place else value


def _bare(value: Any) -> Any:
    return value.bare if isinstance(value, _Opaque) else value


def _giving_opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with the marks by which Jinja2 knows what to give it
    def giving(*args: Any, **kwargs: Any) -> Any:
        return _opaque(function(*args, **kwargs))

    return giving


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's words for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_REASON]
