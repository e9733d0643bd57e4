"""Fields of OpenAI's, vLLM's and SGLang's requests that have one meaning here, or none.

Clients often send every field of their own API with its default. A value that changes nothing is
accepted; any other one is refused by the name of its field, never ignored.
"""

from typing import Any

from penstock.services.http.errors import ApiError

RENAMED = {"rid": "request_id", "no_stop_trim": "include_stop_str_in_output"}
"""SGLang's name → ours"""
IGNORED = frozenset(
    {
        # accounting, caches and back ends
        "custom_labels",
        "guided_decoding_backend",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "session_id",
        # for parts of a service, or of a model, that do not exist here
        "early_stopping",
        "images_config",
        "max_dynamic_patch",
        "media_io_kwargs",
        "min_dynamic_patch",
        "mm_payload",
        "return_mm_kwargs",
        "return_token_offsets",
        "routed_experts_prompt_start",
        "routed_experts_start_len",
        "return_flat_raw_top_logprobs_b64",
        "stream_interval",
        "stream_reasoning",
        "verbosity",
        "video_config",
    }
)
"""whatever their value is, the answer is the same"""
_OFF = (False,)
_EMPTY: tuple[object, ...] = ({}, [], "")
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": _EMPTY,
    "custom_params": _EMPTY,
    "data_parallel_rank": (),
    "documents": _EMPTY,
    "disagg_prefill_dp_rank": (),
    "ebnf": (),
    "ec_transfer_params": _EMPTY,
    "echo": _OFF,
    "extra_key": _EMPTY,
    "function_call": ("none", "auto"),
    "functions": _EMPTY,
    "input_ids": (),
    "kv_transfer_params": _EMPTY,
    "length_penalty": (1.0,),
    "logits_processors": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "lora_path": (),
    "mm_processor_kwargs": _EMPTY,
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": _EMPTY,
    "reasoning": _EMPTY,
    "repetition_detection": _EMPTY,
    "return_cached_tokens_details": _OFF,
    "return_flat_raw_output_top_logprobs": _OFF,
    "return_hidden_states": _OFF,
    "return_input_ids_in_sglext": _OFF,
    "return_meta_info": _OFF,
    "return_output_ids_in_sglext": _OFF,
    "return_prompt_text": _OFF,
    "return_prompt_token_ids": _OFF,
    "return_routed_experts": _OFF,
    "return_sampling_mask": _OFF,
    "return_spec_tokens_details": _OFF,
    "return_token_strs": _OFF,
    "return_weight_versions": _OFF,
    "routed_dp_rank": (),
    "sampling_logprobs_mode": (),
    "separate_reasoning": (True,),
    "session_params": _EMPTY,
    "spaces_between_special_tokens": (True,),
    "stop_regex": _EMPTY,
    "suffix": ("",),
    "task": (),
    "thinking": (),
    "thinking_token_budget": (-1,),
    "use_audio_in_video": _OFF,
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermark": _EMPTY,
    "watermarking": _OFF,
    "web_search_options": (),
    "whitespace_pattern": (),
    "guided_whitespace_pattern": (),
}
"""field → values that change nothing; null is always one of them"""


def without_neutral(given: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """The fields that a request of the fields `known` is made of. Raises ApiError for a field that
    would change the answer, and is not supported."""
    kept = {}
    for name, value in given.items():
        name = RENAMED.get(name, name)
        if name in known or (name not in IGNORED and name not in NEUTRAL):
            kept[name] = value
        elif name in NEUTRAL and value not in NEUTRAL[name]:
            raise ApiError(400, _refusal(name, value), name)
    return kept


def _refusal(name: str, value: object) -> str:
    accepted = [repr(one) for one in NEUTRAL[name] if one not in _EMPTY] or ["null"]
    shown = repr(value)
    return (
        f"{name}: got {shown[:60]}{'…' * (len(shown) > 60)}, expected {' or '.join(accepted)}: "
        "it is not supported; leave it out"
    )
