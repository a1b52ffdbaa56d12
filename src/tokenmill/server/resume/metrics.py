"""The book of an application, and series about it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...control.tenants.access import Access
from ..client import EngineClient
from ..config import ServerConfig
from ..limits import Limits
from .book import Book
from .store import ADAPTER, ResumeStore

_LABELS = ("model_name", "engine")


def book_of(store: ResumeStore, config: ServerConfig, access: Access, client: EngineClient, limits: Limits) -> Book:
    """A book that hears of what `client` does."""
    assert client.observers.metrics is not None
    book = Book(store, config.resume_grace_s, access.tenant_of, lambda: limits.draining, config.mask)
    book.client = client
    client.adapters.take_up(store.loaded(ADAPTER), config.lora_dir)
    client.adapters.keep = partial(store.keep_loaded, ADAPTER)
    client.observers.added.append(book)
    client.observers.metrics.registry.register(ResumeMetrics(config.model_names[0], book))
    return book


class ResumeMetrics:
    """A collector of a registry."""

    def __init__(self, model_name: str, book: Book) -> None:
        self._values = (model_name, "0")
        self._book = book

    def collect(self) -> Iterator[Metric]:
        kept = GaugeMetricFamily("tokenmill:streams_kept", "Streams under way that are kept", labels=_LABELS)
        kept.add_metric(self._values, self._book.num_open)
        yield kept
        for name, text, number in (
            ("streams_resumed", "Streams of an earlier process that were resumed", self._book.num_resumed),
            ("stream_reconnects", "Connections that came back to a stream", self._book.num_reconnects),
        ):
            family = CounterMetricFamily(f"tokenmill:{name}", text, labels=_LABELS)
            family.add_metric(self._values, number)
            yield family
