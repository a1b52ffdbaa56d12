"""/admin/kv/...: what the KV store has, and what operators have it keep, forget and bring nearer before it is needed.

KV is named by what it was computed from: the body of a request, as it would be sent, or token ids.

    {"messages": [...]}            a conversation; of a lone system message the part that all begin with
    {"prompt": "..."}              a text, or token ids
    "cache_salt", "model"          as in a request

The keys are those that requests get, by the same way: the tenant of the caller, or the one that an operator names.
POST /admin/kv/prefetch takes besides

    "to": "host" (default)         into host memory of the machine's KV store; not waited for
          "pool"                   into an engine's own pool; the answer says how much of it is there
    "worker"                       which engine; without: the one to which it is least work
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...api.fields import Fields, parse_object
from ...api.json_encoder import encode_json
from ...api.json_reply import JSONReply
from ...api.sandbox import Caller, caller_of
from ...cluster.keys import keys_of
from ...control.kv_store import FOR_EVER, AskStore, stored_prefix
from ...control.tenants.access import Access
from ...control.workers.roster import READY
from ...core.block import KEY_BYTES, split_keys
from ...core.errors import InvalidRequest, NotFound
from ...core.tenant import Tenant
from ...core.tiers import TIERS
from ..callers import require_local_admin, require_operator
from ..client import EngineClient
from ..generation import Generation


@dataclass(frozen=True, slots=True)
class WantedKV:
    """keys: of the full blocks, joined; owner: the salt that they are kept under."""

    tokens: tuple[int, ...]
    keys: bytes
    owner: str

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES


async def read_wanted(generation: Generation, body: dict[str, Any], caller: Caller) -> WantedKV:
    """Raises InvalidRequest naming the field, and Unavailable while no engine serves."""
    ready = generation.client.require_ready()
    is_chat = body.get("messages") is not None
    if is_chat == (body.get("prompt") is not None):
        raise InvalidRequest("Give either messages or prompt.", param="prompt")
    if is_chat and "add_generation_prompt" not in body and _is_begun(body["messages"]):
        body = {**body, "add_generation_prompt": False}
    call, rendered = await generation.read(
        "chat" if is_chat else "completion", encode_json({**body, "max_tokens": 1}), caller
    )
    if len(call.prompts) > 1:
        raise InvalidRequest("Give one prompt at a time.", param="prompt")
    adapter = generation.check_model({"model": call.model})
    (encoded,) = await generation.encoder.encode_call(call, generation.max_model_len, rendered=rendered, caller=caller)
    owner = caller.tenant.salt_with(call.cache_salt)
    digest = "" if adapter is None else adapter.digest
    tokens = tuple(encoded.tokens)
    return WantedKV(tokens, keys_of(tokens, ready, digest, owner), owner)


async def pin_always(generation: Generation, ask: AskStore, body: dict[str, Any]) -> None:
    """What requests without a tenant have of this prompt is kept, once it comes. Raises InvalidRequest."""
    wanted = await read_wanted(generation, body, Caller())
    keys = [key.hex() for key in split_keys(wanted.keys)]
    await ask("pin", {"keys": keys, "seconds": FOR_EVER, "owner": wanted.owner})


def _is_begun(messages: Any) -> bool:
    """Whether nobody has said anything yet: what follows is not known."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(each, dict) and each.get("role") in ("system", "developer") for each in messages)
    )


HOST, POOL = PLACES = ("host", "pool")
_NO_STORE = "No engine here has a KV store with tiers: start it with --kv-host, --kv-disk, --kv-remote or --kv-store."

ReadWanted = Callable[..., Awaitable[tuple[WantedKV, Fields]]]


