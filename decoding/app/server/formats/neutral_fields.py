"""Fields of requests that change no answer here, with the values that clients may send.

They are OpenAI's, and those of vLLM and llama.cpp, whose clients send them at their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...] | None]  # values of a field; None: any value

_OPENAI: Neutral = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": None,
    "modalities": (["text"],),
    "n": (1,),
    "prediction": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "suffix": ("",),
    "user": None,
    "verbosity": ("medium",),
}
_VLLM: Neutral = {
    "bad_words": ([],),
    "detokenize": (True,),
    "documents": ([],),
    "ignore_eos": (False,),
    "include_reasoning": (True,),  # it is a part of the text
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "request_id": None,
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": None,
    "stop_token_ids": ([],),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_LLAMA_CPP: Neutral = {
    "backend_sampling": (False,),
    "cache_prompt": None,
    "dry_allowed_length": None,
    "dry_base": None,
    "dry_multiplier": (0,),
    "dry_penalty_last_n": None,
    "dry_sequence_breakers": None,
    "dynatemp_exponent": None,
    "dynatemp_range": (0,),
    "grammar": ("",),
    "id_slot": None,
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": None,
    "mirostat_tau": None,
    "n_discard": (0,),
    "n_keep": None,  # prompts are never shifted
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("none", "auto"),
    "reasoning_control": None,
    "response_fields": ([],),
    "return_progress": None,
    "slot_id": None,
    "sse_ping_interval": None,
    "t_max_predict_ms": (-1, 0),
    "tfs_z": (1,),
    "timings_per_token": None,
    "top_n_sigma": (-1, 0),
    "typ_p": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "xtc_threshold": None,
}
_NO_TOOLS: Neutral = {
    "parallel_tool_calls": None,
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
_FIELDS: Neutral = {**_OPENAI, **_VLLM, **_LLAMA_CPP}
CHAT_FIELDS: Neutral = {**_FIELDS, "add_special_tokens": (False,), "echo": (False,)}
COMPLETION_FIELDS: Neutral = {**_FIELDS, **_NO_TOOLS, "add_special_tokens": (True,)}
RESPONSE_FIELDS: Neutral = {
    **_VLLM,
    **_LLAMA_CPP,
    "background": (False,),
    "context_management": ([],),
    "enable_response_messages": (False,),
    "max_tool_calls": None,
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": None,
    "service_tier": None,
    "store": (False, True),  # nothing is stored
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}
MESSAGE_FIELDS: Neutral = {
    "annotations": ([],),
    "reasoning_content": ("",),
    "refusal": ("",),
}
CALL_FIELDS: Neutral = {  # clients may send back what they, or a proxy, got in a stream
    "extra_content": None,
    "index": None,
    "provider_specific_fields": None,
}
PART_FIELDS: Neutral = {"cache_control": None}
FUNCTION_FIELDS: Neutral = {
    **PART_FIELDS,
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": None,  # results are in the conversation
}
INPUT_MESSAGE_FIELDS: Neutral = {"id": None, "phase": None, "status": None}
INPUT_CALL_FIELDS: Neutral = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "id": None,
    "name": None,  # a result's, which its call has, too
    "status": None,
}
INPUT_PART_FIELDS: Neutral = {
    **PART_FIELDS,
    "annotations": ([],),
    "logprobs": None,
    "prompt_cache_breakpoint": None,
}
EMPTY_REASONING_FIELDS: Neutral = {
    "content": ([],),
    "encrypted_content": ("",),
    "id": None,
    "status": None,
    "summary": ([],),
}
REASONING_FIELDS: Neutral = {
    "context": ("auto",),
    "generate_summary": None,
    "mode": ("standard",),
    "summary": None,
}
STREAM_FIELDS: Neutral = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
TEXT_FIELDS: Neutral = {"verbosity": ("medium",)}
TOKENIZE_FIELDS: Neutral = {"parse_special": (False,), "with_pieces": (False,)}
