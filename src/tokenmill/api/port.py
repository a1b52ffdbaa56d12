"""What an API asks of the server that it is a part of: the interface that `server` implements.

A route reads its body, has the server submit the call (`begin`, or `reply` where nothing comes between), and gives it
the shape in which the answer is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from ..core.errors import TokenmillError
from ..core.events import EngineStats, Ready
from ..text.special_tokens import Rendered
from ..text.text_model import ModelInfo, TextModel
from .answer import Answer, Shape
from .call import Call
from .encoder import Encoder
from .pooling import Embedded, Scored
from .sandbox import Caller, Sandbox


class Limits(Protocol):
    def refuse_when_draining(self) -> None: ...

    def body(self, request: HttpRequest) -> AbstractAsyncContextManager[bytes]:
        """The whole body, which counts as held until the block ends. Raises BodyTooLarge and Overloaded."""
        ...

    def held(self, num_bytes: int) -> AbstractContextManager[None]:
        """What counts as held beside bodies. Raises Overloaded when all together are too much."""
        ...


class Adapter(Protocol):
    """A LoRA adapter that is loaded. digest: of its content."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...


class Adapters(Protocol):
    def __iter__(self) -> Iterator[Adapter]: ...

    def get(self, name: str) -> Adapter | None: ...


class Engines(Protocol):
    """ready: their facts; None: there is none now. stats: of all together."""

    @property
    def ready(self) -> Ready | None: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def adapters(self) -> Adapters: ...

    def require_ready(self) -> Ready:
        """Raises Unavailable."""
        ...


class Running(Protocol):
    """A call that is submitted. Always `close` it, or send its reply, which does."""

    @property
    def answer(self) -> Answer: ...

    def reply(self, shape: Shape) -> ASGIApp:
        """The application that sends the answer, as a stream where the call wants one."""
        ...

    def cancel(self, error: TokenmillError) -> None:
        """End it with this error. What it has given so far counts."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Beside:
    """A model beside the server's own. info: None where its files cannot be read. loaded: bytes of memory that it may
    take, and its longest sequence; None: it is not in memory. expires_s: when it is unloaded unless a call comes, in
    seconds since 1970; None: it stays."""

    name: str
    info: ModelInfo | None
    size_bytes: int
    modified_s: float
    loaded: tuple[int, int] | None
    expires_s: float | None


@dataclass(frozen=True, slots=True)
class Described:
    """What a model is like. template: of its chats, "": it has none."""

    info: ModelInfo
    max_model_len: int
    template: str
    sampling_defaults: Mapping[str, Any]
    has_reasoning: bool
    has_insert: bool
    gives_vectors: bool

    @classmethod
    def of(cls, text: TextModel, max_model_len: int, *, gives_vectors: bool) -> Described:
        template = "" if text.chat is None else text.chat.source
        has_reasoning, has_insert = bool(text.chat_format.reasoning), text.fim is not None
        return cls(text.info, max_model_len, template, text.sampling_defaults, has_reasoning, has_insert, gives_vectors)


class Listing(Protocol):
    """The models beside the server's own."""

    async def refresh(self) -> None:
        """Look for models that have come or gone."""
        ...

    def others(self) -> Iterator[Beside]: ...

    def expires_s(self, name: str) -> float | None:
        """As Beside has it; also of the server's own model."""
        ...

    async def describe(self, name: str) -> Described | None:
        """What a model is like that calls load; None: there is none of that name beside the server's own. Raises
        BadCheckpoint."""
        ...


class Server(Protocol):
    @property
    def text(self) -> TextModel: ...

    @property
    def client(self) -> Engines: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def encoder(self) -> Encoder: ...

    @property
    def sandbox(self) -> Sandbox: ...

    @property
    def model_names(self) -> Sequence[str]: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def new_id(self) -> Callable[[str], str]: ...

    def now(self) -> float: ...

    def check_model(self, body: dict[str, Any]) -> Adapter | None:
        """The adapter that a body asks for by its model's name. Raises ModelNotFound and Unavailable."""
        ...

    async def wait_ready(self, caller: Caller) -> Ready:
        """The engines' facts, as soon as there is an engine. Raises Unavailable, and ClientGone."""
        ...

    async def read(self, endpoint: str, data: bytes, caller: Caller) -> tuple[Any, Rendered | None]:
        """(the validated call, its conversation where that is rendered already). Raises InvalidRequest naming the
        field, and ModelNotFound."""
        ...

    async def reply(self, request: HttpRequest, endpoint: str, shape: Shape) -> ASGIApp:
        """What answers a call whose body is of `endpoint`, a key of ENDPOINTS."""
        ...

    async def begin(
        self,
        call: Call,
        prefix: str,
        caller: Caller,
        *,
        rendered: Rendered | None,
        arrival_s: float,
        request_id: str = "",
        media_type: str = "",
        new_name: Callable[[], str] | None = None,
    ) -> Running:
        """Encode a call and submit it to the engine. `prefix`: of the answer's id; `request_id`: the client's own name
        of the call; `media_type`: of its stream, where that may be kept to be resumed; `new_name`: gives the answer's
        id, instead of prefix and request_id."""
        ...


class Vectors(Protocol):
    """Answers calls for vectors and scores. `body` makes the answer."""

    async def embed(self, request: HttpRequest, endpoint: str, body: Embedded) -> ASGIApp: ...

    async def score(self, request: HttpRequest, endpoint: str, body: Scored) -> ASGIApp: ...
