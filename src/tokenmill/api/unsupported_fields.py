"""Fields of requests that other servers read and this one does not: what becomes of each, by endpoint.

Data, and the one loop that walks it. A field that would change the answer is refused by name, unless its value asks for
nothing; a field that cannot change it is accepted. Fields that are read stand in `openai` and `pooling`; what stands
nowhere is unknown: ignored with a line in the log, unless it seems misspelled (`spelling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidRequest
from ..core.sampling import SETTINGS
from .fields import Fields


@dataclass(frozen=True, slots=True)
class Refused:
    """neutral: values, beside null, that ask for nothing. instead: what to do."""

    neutral: tuple[Any, ...] = ()
    instead: str = "leave it out"


@dataclass(frozen=True, slots=True)
class Ignored:
    """why: what makes it harmless."""

    why: str


Table = dict[str, Refused | Ignored]

RENAMED: Mapping[str, str] = {
    **{other: name for name, declared in SETTINGS.items() for other in declared.names},
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Other servers' names of fields that are read here."""

_KWARGS = "give chat_template_kwargs what the model's template reads, such as enable_thinking"
_LOGPROBS = "give logprobs, for chat with top_logprobs"
_ORDER = "samplers are applied in the order that docs/use/sampling.md tells"
_OFF = Refused((0, -1))
_NOT_HERE = Ignored("it belongs to a sampler that is refused")
_ACCOUNT = Ignored("accounts and storage are not kept here")
_CACHE = Ignored("what is cached never changes an answer")
_SHAPE = Ignored("the answer has one shape")
KEPT = Ignored("a model of --models-dir is kept loaded so long, any other stays loaded")

