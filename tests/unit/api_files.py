"""What each endpoint of OpenAI's files and batches means, in a line each, for docs/api.md."""

from __future__ import annotations

ENDPOINTS = {
    "POST /v1/files": "OpenAI's: upload a file for a batch ([batches.md](batches.md)).",
    "GET /v1/files": "OpenAI's: the caller's files, in pages (`purpose`, `limit`, `order`, `after`).",
    "GET /v1/files/{file_id}": "OpenAI's: one of them.",
    "GET /v1/files/{file_id}/content": "OpenAI's: its bytes.",
    "DELETE /v1/files/{file_id}": "OpenAI's: delete it.",
    "POST /v1/batches": "OpenAI's: answer the calls in a file in the time that others leave.",
    "GET /v1/batches": "OpenAI's: the caller's batches, the latest first, in pages (`limit`, `after`).",
    "GET /v1/batches/{batch_id}": "OpenAI's: one of them, and how far it is.",
    "POST /v1/batches/{batch_id}/cancel": "OpenAI's: answer no more of its calls.",
}
BATCH = {
    "input_file_id": ("string, not empty", "a file that was uploaded for the purpose `batch`"),
    "endpoint": ("string, not empty", "the path that all its calls go to"),
    "completion_window": ("string, not empty", "`24h`"),
    "metadata": ("object", "up to 16 pairs of texts, given back"),
    "output_expires_after": ("object", "how long its answers are kept: `anchor` (`created_at`) and `seconds`"),
}
"""Fields of a batch: kind and meaning."""
