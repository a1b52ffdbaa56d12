"""The operator's view of models and canaries, and how they are changed while the server runs."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...api.fields import Fields
from ...api.json_reply import JSONReply
from ...api.sandbox import caller_of, parse_small
from ...cluster.canary import Rules, Version
from ...control.models.canaries import Canaries
from ...control.models.on_demand import OnDemand
from ...control.models.registry import ModelRegistry
from ...core.errors import BadCheckpoint, ConfigError, FetchError, InvalidRequest, ModelNotFound, NotFound
from ...core.slo import Targets
from ..callers import require_local_admin, require_operator
from ..limits import Limits

DRAIN_S = 30.0
"""For which calls of a model that is unloaded may go on."""

_MAX_MS = 3_600_000


def routes(models: ModelRegistry, canaries: Canaries, limits: Limits) -> list[Route]:
    service = _Admin(models, canaries, limits)
    return [
        Route("/admin/models", service.models, methods=["GET"]),
        Route("/admin/models", service.load_model, methods=["POST"]),
        Route("/admin/models/{name:path}", service.unload_model, methods=["DELETE"]),
        Route("/models/load", service.load_listed, methods=["POST"]),
        Route("/models/unload", service.unload_listed, methods=["POST"]),
        Route("/admin/canaries", service.canaries, methods=["GET"]),
        Route("/admin/canaries", service.put_canary, methods=["POST"]),
        Route("/admin/canaries/{name:path}", service.remove_canary, methods=["DELETE"]),
    ]


class _Admin:
    def __init__(self, models: ModelRegistry, canaries: Canaries, limits: Limits) -> None:
        self._models = models
        self._canaries = canaries
        self._limits = limits

    async def models(self, request: HttpRequest) -> Response:
        require_operator(request)
        return JSONReply({"object": "list", "data": self._models.shown()})

    async def load_model(self, request: HttpRequest) -> Response:
        """Answers when the model serves."""
        require_local_admin(request)
        async with self._limits.body(request) as data:
            fields = Fields(parse_small(data))
        model, name = fields.required_text("model"), fields.text("name")
        kv_bytes = fields.integer("kv_cache_memory_bytes", 1, 2**50)
        if rest := fields.unread():
            raise InvalidRequest(f"{rest[0][:100]} is not known here.", param=rest[0][:100])
        if self._models.host is None:
            raise InvalidRequest("This server loads no models.")
        name = name or model
        self._models.check_new(name)
        try:
            await self._models.host.load(name, model, kv_bytes)
        except (ConfigError, BadCheckpoint, FetchError) as error:
            raise InvalidRequest(f"{model[:200]} cannot be loaded: {error.message}", param="model") from None
        await self._models.keep(name, {"model": model, "kv_cache_memory_bytes": kv_bytes})
        request.state.audited = {"object": f"/admin/models/{name}", "model": model}
        return JSONReply(next(each for each in self._models.shown() if each["name"] == name), status_code=201)

    async def unload_model(self, request: HttpRequest) -> Response:
        require_local_admin(request)
        name = request.path_params["name"]
        num_ended = await self._models.unload(name, DRAIN_S)
        return JSONReply({"object": "model.deleted", "id": name, "deleted": True, "calls_ended": num_ended})

    async def load_listed(self, request: HttpRequest) -> Response:
        """llama-server's: {"model"}, one of --models-dir. Answers when it is loaded, also where it was."""
        on_demand, name = await self._listed(request)
        try:
            await caller_of(request).stay(on_demand.enter(name, is_asked=True))
        except (ConfigError, BadCheckpoint) as error:
            raise InvalidRequest(f"{name} cannot be loaded: {error.message}", param="model") from None
        on_demand.leave(name, None)
        return JSONReply({"success": True})

    async def unload_listed(self, request: HttpRequest) -> Response:
        """llama-server's: {"model"}, one of --models-dir. Answers when it is unloaded; the next call that names it has
        it loaded again."""
        on_demand, name = await self._listed(request)
        await on_demand.unload(name, DRAIN_S)
        return JSONReply({"success": True})

    async def _listed(self, request: HttpRequest) -> tuple[OnDemand, str]:
        """The model that a body names. Raises NotFound."""
        require_local_admin(request)
        async with self._limits.body(request) as data:
            fields = Fields(parse_small(data))
        name, on_demand = fields.required_text("model"), self._models.on_demand
        if on_demand is None:
            raise InvalidRequest("This server loads no models on demand; start it with --models-dir DIR.")
        await on_demand.refresh()
        found = on_demand.find(name)
        if found is None:
            known = ", ".join(on_demand.schedule.models)
            raise ModelNotFound(f"There is no model {name[:200]!r} in --models-dir; it has: {known}.", param="model")
        request.state.audited = {"object": f"/models/{found}"}
        return on_demand, found

    async def canaries(self, request: HttpRequest) -> Response:
        require_operator(request)
        return JSONReply({"object": "list", "data": [canary.shown() for canary in self._canaries.all]})

    async def put_canary(self, request: HttpRequest) -> Response:
        require_local_admin(request)
        async with self._limits.body(request) as data:
            fields = Fields(parse_small(data))
        name = fields.required_text("name")
        versions = [_version(each) for each in fields.array("versions") or []]
        seed = fields.integer("seed", 0, 2**31 - 1) or 0
        targets = Targets(_seconds(fields, "ttft_ms"), _seconds(fields, "tpot_ms"))
        tolerance, alpha = fields.number("tolerance"), fields.number("alpha")
        usual = Rules()
        if tolerance is not None and not 0 <= tolerance <= 10:
            raise InvalidRequest("tolerance must be 0 to 10, a share of the stable version's times.", param="tolerance")
        if alpha is not None and not 0 < alpha <= 0.5:
            raise InvalidRequest("alpha must be above 0, to 0.5.", param="alpha")
        rules = Rules(
            alpha=usual.alpha if alpha is None else alpha,
            tolerance=usual.tolerance if tolerance is None else tolerance,
            min_samples=fields.integer("min_samples", 1, usual.window) or usual.min_samples,
        )
        if rest := fields.unread():
            raise InvalidRequest(f"{rest[0][:100]} is not known here.", param=rest[0][:100])
        canary = self._canaries.put(name, versions, seed=seed, targets=targets, rules=rules)
        request.state.audited = {"object": f"/admin/canaries/{name}", "versions": [list(each) for each in versions]}
        return JSONReply(canary.shown(), status_code=201)

    async def remove_canary(self, request: HttpRequest) -> Response:
        require_local_admin(request)
        name = request.path_params["name"]
        if self._canaries.remove(name) is None:
            raise NotFound(f"There is no canary {name[:100]!r}.", param="name")
        return JSONReply({"object": "canary.deleted", "id": name, "deleted": True})


def _version(given: Any) -> Version:
    if not isinstance(given, dict):
        raise InvalidRequest('versions must be objects with "model" and "weight".', param="versions")
    fields = Fields(given, "versions")
    weight = fields.number("weight")
    if weight is None:
        raise InvalidRequest("versions.weight must be a number.", param="versions.weight")
    version = Version(fields.required_text("model"), weight)
    if rest := fields.unread():
        raise InvalidRequest(f"{rest[0][:100]} is not known here.", param=rest[0][:100])
    return version


def _seconds(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if value is None:
        return 0.0
    if not 0 < value <= _MAX_MS:
        raise InvalidRequest(f"{name} must be above 0, to {_MAX_MS} milliseconds.", param=name)
    return value / 1000