_GENERATION: Table = {
    # OpenAI
    "user": _ACCOUNT,
    "store": _ACCOUNT,
    "metadata": _ACCOUNT,
    "safety_identifier": _ACCOUNT,
    "prompt_cache_key": _CACHE,
    "prompt_cache_retention": _CACHE,
    # vLLM
    "logits_processors": Refused(([],)),
    "logprob_token_ids": Refused(([],)),
    "repetition_detection": Refused(),
    "return_prompt_text": Refused((False,)),
    "ec_transfer_params": Refused(),
    "vllm_xargs": Refused(({},)),
    "extra_args": Refused(({},)),
    "detokenize": Refused((True,), "return_token_ids gives ids beside the text"),
    "spaces_between_special_tokens": Ignored("text is decoded as one string"),
    "skip_reading_prefix_cache": _CACHE,
    "flat_logprobs": _SHAPE,
    "session_id": Ignored("the header x-session-id names a session"),
    "mm_processor_kwargs": Ignored("images are refused"),
    "media_io_kwargs": Ignored("images are refused"),
    # llama-server: samplers
    "samplers": Refused(([], ""), _ORDER),
    "mirostat": _OFF,
    "mirostat_tau": _NOT_HERE,
    "mirostat_eta": _NOT_HERE,
    "dynatemp_range": _OFF,
    "dynatemp_exponent": _NOT_HERE,
    "dry_range": Refused((0, -1), "give dry_penalty_last_n"),
    "adaptive_target": _OFF,
    "adaptive_decay": _NOT_HERE,
    "min_keep": Refused((0, 1)),
    "penalize_nl": Ignored("llama-server has dropped it too"),
    # llama-server: the rest
    "n_probs": Refused((0,), _LOGPROBS),
    "post_sampling_probs": Refused((False,), _LOGPROBS),
    "n_keep": Ignored("a prompt is never cut unless truncate_prompt_tokens says so"),
    "n_discard": Ignored("a prompt is never cut unless truncate_prompt_tokens says so"),
    "n_indent": Refused((0,)),
    "t_max_predict_ms": Refused((0, -1)),
    "cache_prompt": _CACHE,
    "n_cache_reuse": _CACHE,
    "id_slot": Ignored("any place in a batch gives the same answer"),
    "slot_id": Ignored("any place in a batch gives the same answer"),
    "return_tokens": Refused((False,), "give return_token_ids"),
    "timings_per_token": _SHAPE,
    "return_progress": _SHAPE,
    "response_fields": _SHAPE,
    "image_data": Refused(([],)),
    "multimodal_data": Refused(([],)),
    "lora": Refused(([],), "name the adapter as the model"),
    # Ollama
    "format": Refused(("",)),
    "options": Refused(({},), "give its settings beside the model, under OpenAI's names"),
    "keep_alive": KEPT,
    "context": Refused(([],)),
    "images": Refused(([],)),
    # SGLang
    "sampling_params": Refused(({},), "give its settings beside the prompt"),
    "stop_regex": Refused(("", [])),
    "no_stop_trim": Refused((False,), "give include_stop_str_in_output"),
    "lora_path": Refused(([],), "name the adapter as the model"),
    "custom_logit_processor": Refused(("",)),
    "custom_params": Refused(({},)),
    "input_embeds": Refused(),
    "return_hidden_states": Refused((False,)),
    "return_logprob": Refused((False,), _LOGPROBS),
    "top_logprobs_num": Refused((0,), _LOGPROBS),
    "logprob_start_len": Refused((-1,), "give prompt_logprobs"),
    "session_params": Refused(({},)),
    "bootstrap_host": Refused(),
    "bootstrap_port": Refused(),
    "bootstrap_room": Refused(),
    "data_parallel_rank": Ignored("the router chooses the engine"),
    "rid": Ignored("request_id is the name of a call"),
    "stream_reasoning": _SHAPE,
    # text-generation-inference, text-generation-webui and others
    "parameters": Refused(({},), "give its settings beside the prompt"),
    "do_sample": Refused((True,), "give temperature 0 for greedy"),
    "decoder_input_details": Refused((False,), "give prompt_logprobs"),
    "details": _SHAPE,
    "watermark": Refused((False,)),
    "max_length": Refused((), "give max_tokens"),
    "num_beams": Refused((1,), "give use_beam_search and n"),
    "no_repeat_ngram_size": Refused((0,)),
    "encoder_repetition_penalty": Refused((1,)),
    "guidance_scale": Refused((1,)),
    "negative_prompt": Refused(("",)),
    "top_a": Refused((0,)),
    "tfs": Refused((1,)),
    "tfs_z": Refused((1,)),
    "epsilon_cutoff": Refused((0,)),
    "eta_cutoff": Refused((0,)),
    "smoothing_factor": Refused((0,)),
    "smoothing_curve": _NOT_HERE,
    "skew": Refused((0,)),
    "quad_mode": Refused((0,)),
    "penalty_alpha": Refused((0,)),
    "repetition_penalty_range": Refused((0, -1), "penalties cover the whole sequence"),
    "rep_pen_range": Refused((0, -1), "penalties cover the whole sequence"),
    "sampler_priority": Refused(([],), _ORDER),
    "sampler_order": Refused(([],), _ORDER),
    "temperature_last": Refused((False,), _ORDER),
    "ban_eos_token": Refused((False,), "give ignore_eos"),
    "custom_token_bans": Refused(("",), "give logit_bias"),
    "banned_tokens": Refused(([],), "give logit_bias"),
}

_NO_TOOLS = Ignored("a completion calls no tools")

COMPLETION: Table = _GENERATION | {
    "parallel_tool_calls": _NO_TOOLS,
    "include_reasoning": _SHAPE,
    "separate_reasoning": _SHAPE,
    "thinking_token_budget": Refused((), "use /v1/chat/completions"),
    "inputs": Refused((), "give prompt"),
    "raw": Ignored("a prompt is taken as it is"),
    "return_full_text": Refused((False,), "give echo"),
    "suffix": Refused(("",)),
    "prompt_embeds": Refused(),
    "top_logprobs": Refused((0,), "give logprobs a number"),
    "system": Refused(("",), "write it in the prompt, or use /v1/chat/completions"),
    "template": Refused(("",), "write it in the prompt"),
    "think": Refused((False,), f"use /v1/chat/completions and {_KWARGS}"),
}

