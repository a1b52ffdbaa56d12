"""What each endpoint, error and field means, in a line each, for docs/api.md. `make_api_doc` adds what the code says of
them: kinds, ranges, what is refused and what has no effect."""

from __future__ import annotations

import api_admin
import api_console
import api_constraints
import api_files
import api_ids
import api_kv
import api_messages
import api_ollama
import api_responses

from tokenmill.core.sampling import SETTINGS
from tokenmill.server.messages.parse import PASSED

ENDPOINTS = {
    "POST /v1/chat/completions": "OpenAI's chat: messages in, one or more answers out, whole or as server-sent events. "
    "Also `/chat/completions`.",
    "POST /v1/completions": "OpenAI's text completion: prompts as text or token ids, also scored (`echo`).",
    **api_responses.ENDPOINTS,
    "POST /v1/embeddings": "OpenAI's: a vector for each input. Where a model gives vectors.",
    "POST /v1/score": "vLLM's: how well pairs of texts go together. Also `/score`.",
    "POST /v1/rerank": "Jina's and Cohere's: documents in the order of their fit to a query. Also "
    "`/v2/rerank`, `/rerank`, `/v1/reranking`, `/reranking`.",
    "GET /v1/models": "The model's names, and the adapters that are loaded. Also `/models`.",
    "GET /v1/models/{name}": "One of them; 404 where there is none.",
    "POST /v1/load_lora_adapter": "vLLM's: load an adapter from a folder under `--lora-dir`.",
    "POST /v1/unload_lora_adapter": "vLLM's: forget one. Requests that use it run to their end.",
    "POST /tokenize": "vLLM's: the tokens of a text, or of a conversation.",
    "POST /detokenize": "vLLM's: the text of tokens.",
    "GET /health": "200 while an engine is ready and makes steps, else 503. Also `/v1/health`, and `/ping` by GET and "
    "POST.",
    "GET /load": "vLLM's: how many requests are open.",
    "GET /metrics": "Prometheus text, or OpenMetrics where the caller asks for it: [metrics.md](metrics.md).",
    "GET /admin/slo": "Profiles as this machine can hold them, and whose traffic resembles which: [slo.md](slo.md).",
    "GET /admin/load": "What the server does and how it did in the last minute: [operations.md](operations.md).",
    "GET /admin/workers": "The workers, and what each does: [workers.md](workers.md#who-works).",
    "POST /admin/workers/{worker}/drain": "Give it no more, and end it when it has finished what it has; "
    "`?restart=true`: another follows. From this machine, or with a key of scope admin.",
    "POST /admin/workers/{worker}/pool": "Put it into another `pool`. From this machine, or with a key of scope admin.",
    "GET /admin/requests": "Requests that are open and the last that ended: [operations.md](operations.md).",
    "GET /admin/requests/{id}": "One request and its timeline, by its id or its call's.",
    "GET /v1/usage": "What the caller's tenant has used, in OpenAI's form: [usage.md](usage.md).",
    "GET /admin/usage": "What all tenants have used.",
    "GET /admin/flight": "An engine's last steps as a trace for ui.perfetto.dev: [operations.md](operations.md).",
    "GET /admin/audit": "Where the head of the audit log is: [security.md](security.md#audit-log).",
    "GET /openapi.json": "This API as an OpenAPI 3.1 document. Needs no key.",
    "GET /docs": "The same as a page for people.",
    "GET /.well-known/jwks.json": "The public key of signed answers: [security.md](security.md#signed-answers).",
    "GET /version": "The version of this server.",
} | api_ollama.ENDPOINTS
ENDPOINTS |= api_admin.ENDPOINTS | api_console.ENDPOINTS | api_messages.ENDPOINTS | api_files.ENDPOINTS
ENDPOINTS |= api_kv.ENDPOINTS
ENDPOINTS |= api_ids.ENDPOINTS
ALIASES = {
    "POST /score": "POST /v1/score",
    "POST /v2/rerank": "POST /v1/rerank",
    "POST /rerank": "POST /v1/rerank",
    "POST /v1/reranking": "POST /v1/rerank",
    "POST /reranking": "POST /v1/rerank",
    "POST /chat/completions": "POST /v1/chat/completions",
    "GET /models": "GET /v1/models",
    "GET /ping": "GET /health",
    "POST /ping": "GET /health",
} | api_ollama.ALIASES
NOT_HERE = {
    "/v1/audio/, /v1/images/, /v1/moderations, /v1/realtime": "OpenAI's: text and vectors alone are served",
    "/v1/messages/batches": "Anthropic's batches: use /v1/batches, or send the calls, as many as you like",
    "/pooling, /classify": "vLLM's: use /v1/embeddings and /v1/score",
}

