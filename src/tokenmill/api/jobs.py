"""What a sandbox process does: read bodies, compile and render chat templates, encode texts.

A job and its result cross between two processes, so both are compact: token ids are int32, and what can be an answer's
body is one. Nothing here bounds time or memory; the process does (`sandbox.child`), and its limits are told to
clients by `describe_limit`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..core.errors import BadCheckpoint, ContextTooLong, InvalidRequest
from ..core.units import MiB
from ..text.chat_template import ChatTemplate, Renderer
from ..text.grammar.build import to_grammar
from ..text.grammar.constraint import Constraint
from ..text.grammar.matcher import Vocabulary
from ..text.special_tokens import Rendered
from ..text.tokenizer import Tokenizer
from .call import Call
from .conversations import Conversation
from .endpoints import ENDPOINTS, AnyCall, parse_body
from .fields import parse_object
from .openai.tokenize import DetokenizeCall, TokenizeCall, tokenize_body
from .prompts import Mixed
from .responses.parse import outline_of
from .rules import Rules

JOB_S = 2.0
RENDER_S = 0.2
GRAMMAR_S = 0.2
JOB_BYTES = 256 * MiB
RENDER_BYTES = 128 * MiB
MAX_RESULT_BYTES = 32 * MiB

SHRINK = 4
"""What a normaliser might swallow, as a factor."""


class Compile(msgspec.Struct, tag=True, frozen=True):
    """Make the model's own template ready. Result: nothing."""

    param: str | None = None
    does: str = "Compiling the model's chat template"


class Render(msgspec.Struct, tag=True, frozen=True):
    """Result: a Rendered, as msgpack. `template`: the request's own, or None for the model's."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = {}
    template: str | None = None
    param: str | None = "messages"
    does: str = "Rendering the messages"


class Read(msgspec.Struct, tag=True, frozen=True):
    """Validate a body. Result: see `unpack`. `room`: most token ids of a prompt; more are refused, or cut off where the
    call says so."""

    endpoint: str
    body: bytes
    room: int
    param: str | None = None
    does: str = "Reading the body"


class Skim(msgspec.Struct, tag=True, frozen=True):
    """Result: the `responses.outline` of a body."""

    body: bytes
    param: str | None = None
    does: str = "Reading the body"


class Encode(msgspec.Struct, tag=True, frozen=True):
    """Result: token ids as int32. `room`: most tokens wanted, None: any number; `keep`: "" to refuse what exceeds it,
    else "head" or "tail" to cut a text there that is much too long."""

    rendered: Rendered
    add_special: bool
    room: int | None = None
    keep: str = ""
    param: str | None = "prompt"
    does: str = "Encoding the text"


class EncodeInputs(msgspec.Struct, tag=True, frozen=True):
    """As Tokenizer.encode_inputs. Result: (ids as int32, where the second text begins) of each, as msgpack."""

    texts: tuple[str, ...]
    seconds: tuple[str, ...]
    limit: int
    truncate_to: int | None
    keep_end: bool
    param: str | None = "input"
    does: str = "Encoding the inputs"


class Tokenize(msgspec.Struct, tag=True, frozen=True):
    """Result: the body of an answer of /tokenize. `form`: of tokenizing.FORMS."""

    rendered: Rendered
    add_special: bool
    form: str
    max_model_len: int
    param: str | None = "prompt"
    does: str = "Encoding the text"


class CompileGrammar(msgspec.Struct, tag=True, frozen=True):
    """Result: the grammar of a constraint, checked, as UTF-8. `constraint` None: only what all of them need is made
    ready, and the result is nothing."""

    constraint: Constraint | None
    does: str = "Compiling the grammar"

    @property
    def param(self) -> str | None:
        return None if self.constraint is None else self.constraint.param


Job = Compile | Render | Read | Skim | Encode | EncodeInputs | Tokenize | CompileGrammar
_MAX_UNKNOWN = 1000
NEED_TOKENIZER = (Encode, EncodeInputs, Tokenize)

_DECODER: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_RENDERED = msgspec.msgpack.Decoder(Rendered)
_INPUTS = msgspec.msgpack.Decoder(list[tuple[bytes, int]])
_encode = msgspec.msgpack.Encoder().encode


def pack(job: Job) -> tuple[bytes, bytes]:
    """A job as bytes: what it is, and the body that it is about, as it is."""
    if isinstance(job, Read | Skim):
        return _encode(msgspec.structs.replace(job, body=b"")), job.body
    return packed(job, job.param), b""


def packed(value: Any, param: str | None) -> bytes:
    """What a body held, as msgpack. Raises InvalidRequest for an integer that has no place there."""
    try:
        return _encode(value)
    except OverflowError:
        of = f"{param} holds" if param else "The body holds"
        raise InvalidRequest(f"{of} an integer of more than 64 bits.", param=param) from None


@dataclass(frozen=True, slots=True)
class Materials:
    """What jobs need of a model. `specials`: as Renderer's."""

    chat: ChatTemplate | None
    specials: tuple[str, ...]
    rules: Rules
    eos_token_ids: tuple[int, ...] = ()