class PrefetchView:
    """read: the KV that a body names, and its fields besides."""

    def __init__(self, client: EngineClient, read: ReadWanted) -> None:
        self._client = client
        self._read = read

    async def prefetch(self, request: HttpRequest) -> Response:
        require_local_admin(request)
        wanted, fields = await self._read(request, "to", "worker")
        to, name = fields.text("to") or HOST, fields.text("worker")
        if to not in PLACES:
            raise InvalidRequest(f"to must be host or pool, got {to[:100]!r}.", param="to")
        hints = self._client.kv_hints
        link = hints.find(wanted.keys) if name is None else self._link(name)
        if link is None or not hints.has_store(link):
            raise NotFound(_NO_STORE)
        reply: dict[str, Any] = {
            "object": "kv.prefetch",
            "num_tokens": len(wanted.tokens),
            "num_blocks": wanted.num_blocks,
            "worker": self._name(link),
            "to": to,
        }
        if to == POOL:
            said = await hints.prefetch(link, wanted.keys)
            reply |= {"num_cached": said.num_blocks, "error": said.error or None}
        elif wanted.keys:
            hints.promote(link, wanted.keys)
        return JSONReply(reply, status_code=200 if to == POOL else 202)

    def _link(self, name: str) -> int:
        worker = self._client.roster.find(name)
        if worker is None:
            raise NotFound(f"There is no worker {name[:100]!r}.", param="worker")
        if worker.state != READY or worker.link is None:
            raise InvalidRequest(f"Worker {name} is {worker.state}; it must be ready.", param="worker")
        return worker.link

    def _name(self, link: int) -> str:
        engine = self._client.gateway.link(link)
        return "" if engine is None else engine.ready.worker.id


_MAX_SECONDS = 10.0**9
_MAX_LISTED = 10_000


def routes(generation: Generation, access: Access, ask: AskStore | None) -> list[Route]:
    """ask: None: this server has no KV store with tiers."""
    views = _Views(generation, access, ask)
    return [
        Route("/admin/kv/tiers", views.tiers, methods=["GET"]),
        Route("/admin/kv/blocks", views.blocks, methods=["GET"]),
        *(
            Route(f"/admin/kv/{name}", handle, methods=["POST"])
            for name, handle in (
                ("find", views.find),
                ("pin", views.pin),
                ("unpin", views.unpin),
                ("drop", views.drop),
                ("quota", views.quota),
                ("clear", views.clear),
                ("prefetch", PrefetchView(generation.client, views.wanted).prefetch),
                ("fence", views.fence),
            )
        ),
    ]


