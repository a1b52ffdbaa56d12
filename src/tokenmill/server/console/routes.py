"""Which path of the console leads where."""

from __future__ import annotations

from starlette.routing import Route

from ...control.kv_store import AskStore
from ..generation import Generation
from .kv import KVView
from .pages import Pages
from .reports import Reports


def routes(generation: Generation, ask_kv: AskStore | None = None) -> list[Route]:
    pages, reports = Pages(), Reports(generation.config.reports_dir)
    kv = KVView(generation.client.cache_views, ask_kv)
    return [
        Route("/console", pages.enter),
        Route("/console/{path:path}", pages.file),
        Route("/admin/kv", kv.show),
        Route("/admin/reports", reports.reports),
        Route("/admin/reports/{name}", reports.report),
    ]