class Jobs:
    """Does jobs, one at a time. `load`: gives the tokenizer when it is first needed. `rendering`: a context in which
    templates are compiled and rendered for a request."""

    def __init__(
        self,
        materials: Materials,
        load: Callable[[], Tokenizer],
        rendering: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._materials = materials
        self._load = load
        self._rendering = rendering
        self._renderer: Renderer | None = None
        self._tokenizer: Tokenizer | None = None
        self._longest = 0
        self._vocabulary: Vocabulary | None = None

    def load_tokenizer(self) -> None:
        """Once, before the first job that needs it."""
        if self._tokenizer is None:
            self._tokenizer = self._load()
            self._longest = self._tokenizer.longest_token()

    def load_vocabulary(self) -> Vocabulary:
        """Once, before the first grammar. Raises InvalidRequest where the model can follow none."""
        self.load_tokenizer()
        if self._vocabulary is None:
            assert self._tokenizer is not None
            tokenizer = self._tokenizer
            self._vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, self._materials.eos_token_ids)
        return self._vocabulary

    def run(self, data: bytes, body: bytes = b"") -> bytes:
        """`data`, `body`: of `pack`. Raises TokenmillError."""
        job = _DECODER.decode(data)
        if isinstance(job, Compile):
            self._own_renderer()
            return b""
        if isinstance(job, Render):
            return _encode(self._render(job))
        if isinstance(job, Read):
            return self._read(job, body)
        if isinstance(job, Skim):
            return packed(outline_of(body), None)
        if isinstance(job, CompileGrammar):
            return self._compile_grammar(job)
        self.load_tokenizer()
        if isinstance(job, Encode):
            return self._encode(job).tobytes()
        if isinstance(job, EncodeInputs):
            return self._encode_inputs(job)
        return self._tokenize(job)

    def _compile_grammar(self, job: CompileGrammar) -> bytes:
        vocabulary = self.load_vocabulary()
        if job.constraint is None:
            return b""
        grammar = to_grammar(job.constraint, self._tokenizer)
        vocabulary.check(grammar, job.constraint.param)
        return grammar.encode()

    def _own_renderer(self) -> Renderer:
        if self._renderer is None:
            assert self._materials.chat is not None
            self._renderer = Renderer(self._materials.chat, self._materials.specials)
        return self._renderer

    def _render(self, job: Render) -> Rendered:
        source = job.template
        try:
            renderer = self._own_renderer() if source is None else None
        except BadCheckpoint as error:
            raise InvalidRequest(
                f"This model's chat template cannot be used. {error.message}", param="messages"
            ) from None
        with self._rendering():
            if renderer is None:
                assert source is not None
                own = self._materials.chat or ChatTemplate("")
                try:
                    renderer = Renderer(replace(own, source=source), self._materials.specials)
                except BadCheckpoint as error:
                    raise InvalidRequest(error.message, param="chat_template") from None
            return renderer.render(
                job.messages,
                add_generation_prompt=job.add_generation_prompt,
                continue_final_message=job.continue_final_message,
                tools=job.tools,
                extra=job.extra,
            )

    def _read(self, job: Read, body: bytes) -> bytes:
        field = ENDPOINTS[job.endpoint][2]
        call, unknown = parse_body(job.endpoint, parse_object(body), self._materials.rules)
        conversation = getattr(call, "conversation", None)
        rendered = None
        if conversation is not None:
            check_template(self._materials.chat, conversation)
            rendered = self._render(render_job(conversation))
            call = replace(call, conversation=_last_of(conversation))
        prompts = [
            prompt if isinstance(prompt, str) else _fit(self._known_ids(prompt, call), call, job.room).tobytes()
            for prompt in getattr(call, field)
        ]
        return packed((replace(call, **{field: ()}), unknown[:_MAX_UNKNOWN], prompts, rendered), None)

    def _encode(self, job: Encode) -> array[int]:
        rendered = job.rendered
        if job.room is not None:
            most = job.room * SHRINK * self._longest
            text = rendered.text
            if len(text) > most and not job.keep:
                raise ContextTooLong(
                    f"{job.param} has {len(text)} characters, far more than the {job.room} tokens of this model's "
                    "context; shorten it.",
                    param=job.param,
                )
            if len(text) > most and not rendered.is_split:
                rendered = Rendered((text[:most] if job.keep == "head" else text[-most:],))
        tokens = self._ids(rendered, job.add_special)
        if job.room is not None and len(tokens) > job.room and not job.keep:
            raise ContextTooLong(
                f"This model's context is {job.room} tokens, but {job.param} has {len(tokens)}; at most {job.room - 1} "
                "leave room for an answer.",
                param=job.param,
            )
        return tokens

    def _known_ids(self, prompt: Sequence[int] | Mixed, call: Any) -> Sequence[int]:
        """Of a prompt that is no text alone."""
        if not isinstance(prompt, Mixed):
            return prompt
        self.load_tokenizer()
        ids: list[int] = []
        for place, part in enumerate(prompt.parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._ids(Rendered((part,)), call.add_special_tokens and not place)
        return ids

    def _ids(self, rendered: Rendered, add_special: bool) -> array[int]:
        assert self._tokenizer is not None
        if rendered.is_split:
            return array("i", self._tokenizer.encode_split(rendered.pieces, add_special=add_special))
        ids = array("i")
        for part in self._tokenizer.encode_parts(rendered.text, add_special=add_special):
            ids.extend(part)
        return ids

    def _encode_inputs(self, job: EncodeInputs) -> bytes:
        assert self._tokenizer is not None
        found = encode_inputs(self._tokenizer, job, SHRINK * self._longest)
        return _encode([(array("i", ids).tobytes(), second) for ids, second in found])

    def _tokenize(self, job: Tokenize) -> bytes:
        assert self._tokenizer is not None
        return tokenize_body(self._tokenizer, self._ids(job.rendered, job.add_special), job.form, job.max_model_len)


def _fit(ids: Sequence[int], call: AnyCall, room: int) -> array[int]:
    if len(ids) > room and not isinstance(call, DetokenizeCall):
        field = "prompt" if isinstance(call, Call) else "input"
        if isinstance(call, TokenizeCall) or call.truncate_to is None:
            raise ContextTooLong(f"This model's context is {room} tokens, but {field} has {len(ids)}.", param=field)
        keeps_head = call.truncate_right if isinstance(call, Call) else not call.keep_end
        ids = ids[:room] if keeps_head else ids[-room:]
    return array("i", ids)


def unpack(endpoint: str, result: bytes) -> tuple[Any, list[str], list[Any], Rendered | None]:
    """Of a Read: (the call without its texts and token ids, names of unknown fields, the texts and ids as int32, the
    rendered conversation if it is one)."""
    call_type: Any = ENDPOINTS[endpoint][1]
    return msgspec.msgpack.decode(result, type=tuple[call_type, list[str], list[Any], Rendered | None])


def unpack_rendered(result: bytes) -> Rendered:
    return _RENDERED.decode(result)


def unpack_inputs(result: bytes) -> list[tuple[bytes, int]]:
    return _INPUTS.decode(result)


def unpack_ids(ids: bytes) -> tuple[int, ...]:
    return tuple(array("i", ids))


def _last_of(conversation: Conversation) -> Conversation:
    """What is needed of a conversation once it is rendered: the message that the answer goes on with, if it does."""
    proceeds = conversation.continue_final_message
    return Conversation(messages=conversation.messages[-1:] if proceeds else (), continue_final_message=proceeds)


def render_job(conversation: Conversation) -> Render:
    return Render(
        conversation.messages,
        conversation.add_generation_prompt,
        conversation.continue_final_message,
        conversation.tools,
        conversation.extra,
        conversation.template,
    )


def check_template(chat: ChatTemplate | None, conversation: Conversation) -> None:
    """Raises InvalidRequest where there is nothing to render with."""
    if chat is None and conversation.template is None:
        raise InvalidRequest(
            "This model has no chat template; use /v1/completions, or serve it with --chat-template FILE.",
            param="messages",
        )


def encode_inputs(tokenizer: Tokenizer, job: EncodeInputs, chars_per_token: int) -> list[tuple[list[int], int]]:
    """What cannot possibly fit is refused unread, or cut. `chars_per_token`: at most; 0: not known."""
    texts, seconds, truncate_to = job.texts, job.seconds, job.truncate_to
    room = job.limit if truncate_to is None or truncate_to < 0 else min(truncate_to, job.limit)
    most = room * chars_per_token
    if most and truncate_to is None:
        for text in (*texts, *seconds):
            if len(text) > most:
                raise ContextTooLong(
                    f"The input has {len(text)} characters, far more than the {job.limit} tokens of this model's "
                    "context.",
                    param="input",
                )
    elif most:
        kept = slice(-most, None) if job.keep_end else slice(most)
        texts, seconds = (tuple(text[kept] for text in given) for given in (texts, seconds))
    return tokenizer.encode_inputs(
        texts, seconds, max_tokens=None if truncate_to is None else room, keep_end=job.keep_end
    )
