"""Commands and environment variables of vLLM, llama-server and Ollama: what to type here instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

COMMANDS: Mapping[str, str] = {
    "run": "talk with a model by `tokenmill chat MODEL`, or serve it by `tokenmill serve MODEL`",
    "ps": "a server has one model: GET /v1/models names it, /metrics has the figures",
    "show": "type `tokenmill inspect MODEL`",
    "stop": "a server ends with Ctrl-C or SIGTERM",
    "create": "serve a .gguf file or a folder by its path; requests bring system messages and settings",
    "push": "models are not uploaded",
    "cp": "give a served model the name you want by --served-model-name",
    "launch": "start the server by `tokenmill serve MODEL`",
    "complete": "type `tokenmill generate MODEL -p TEXT`",
    "collect-env": "type `tokenmill doctor`",
    "run-batch": "upload the file to /v1/files of `tokenmill serve`, and post it to /v1/batches (docs/use/batches.md)",
}

ENVIRONMENT: Mapping[str, str] = {
    "OLLAMA_HOST": "--host and --port",
    "OLLAMA_MODELS": "TOKENMILL_CACHE in the environment",
    "OLLAMA_CONTEXT_LENGTH": "--max-model-len {}",
    "OLLAMA_NUM_PARALLEL": "--max-num-seqs {}",
    "OLLAMA_KV_CACHE_TYPE": "--kv-cache-dtype {}",
    "OLLAMA_ORIGINS": "--cors-origins, once for each",
    "OLLAMA_DEBUG": "--log-level debug",
    "LLAMA_ARG_MODEL": "--model {}",
    "LLAMA_ARG_HF_REPO": "--model {}",
    "LLAMA_ARG_CTX_SIZE": "--ctx-size {}",
    "LLAMA_ARG_N_PARALLEL": "--parallel {}",
    "LLAMA_ARG_THREADS": "--threads {}",
    "LLAMA_ARG_PORT": "--port {}",
    "LLAMA_ARG_HOST": "--host {}",
    "LLAMA_ARG_ALIAS": "--served-model-name {}",
    "LLAMA_ARG_EMBEDDINGS": "--runner pooling",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes {}GiB",
    "VLLM_CPU_OMP_THREADS_BIND": "--threads",
    "VLLM_LOGGING_LEVEL": "--log-level",
}
"""Variables of other servers that are not read here, and what to give instead ({}: the same value)."""


def environment_notes(environ: Mapping[str, str], argv: Sequence[str]) -> Iterator[str]:
    """A sentence for each variable that another server would have read, unless what to give instead is given."""
    for name, instead in ENVIRONMENT.items():
        value = environ.get(name)
        if value and not any(word.split("=")[0] == instead.split(" ")[0] for word in argv):
            yield f"{name} is not read from the environment: give {instead.format(value)}."