ERRORS = {
    "InvalidRequest": "A field is missing, of the wrong kind, out of range or not supported (`param` names it), or the "
    "body is not a JSON object.",
    "ContextTooLong": "The prompt, or the prompt and `max_tokens`, are more than the context.",
    "KeyReused": "The `Idempotency-Key` has been used for another call: [idempotency.md](idempotency.md).",
    "AuthenticationFailed": "No valid key; with `WWW-Authenticate: Bearer`.",
    "Forbidden": "A web page that may not call, or a Host that is not this server's: [http.md](http.md#web-pages).",
    "ModelNotFound": "No model or adapter has this name.",
    "NotFound": "Nothing is kept under this id, or not any more, or it is another key's.",
    "PreviousResponseNotFound": "The same of `previous_response_id`, or of a response that it goes on from.",
    "RequestTimeout": "The request took longer than it may, and has no token yet: [overload.md](overload.md).",
    "BodyTooLarge": "Of more than `--max-body-bytes`.",
    "UnsupportedEncoding": "A `Content-Encoding` other than gzip and deflate.",
    "RateLimited": "The caller has used up what its tenant may, with `Retry-After` and `x-ratelimit-*` "
    "([tenants](tenants.md)).",
    "Overloaded": "The wait would be longer than `--max-queue-s`, a target would be missed, or too much is "
    "open or held: [overload.md](overload.md). `Retry-After` says when there will be room.",
    "EngineFailed": "A step failed, or a bug, with its traceback in the log; or engines died of the request again and "
    "again.",
    "UpstreamFailed": "A server that answers for the model ([many-models.md](many-models.md)) gave no whole answer.",
    "Unavailable": "The engine starts, has died or stalls, or the server drains. While the engine is restarted "
    "`Retry-After` says when it will be back.",
}
"""Expected failures, by the name of their class."""
HTTP_ERRORS = {
    400: "Not HTTP/1.1 or 1.0, no Host, or a target that is no path.",
    404: "No such path.",
    405: "The path has no such method, or the request is one to a proxy.",
    408: "Head or body did not arrive in time.",
    414: "A target of more than 16 KiB.",
    431: "Headers of more than 64 KiB or 100 lines.",
    503: "Too many connections, or heads that hold too much; with `Retry-After: 1`.",
    505: "Another version of HTTP.",
}
"""Of what speaks HTTP, all of one shape."""