CHAT: Table = _GENERATION | {
    "inputs": Refused((), "give messages"),
    "raw": Refused((False,), "give /v1/completions the whole prompt"),
    "return_full_text": Refused((False,)),
    "audio": Refused(),
    "modalities": Refused((["text"],)),
    "documents": Refused(([],)),
    "echo": Refused((False,)),
    "web_search_options": Refused(),
    "reasoning": Refused(({},), "give reasoning_effort"),
    "think": Refused((), _KWARGS),
    "thinking": Refused((), _KWARGS),
    "enable_thinking": Refused((), _KWARGS),
    "thinking_forced_open": Refused((False,)),
    "parse_tool_calls": Refused((True,), "give tool_choice 'none'"),
    "system": Refused(("",), "give a message with the role system"),
    "template": Refused(("",), "give chat_template"),
    "prefill_assistant": Refused((False,), "give continue_final_message"),
    "response_prefix": Refused(("",), "give continue_final_message"),
    "mode": Refused(("instruct", "chat")),
    "character": Refused(("",)),
    "instruction_template": Refused(("",)),
}

_VECTORS: Table = {
    "user": _ACCOUNT,
    "mm_processor_kwargs": Ignored("images are refused"),
    "keep_alive": KEPT,
    "options": Refused(({},)),
    "messages": Refused((), "give text"),
    "images": Refused(([],)),
    "truncate": Refused((False, "NONE"), "give truncate_prompt_tokens, -1 for as many as fit"),
    "max_length": Refused((), "give truncate_prompt_tokens"),
    "add_special_tokens": Refused((True,), "give token ids"),
    "softmax": Refused((False,), "give use_activation"),
    "activation": Refused((), "give use_activation"),
}

EMBEDDING: Table = _VECTORS | {
    "inputs": Refused((), "give input"),
    "prompt": Refused((), "give input"),
    "content": Refused((), "give input"),
    "texts": Refused((), "give input"),
    "input_type": Refused((), "give prompt_name, or write the prompt before the text"),
    "task": Refused(("embed",), "give prompt_name, or write the prompt before the text"),
    "task_type": Refused((), "give prompt_name, or write the prompt before the text"),
    "instruction": Refused(("",), "write it before the text"),
    "late_chunking": Refused((False,)),
    "embedding_type": Refused(("float",), "give encoding_format"),
    "embedding_types": Refused((["float"],), "give encoding_format"),
    "embed_dtype": Refused(("float32",)),
    "endianness": Refused(("native", "little")),
    "output_dimension": Refused((), "give dimensions"),
    "output_dtype": Refused(("float",)),
    "embd_normalize": Refused((2,), "give normalize"),
}

SCORE: Table = _VECTORS | {
    "max_chunks_per_doc": Ignored("a document is never cut in chunks"),
    "max_tokens_per_doc": Ignored("a document is never cut unless truncate_prompt_tokens says so"),
    "rank_fields": Ignored("a document has one text"),
    "instruction": Refused(("",), "write it before the text"),
    "chat_template": Refused(("",)),
}

RERANK: Table = SCORE | {
    "texts": Refused((), "give documents"),
    "top_k": Refused((), "give top_n"),
    "return_text": Refused((), "give return_documents"),
    "return_embeddings": Refused((False,)),
    "raw_scores": Refused((False,), "give use_activation"),
}


def rename(body: dict[str, Any]) -> dict[str, Any]:
    """The body under the names that are read here. Raises InvalidRequest where a field is given twice."""
    for other, name in RENAMED.items():
        if other not in body:
            continue
        value = body[other]
        if other == "n_predict" and value in (-1, -2):
            value = None
        rest = {field: kept for field, kept in body.items() if field != other}
        if value is not None and rest.get(name, value) not in (None, value):
            raise InvalidRequest(f"{other} and {name} are the same; give one.", param=other)
        body = rest if value is None else {**rest, name: value}
    return body


def check(fields: Fields, table: Table) -> None:
    """Raises InvalidRequest for a field that would change the answer; those of the table count as read."""
    fields.know(name for name, entry in table.items() if isinstance(entry, Refused))
    for name in fields.names():
        entry = table.get(name)
        if entry is None:
            continue
        value = fields.any(name)
        if isinstance(entry, Refused) and value is not None and not _is_neutral(value, entry):
            raise InvalidRequest(f"{name} is not supported by this server; {entry.instead}.", param=name)


def _is_neutral(value: Any, entry: Refused) -> bool:
    """Python takes true for 1; a caller does not."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in entry.neutral)
