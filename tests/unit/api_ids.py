"""What each endpoint and field of token ids in and out means, in a line each, for docs/api.md."""

from __future__ import annotations

ENDPOINTS = {
    "POST /inference/v1/generate": "vLLM's: token ids in, token ids out, without text.",
    "POST /generate": "SGLang's: text or token ids in, both out.",
}
_SAMPLING = "how tokens are drawn and where an answer ends: what `/v1/completions` takes for that"
VLLM = {
    "token_ids": "the prompt",
    "sampling_params": _SAMPLING + "; an unknown name is refused",
    "model": "the model or an adapter by its name; none: the model",
    "stream": "answer by server-sent events, each with the ids that are new",
    "stream_options": "as for completions: `include_usage`",
    "priority": "as for completions",
    "cache_salt": "as for completions",
    "request_id": "becomes part of the answer's `request_id`",
    "kv_transfer_params": "as for completions",
    "slo": "as for completions",
    "priority_class": "as for completions",
    "service_tier": "as for completions",
}
SGLANG = {
    "text": "the prompt, or several; else `input_ids`",
    "input_ids": "the prompt's token ids, or several lists of them",
    "sampling_params": _SAMPLING + ", under SGLang's names too (`max_new_tokens`, 128 where it is left out; "
    "`min_new_tokens`, `sampling_seed`); an unknown name is refused",
    "stream": "answer by server-sent events, each with all that was said so far; one prompt and one answer",
    "model": "an adapter by its name; none: the model",
    "rid": "becomes part of the answer's id",
    "priority": "as for completions: lower runs earlier",
    "slo": "as for completions: latency objectives",
    "priority_class": "as for completions",
    "service_tier": "as for completions",
    "return_logprob": "log probabilities of the answer's tokens: `[logprob, id, text]`",
    "top_logprobs_num": "and so many alternatives to each",
    "return_text_in_logprobs": "with their texts",
    "logprob_start_len": "-1: prompts are not scored here",
}
KINDS = {
    "token_ids": "array of integers", "text": "string or array of strings",
    "input_ids": "array of integers, or of such",
    "stream": "true or false", "stream_options": "object", "model": "string", "priority": "integer",
    "cache_salt": "string", "priority_class": "0 to 2",
    "service_tier": "string", "request_id": "string", "kv_transfer_params": "object", "rid": "string",
    "logprob_start_len": "integer",
}  # fmt: skip