SAMPLING = {
    "n": "answers to each prompt",
    "best_of": "`n`; with `use_beam_search` the beams that are kept, of which the best `n` are told",
    "beam_width": "the same, only with `use_beam_search`",
    "use_beam_search": "look for the likeliest answers instead of drawing ([sampling.md](sampling.md#beam-search)); "
    "not while streaming, nor with penalties, biases, `stop`, `prompt_logprobs`, `echo` or constraints",
    "length_penalty": "of a beam search: above 0 favours long answers (default: 1)",
    "early_stopping": "of a beam search: true, false or `never`",
    **{name: declared.meaning for name, declared in SETTINGS.items()},
    "repeat_last_n": "-1; others only where no penalty is set: penalties cover the whole sequence",
    "seed": "same seed, same answer; without one, each prompt draws its own",
    "min_tokens": "nothing ends the answer before so many",
    "ignore_eos": "the model's end token ends nothing",
    "stop": "up to 16 texts that end the answer, of up to 1,024 characters each",
    "stop_token_ids": "token ids that end the answer, up to 1,024",
    "include_stop_str_in_output": "the text or token that ended it is part of the answer",
    "bad_words": "texts that are never written, up to 512 of 4,096 characters together",
    "allowed_token_ids": "nothing but these is drawn; at least one",
    "logit_bias": "token id to a bias of -100 to 100, for up to 1,024 tokens",
    "skip_special_tokens": "special tokens are not shown",
    "prompt_logprobs": "log probabilities of the prompt's tokens, with so many alternatives; not while streaming",
}
ANSWER = {
    "model": "the model or an adapter by its name; none: the model",
    "stream": "answer by server-sent events",
    "stream_interval": "tokens of each chunk behind the first; larger chunks cost less (default: `--stream-interval`)",
    "stream_options": "only where `stream` is true",
    "stream_options.include_usage": "the last event carries the counts of tokens",
    "stream_options.continuous_usage_stats": "every event does",
    "truncate_prompt_tokens": "keep so many tokens of the prompt; -1: as many as fit; not 0 (default: a "
    "prompt that is too long is refused)",
    "truncation_side": "`left` or `right`: the end that is cut (default: `left`)",
    "priority": "lower runs earlier; at least what `--max-priority` says; with 2147483647 it has what others "
    "leave (default: 0)",
    "cache_salt": "cached prefixes are shared only with calls of the same salt; not empty",
    "priority_class": "0, 1 or 2: lower classes run first, whatever the priorities in them; not below the caller's own "
    "([tenants](tenants.md)) (default: the caller's own)",
    "service_tier": "OpenAI's: `flex` is `priority_class` 2; `auto`, `default`, `priority` and `scale` are the "
    "caller's own",
    "slo": "latency objectives ([profiles](slo.md)): the name of a profile, or an object with targets of its own. "
    "Headers of gateways are read too: `x-slo-ttft-ms`, `x-slo-tpot-ms` (default: the tenant's, or `--slo`)",
    "slo.profile": "`chat`, `code`, `rag`, `agent`, `batch`, `content` or `edge`",
    "slo.ttft_ms": "milliseconds to the first token (default: the profile's)",
    "slo.tpot_ms": "milliseconds for each further token on average (default: the profile's)",
    "kv_hints": "what becomes of the KV of prompt and answer once it has ended; needs a "
    "KV store with tiers ([more](kv-tiers.md#across-machines-and-the-router))",
    "kv_hints.keep_s": "seconds for which it is kept there; 0: it is not (default: `--kv-keep-tools-s` where the "
    "answer ends in calls of tools, else it is not)",
    "kv_transfer_params": "hand KV over from one server to another ([how](kv.md)); needs `--kv-save` or a "
    "KV store with tiers ([more](kv-tiers.md))",
    "kv_transfer_params.do_remote_decode": "answer when the KV is saved; the answer's `kv_transfer_params` are for the "
    "next call, null where saving failed; not while streaming",
    "kv_transfer_params.do_remote_prefill": "look first for KV that another server has saved",
    "request_id": "becomes part of the answer's id; 1 to 256 printable characters; also by the header X-Request-Id",
    "return_token_ids": "tokens beside text",
    "return_tokens_as_token_ids": "log probabilities name tokens `token_id:N`",
    "add_special_tokens": "whether the tokenizer adds its special tokens (default: to text, not to rendered messages)",
    **api_constraints.CONSTRAINTS,
}
CHAT = {
    "messages": "the conversation: `role` (system, developer, user, assistant, tool, function) and "
    "`content`, a string or text parts",
    "chat_template": "another Jinja template; only with `--trust-request-chat-template`",
    "chat_template_kwargs": "further variables of the template",
    "reasoning_effort": "a variable of the template; `none` also sets `enable_thinking` and `thinking` to false there",
    "include_reasoning": "false: reasoning is left out of the answer",
    "separate_reasoning": "false: reasoning stays in the content, with its marks",
    "reasoning_format": "`none`, the same; `auto`, `deepseek`",
    "thinking_token_budget": "most tokens of reasoning; -1: any number",
    "thinking_budget_tokens": "another name of it",
    "reasoning_budget": "another name of it",
    "add_generation_prompt": "the prompt ends where the assistant begins to speak (default: unless "
    "`continue_final_message` is true)",
    "continue_final_message": "the last message is left open and continued",
    "max_completion_tokens": "most tokens of the answer (default: the model's own, or the rest of the context)",
    "max_tokens": "its older name",
    "logprobs": "log probabilities of the answer's tokens",
    "top_logprobs": "with so many alternatives; needs `logprobs`",
    "tools": "functions that the model may call, each with `name`, `description`, `parameters` (a JSON schema) and "
    "`strict` ([how](tools.md))",
    "tool_choice": "`auto`, `none`, `required`, or the function that must be called (default: `auto`)",
    "parallel_tool_calls": "false: at most one call in an answer",
    "functions": "the older form of `tools`",
    "function_call": "the older form of `tool_choice`; the answer has a `function_call`",
}
COMPLETION = {
    "prompt": "a string, token ids, or an array of up to 1,024 of either",
    "max_tokens": "most tokens of the answer; 0 only with `echo`: the prompt is scored (default: the model's own, "
    "or 16)",
    "logprobs": "log probabilities of the answer's tokens, with so many alternatives; tokens that are no whole "
    "character are named `bytes:\\xNN`, the second of two with one text `token_id:N`",
    "echo": "the answer begins with the prompt",
}
POOLING = {
    "model": "the model by its name; none: the model",
    "use_activation": "false: vectors and scores as the model gives them, not scaled (default: as usual for the model)",
    "normalize": "another name of it",
    "truncate_prompt_tokens": ANSWER["truncate_prompt_tokens"],
    "truncation_side": "`left` or `right`: the end that is cut (default: `right`)",
    "priority": ANSWER["priority"],
    "cache_salt": ANSWER["cache_salt"],
    "priority_class": ANSWER["priority_class"],
    "service_tier": ANSWER["service_tier"],
    "request_id": ANSWER["request_id"],
}
EMBEDDING = {
    "input": "a string, token ids, or an array of up to 2,048 of either",
    "encoding_format": "`float` or `base64` (little-endian float32) (default: `float`)",
    "dimensions": "keep the first so many values of a vector; at most what the model gives",
    "prompt_name": "of the model's own prompts, the one to put before each input",
}
SCORE = {
    "text_1": "a text, or up to 2,048",
    "queries": "another name of it",
    "text_2": "a text, or as many as there are first ones; one first text goes with all",
    "documents": "another name of it",
}
RERANK = {
    "query": "a text",
    "documents": "up to 2,048 texts, or objects with `text`",
    "top_n": "most results (default: all)",
    "return_documents": "results carry the documents (default: true)",
}
TOKENIZE = {
    "content": "the text as llama-server calls it, whose answer is that server's then",
    "add_special": "with `content`: with the tokens that the model puts around a text (default: false)",
    "parse_special": "with `content`: special tokens that it spells count as such (default: true)",
    "with_pieces": "with `content`: each token with what it stands for, as text or bytes",
    "prompt": "a text of up to 4,194,304 characters; or give `messages` and what goes with them, as for chat",
    **{
        name: CHAT[name]
        for name in (
            "messages",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "functions",
            "function_call",
            "chat_template",
            "chat_template_kwargs",
            "reasoning_effort",
            "add_generation_prompt",
            "continue_final_message",
        )
    },
    "add_special_tokens": ANSWER["add_special_tokens"],
    "return_token_strs": "the tokens' texts beside their ids",
    "model": ANSWER["model"],
}
_AS_CHAT = {**ANSWER, **SAMPLING, **CHAT}
MESSAGES = {**api_messages.MESSAGES, **{name: _AS_CHAT[name] for name in PASSED}}
DETOKENIZE = {
    "tokens": "token ids, up to 100,000",
    "model": ANSWER["model"],
}
LOAD_ADAPTER = {
    "lora_name": "the name it is served under: up to 200 printable characters, not the model's own",
    "lora_path": "its folder, relative to `--lora-dir`, without which nothing is loaded",
    "load_inplace": "an adapter of that name is replaced",
}
UNLOAD_ADAPTER = {"lora_name": "the name it is served under"}

KINDS = {
    "length_penalty": "number, -10 to 10", "early_stopping": "true, false or string",
    "bad_words": "array of strings", "stop": "string or array of strings",
    "messages": "array of objects", "prompt": "string or array", "input": "string or array",
    "text_1": "string or array", "text_2": "string or array", "queries": "string or array",
    "documents": "string or array", "tool_choice": "string", "repeat_last_n": "integer", "tools": "array of objects",
    "functions": "array of objects",
    "function_call": "string or object",
    "slo": "string or object",
    "stop_token_ids": "array of integers", "allowed_token_ids": "array of integers", "tokens": "array of integers",
    "dry_sequence_breakers": "array of strings", "include": "array of strings",
} | api_messages.KINDS | api_ollama.KINDS | api_constraints.KINDS | api_ids.KINDS  # fmt: skip
"""Of fields that are read whole, and of arrays."""

HIDDEN = {"--disable-log-requests": ("--no-enable-log-requests",)}
"""Flags of ours that the help leaves out, and what they are."""
