"""Which path of Ollama's API leads where."""

from __future__ import annotations

from starlette.routing import Route

from ..generation import Generation
from .catalog import Catalog


def routes(generation: Generation) -> list[Route]:
    catalog = Catalog(generation)
    return [
        Route("/", catalog.live),
        Route("/api/version", catalog.version),
        Route("/api/tags", catalog.tags),
        Route("/api/ps", catalog.ps),
        Route("/api/show", catalog.show, methods=["POST"]),
        Route("/api/pull", catalog.pull, methods=["POST"]),
        Route("/api/push", catalog.refuse, methods=["POST"]),
        Route("/api/create", catalog.refuse, methods=["POST"]),
        Route("/api/copy", catalog.refuse, methods=["POST"]),
        Route("/api/delete", catalog.refuse, methods=["DELETE", "POST"]),
        Route("/api/blobs/{digest}", catalog.refuse, methods=["GET", "POST"]),
    ]