class _Views:
    def __init__(self, generation: Generation, access: Access, ask: AskStore | None) -> None:
        self._generation = generation
        self._access = access
        self._ask = ask

    # ---- what there is ----

    async def tiers(self, request: HttpRequest) -> Response:
        require_operator(request)
        return JSONReply({"object": "kv.tiers", **await self._asked("stat", {})})

    async def blocks(self, request: HttpRequest) -> Response:
        """?prefix=hex&tier=&limit="""
        require_operator(request)
        query = request.query_params
        limit = query.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= _MAX_LISTED):
            raise InvalidRequest(f"limit must be from 1 to {_MAX_LISTED}, got {limit[:100]!r}.", param="limit")
        wanted = {name: query[name] for name in ("prefix", "tier") if name in query}
        return JSONReply({"object": "list", **await self._asked("list", {**wanted, "limit": int(limit)})})

    async def find(self, request: HttpRequest) -> Response:
        """How much of a prompt is stored, and where."""
        require_operator(request)
        wanted, _ = await self.wanted(request)
        return JSONReply(await self._found(wanted))

    # ---- what is kept ----

    async def pin(self, request: HttpRequest) -> Response:
        """A prompt, and for how many "seconds" (without: for ever)."""
        require_local_admin(request)
        wanted, fields = await self.wanted(request, "seconds")
        seconds = fields.number("seconds")
        if seconds is not None and not 0 < seconds <= _MAX_SECONDS:
            raise InvalidRequest(f"seconds must be above 0 and at most {_MAX_SECONDS:g}.", param="seconds")
        return await self._pin(wanted, FOR_EVER if seconds is None else seconds)

    async def unpin(self, request: HttpRequest) -> Response:
        require_local_admin(request)
        wanted, _ = await self.wanted(request)
        return await self._pin(wanted, 0.0)

    async def drop(self, request: HttpRequest) -> Response:
        require_local_admin(request)
        wanted, _ = await self.wanted(request)
        await self._asked("drop", {"keys": _keys(wanted)})
        return JSONReply({"object": "kv.dropped", "num_tokens": len(wanted.tokens), "num_blocks": wanted.num_blocks})

    async def quota(self, request: HttpRequest) -> Response:
        """{"tenant" or "owner", "bytes"}; null: no bound. Without either: of each that has none of its own."""
        require_local_admin(request)
        fields = await self._fields(request)
        owner, most = self._owner(fields), fields.integer("bytes", 0, 1 << 62)
        fields.refuse_unread()
        return JSONReply(await self._asked("quota", {"owner": owner or "", "bytes": most}) or {})

    async def clear(self, request: HttpRequest) -> Response:
        """{"tier", "tenant" or "owner"}: forget all of it, or all."""
        require_local_admin(request)
        fields = await self._fields(request)
        tier, owner = fields.text("tier"), self._owner(fields)
        fields.refuse_unread()
        if tier is not None and tier not in TIERS:
            raise InvalidRequest(f"tier must be one of {', '.join(TIERS)}.", param="tier")
        given = {"tier": tier, "owner": owner}
        cleared = await self._asked("clear", {name: value for name, value in given.items() if value is not None})
        return JSONReply({"object": "kv.cleared", **(cleared or {})})

    async def fence(self, request: HttpRequest) -> Response:
        """Whatever else writes to the remote store does so no more."""
        require_local_admin(request)
        return JSONReply({"object": "kv.fenced", **await self._asked("fence", {})})

    async def _pin(self, wanted: WantedKV, seconds: float) -> Response:
        await self._asked("pin", {"keys": _keys(wanted), "seconds": seconds, "owner": wanted.owner})
        return JSONReply({**await self._found(wanted), "pinned_s": None if seconds < 0 else seconds})

    async def _found(self, wanted: WantedKV) -> dict[str, Any]:
        digits = (await self._asked("find", {"keys": _keys(wanted)}))["digits"]
        found = stored_prefix(digits, TIERS, wanted.num_blocks)
        return {
            "object": "kv.prefix",
            "num_tokens": len(wanted.tokens),
            "num_blocks": found.num_blocks,
            "num_stored": found.num_stored,
            "tiers": dict(found.by_tier),
            "keys": _keys(wanted),
        }

    # ---- reading ----

    async def _asked(self, what: str, argument: dict[str, Any]) -> Any:
        if self._ask is None:
            raise NotFound(
                "This server has no KV store with tiers: start it with --kv-host, --kv-disk, --kv-remote or --kv-store."
            )
        return await self._ask(what, argument)

    async def wanted(self, request: HttpRequest, *own: str) -> tuple[WantedKV, Fields]:
        """The KV that the body names, and its fields besides (`own` and tenant)."""
        async with self._generation.limits.body(request) as data:
            body = parse_object(data or b"{}")
            own_body = {name: body.pop(name) for name in (*own, "tenant") if name in body}
            fields = Fields(own_body)
            caller = caller_of(request)
            if (name := fields.text("tenant")) is not None:
                caller = Caller(caller.name, request, self._tenant(name), caller.key)
            return await read_wanted(self._generation, body, caller), fields

    async def _fields(self, request: HttpRequest) -> Fields:
        async with self._generation.limits.body(request) as data:
            return Fields(parse_object(data or b"{}"))

    def _owner(self, fields: Fields) -> str | None:
        tenant, owner = fields.text("tenant"), fields.text("owner")
        if tenant is not None and owner is not None:
            raise InvalidRequest("Give tenant or owner, not both.", param="owner")
        return owner if tenant is None else self._tenant(tenant).salt_with("")

    def _tenant(self, name: str) -> Tenant:
        tenant = self._access.tenant_of(name)
        if tenant is None:
            raise NotFound(f"There is no tenant {name[:100]!r}.", param="tenant")
        return tenant


def _keys(wanted: WantedKV) -> list[str]:
    return [key.hex() for key in split_keys(wanted.keys)]
