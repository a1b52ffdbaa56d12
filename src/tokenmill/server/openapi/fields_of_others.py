"""What the fields of request bodies are, those of other APIs and of /admin: kind and meaning of each. See fields.py."""

from __future__ import annotations

from ...api.messages.parse import PASSED
from .fields import ANSWER, CHAT, SAMPLING, Told

_AS_CHAT = ANSWER | SAMPLING | CHAT
MESSAGES: Told = {
    "max_tokens": (
        "integer, 0 to 2^31 - 1",
        "most tokens of the answer, which must be given (but to count); what the context has no room for is left "
        "out; 0 computes the prompt, for later calls to find in the cache",
    ),
    "messages": (
        "array of objects",
        "the conversation: `role` (user, assistant, system) and `content`, a string or blocks of type text, "
        "tool_use, tool_result and thinking; a last message of the assistant is continued",
    ),
    "system": ("string or array of objects", "a string or text blocks"),
    "stop_sequences": ("array of strings", "texts that end the answer, as `stop` of chat"),
    "tools": (
        "array of objects",
        "functions that the model may call: `name`, `description`, `input_schema`, `strict`, `input_examples`; "
        "with `type` null or `custom`",
    ),
    "tool_choice": ("object", "whether it has to"),
    "tool_choice.type": ("string", "`auto`, `any`, `tool` (the one of that `name`) or `none`"),
    "tool_choice.disable_parallel_tool_use": ("true or false", "one call at most"),
    "thinking": ("object", "whether the model thinks first, where it can (default: it does not)"),
    "thinking.type": ("string", "`enabled`, `adaptive` or `disabled`"),
    "thinking.budget_tokens": ("integer, 1 to 2^31 - 1", "most tokens of it, below `max_tokens`; where `enabled`"),
    "thinking.display": ("string", "`summarized` shows it, all of it; `omitted` does not"),
    "output_config": ("object", "what the answer is to be"),
    "output_config.effort": (
        "string",
        "a variable of the template, `reasoning_effort`: low, medium, high, xhigh or max",
    ),
    "output_config.format": ("object", 'answers fit a schema: {"type": "json_schema", "schema"}'),
    "output_format": ("object", "its older name"),
    "context_management": ("object", "edits of the conversation"),
    "context_management.edits": ("array of objects", "none but clear_thinking_20251015 with `keep` all"),
    "cache_control": ("object", "`ephemeral`; prefixes are cached without it. Also in blocks and tools"),
    **{name: _AS_CHAT[name] for name in PASSED},
}
_OLLAMA: Told = {
    "model": ("string, not empty", "the model or an adapter by its name, with or without the tag `latest`"),
    "stream": ("true or false", "answer line by line (default: true)"),
    "options": ("object", "settings, below"),
    "format": (
        "string or object",
        "`json`, or a JSON schema that the answer is to fit; objects have the properties that they list, and no "
        "others unless `additionalProperties` allows them",
    ),
    "think": (
        "true or false or string",
        "whether the model thinks before it answers, or how hard: `low`, `medium`, `high`, `max`",
    ),
    "logprobs": ("true or false", "log probabilities of the answer's tokens"),
    "top_logprobs": ("integer, 0 to 20", "and so many alternatives to each"),
}
OLLAMA_CHAT = _OLLAMA | {
    "messages": (
        "array of objects",
        "the conversation; none: the answer says that the model is loaded. One that ends with the assistant's "
        "words is continued",
    ),
    "tools": ("array of objects", "what the model may call"),
}
OLLAMA_GENERATE = _OLLAMA | {
    "prompt": ("string", "put in the model's template; none: the answer says that the model is loaded"),
    "system": ("string", "a message before it"),
    "raw": ("true or false", "the prompt is taken as it is"),
    "suffix": ("string", "the answer fills the gap before it; where the model has tokens for that"),
    "context": ("array of integers", "tokens of an earlier answer's `context`, to go on with"),
}
_OLLAMA_VECTORS: Told = {
    "model": ("string, not empty", "the model by its name, with or without the tag `latest`"),
    "options": ("object", "checked like those of chat; none has an effect on vectors"),
}
OLLAMA_EMBED = _OLLAMA_VECTORS | {
    "input": ("string or array", "one text or several; none: no vectors"),
    "truncate": ("true or false", "cut texts that are too long (default: true)"),
    "dimensions": ("integer, 1 to 2^31 - 1", "keep so many values of each vector"),
}
OLLAMA_EMBEDDINGS = _OLLAMA_VECTORS | {"prompt": ("string", "the text; none: no vector")}
OLLAMA_OPTIONS: Told = {
    "options.num_predict": (
        "integer, -2 to 2^31 - 1",
        "most tokens of the answer; 0, -1, -2: what the context has room for (default: as for chat)",
    ),
    "options.num_ctx": ("integer, 1 to 2^31 - 1", "of no effect: the context is settled when the server starts"),
    "options.temperature": ("number", "as `temperature`"),
    "options.top_k": ("integer", "as `top_k`"),
    "options.top_p": ("number", "as `top_p`"),
    "options.min_p": ("number", "as `min_p`"),
    "options.typical_p": ("number", "as `typical_p`"),
    "options.seed": ("integer", "as `seed`; -1: none"),
    "options.stop": ("string or array of strings", "as `stop`"),
    "options.loop_guard": ("true or false", "as `loop_guard`"),
    "options.repeat_penalty": ("number", "as `repetition_penalty`"),
    "options.repeat_last_n": ("integer", "as `repeat_last_n`"),
    "options.presence_penalty": ("number", "as `presence_penalty`"),
    "options.frequency_penalty": ("number", "as `frequency_penalty`"),
}
LLAMA_SHARED: Told = {
    "n_predict": (
        "integer, -2 to 2^31 - 1",
        "most tokens of the answer; 0: none, the prompt is but read; -1, -2: what the context has room for "
        "(default: as for chat)",
    ),
    "n_cmpl": ("integer, 1 to 2^31 - 1", "answers to each prompt"),
    "n_probs": ("integer, 0 to 20", "log probabilities of the answer's tokens, with so many alternatives to each"),
    "logit_bias": (
        "array of pairs, or object",
        "pairs of token id and bias, false for never; or an object as in `/v1/completions`",
    ),
    "seed": ("integer", "as there; -1 and 4294967295: none"),
    "samplers": (
        "array of strings",
        "which act; what is left out is off. Their order is fixed: another is refused where it would matter",
    ),
    "return_tokens": ("true or false", "the answer carries its token ids"),
    "response_fields": ("array of strings", "the last event, or the body, has only these; `a/b` is `b` of `a`"),
    "timings_per_token": ("true or false", "every event tells times"),
}
LLAMA_COMPLETION: Told = {
    "prompt": (
        "string or array",
        "a text, token ids, both mixed in one array, an object with `prompt_string`; or an array of these",
    )
} | LLAMA_SHARED
LLAMA_INFILL: Told = {
    "input_prefix": ("string", "what comes before the gap"),
    "input_suffix": ("string", "what comes after it"),
    "input_extra": ("array of objects", "other files: objects with `filename` and `text`"),
    "prompt": ("string", "how the gap's text begins"),
} | LLAMA_SHARED
LLAMA_EMBEDDING: Told = {
    "content": ("string or array", "a text, token ids, or an array of these"),
    "input": ("string or array", "the same under OpenAI's name"),
    "embd_normalize": ("integer, -1 to 2^31 - 1", "2: vectors of length 1 (default); -1: as the model gives them"),
}
_HOW = "how tokens are drawn and where an answer ends: what `/v1/completions` takes for that"
VLLM_IDS: Told = {
    "token_ids": ("array of integers", "the prompt"),
    "sampling_params": ("object", _HOW + "; an unknown name is refused"),
    "model": ("string", "the model or an adapter by its name; none: the model"),
    "stream": ("true or false", "answer by server-sent events, each with the ids that are new"),
    "stream_options": ("object", "as for completions: `include_usage`"),
    "priority": ("integer", "as for completions"),
    "cache_salt": ("string", "as for completions"),
    "request_id": ("string", "becomes part of the answer's `request_id`"),
    "kv_transfer_params": ("object", "as for completions"),
    "slo": ("string or object", "as for completions"),
    "priority_class": ("0 to 2", "as for completions"),
    "service_tier": ("string", "as for completions"),
}
SGLANG_IDS: Told = {
    "text": ("string or array of strings", "the prompt, or several; else `input_ids`"),
    "input_ids": ("array of integers, or of such", "the prompt's token ids, or several lists of them"),
    "sampling_params": (
        "object",
        _HOW + ", under SGLang's names too (`max_new_tokens`, 128 where it is left out; "
        "`min_new_tokens`, `sampling_seed`); an unknown name is refused",
    ),
    "stream": (
        "true or false",
        "answer by server-sent events, each with all that was said so far; one prompt and one answer",
    ),
    "model": ("string", "an adapter by its name; none: the model"),
    "rid": ("string", "becomes part of the answer's id"),
    "priority": ("integer", "as for completions: lower runs earlier"),
    "slo": ("string or object", "as for completions: latency objectives"),
    "priority_class": ("0 to 2", "as for completions"),
    "service_tier": ("string", "as for completions"),
    "return_logprob": ("true or false", "log probabilities of the answer's tokens: `[logprob, id, text]`"),
    "top_logprobs_num": ("integer, 0 to 20", "and so many alternatives to each"),
    "return_text_in_logprobs": ("true or false", "with their texts"),
    "logprob_start_len": ("integer", "-1: prompts are not scored here"),
}
_METADATA: Told = {"metadata": ("object", "up to 16 pairs of texts, given back")}
_ITEMS: Told = {"items": ("array of objects", "up to 20 items, as in the input of `/v1/responses`")}
CONVERSATIONS: dict[str, tuple[Told, list[str]]] = {
    "new_conversation": (_ITEMS | _METADATA, []),
    "conversation": (_METADATA, ["metadata"]),
    "conversation_items": (_ITEMS, ["items"]),
}
MESSAGE_BATCH: Told = {
    "requests": (
        "array of objects",
        "each with a `custom_id` (1 to 64 letters, digits, hyphens and underscores) and `params`, a body of "
        "`/v1/messages`",
    ),
}
BATCH: Told = {
    "input_file_id": ("string, not empty", "a file that was uploaded for the purpose `batch`"),
    "endpoint": ("string, not empty", "the path that all its calls go to"),
    "completion_window": ("string, not empty", "`24h`"),
    "metadata": ("object", "up to 16 pairs of texts, given back"),
    "output_expires_after": ("object", "how long its answers are kept: `anchor` (`created_at`) and `seconds`"),
}
_OWNER: Told = {
    "tenant": ("string", "the id of a tenant; else of the caller's"),
    "owner": ("string", "the `cache_salt` of requests, where there are no tenants"),
}
_PROMPT: Told = {
    "messages": ("array of objects", "a conversation; a lone system message stands for all that begin with it"),
    "prompt": ("string or array", "a text, or token ids, instead"),
    "model": ("string", "an adapter's name, or the model's"),
    "cache_salt": ("string", "as requests have it"),
    "tenant": ("string", "the id of the tenant whose requests are meant; else the caller's"),
}
KV: dict[str, Told] = {
    "kv_prompt": _PROMPT,
    "kv_pin": _PROMPT | {"seconds": ("number, above 0, to 1000000000", "for how long; else for ever")},
    "kv_prefetch": _PROMPT
    | {
        "to": ("string", "`host` (default): host memory of the KV store, not waited for; `pool`: an engine's pool"),
        "worker": ("string", "id of the engine; else the one to which it is least work"),
    },
    "kv_quota": _OWNER | {"bytes": ("integer, 0 to 4611686018427387904", "in each tier; null: no bound")},
    "kv_clear": _OWNER | {"tier": ("string", "`host`, `disk`, `remote` or `peer`; else all of them")},
}
NEW_KEY: Told = {
    "name": ("string, not empty", "what people call it"),
    "tenant": ("string", "whose it is; else `name`'s"),
    "scopes": ("array of strings", '`[]` or `["admin"]`'),
    "expires_at": ("integer, 1 to 100000000000", "when it ends, in seconds since 1970"),
}
MODEL: Told = {
    "model": (
        "string, not empty",
        "as `serve` takes it: a name, .gguf file, folder in Hugging Face format, or repository of the hub",
    ),
    "name": ("string", "that calls have as `model`; else `model`"),
    "kv_cache_memory_bytes": ("integer, 1 to 2^50", "its KV pool; else a share of what is left of memory"),
}
LISTED_MODEL: Told = {"model": ("string, not empty", "one of `--models-dir`, by its name")}
CANARY: Told = {
    "name": ("string, not empty", "that calls have as `model`"),
    "versions": ("array of objects", "`model` and `weight` of each, the stable one first"),
    "seed": ("integer, 0 to 2^31 - 1", "another one deals sessions to versions anew"),
    "ttft_ms": ("number, above 0, to 3600000", "target of calls; else the server's"),
    "tpot_ms": ("number, above 0, to 3600000", "the same"),
    "tolerance": ("number, 0 to 10", "by which share times of a canary may be longer (0.1)"),
    "alpha": ("number, above 0, to 0.5", "chance that a good canary is taken back, within 500 of its calls (0.01)"),
    "min_samples": ("integer, 1 to 500", "calls before that (5)"),
}
POOL: Told = {"pool": ("string, not empty", "its name: 1 to 32 of a-z, 0-9, hyphen and underscore")}
ROTATION: Told = {"overlap_s": ("number, 0 to 2592000", "for how long the old one still serves")}
