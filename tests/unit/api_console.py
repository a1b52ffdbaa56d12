"""What the console's endpoints mean, in a line each, for docs/api.md."""

from __future__ import annotations

ENDPOINTS = {
    "GET /console": "Pages for a browser: [console.md](console.md).",
    "GET /console/{path}": "Their files.",
    "GET /admin/kv": "Blocks of each engine's pools, and the largest prefixes in its cache ([console.md](console.md)). "
    "Needs a key of scope admin where keys are given out.",
    "GET /admin/reports": "Results of benchmarks in `--reports-dir`, the latest first. Needs a key of scope admin "
    "where keys are given out.",
    "GET /admin/reports/{name}": "One of them, as it was written. The same.",
}
