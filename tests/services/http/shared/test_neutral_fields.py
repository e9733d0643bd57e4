"""Fields that clients of OpenAI, vLLM and SGLang send: served, neutral, or refused by name."""

from typing import Any

import msgspec
import pytest
from openai.types.chat import completion_create_params as of_chats
from openai.types.completion_create_params import CompletionCreateParamsBase

from penstock.services.http.generation.schema import ApiRequest, ChatRequest, CompletionRequest
from penstock.services.http.generation.to_generate_request import chat_fields, completion_fields
from penstock.services.http.messages import MessagesRequest
from penstock.services.http.responses.schema import ResponsesRequest
from penstock.services.http.shared.body import FIELDS, decode_body
from penstock.services.http.shared.errors import ApiError

REQUIRED = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
VLLM = """frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
stop stream stream_options temperature top_p thinking_token_budget user use_beam_search top_k min_p
repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos
min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids echo add_special_tokens structured_outputs request_id session_id
return_tokens_as_token_ids return_token_ids return_weight_versions routed_experts_prompt_start
return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
vllm_xargs repetition_detection stream_interval guided_decoding_backend best_of guided_json
guided_regex guided_choice guided_grammar guided_whitespace_pattern prompt_embeds allowed_token_ids
bad_words"""
VLLM_CHAT = """top_logprobs max_completion_tokens tools tool_choice reasoning_effort
include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text"""
SGLANG = """bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank
return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
return_spec_tokens_details json_schema regex ebnf stop_regex no_stop_trim lora_path session_params
custom_params custom_logit_processor watermark images_config mm_processor_kwargs data_parallel_rank
rid extra_key custom_labels return_prompt_token_ids return_meta_info return_input_ids_in_sglext
return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 thinking task
separate_reasoning stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video
video_config input_ids"""
OPENAI_CHAT = of_chats.CompletionCreateParamsBase.__annotations__
OPENAI = CompletionCreateParamsBase.__annotations__


def decode(kind: type[ApiRequest], **given: Any) -> ApiRequest:
    required = {name: REQUIRED[name] for name in REQUIRED if name in kind.__struct_fields__}
    return decode_body(msgspec.json.encode(required | given), kind)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ChatRequest, [*OPENAI_CHAT, *VLLM.split(), *VLLM_CHAT.split(), *SGLANG.split()]),
        (CompletionRequest, [*OPENAI, *VLLM.split(), *SGLANG.split()]),
    ],
)
def test_every_field_of_the_three_apis_is_known(kind: type[ApiRequest], names: list[str]) -> None:
    known = {*kind.__struct_fields__, *FIELDS.ignored, *FIELDS.neutral, *FIELDS.renamed}
    assert not set(names) - known


BODIES: list[Any] = [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest]


@pytest.mark.parametrize("kind", BODIES)
def test_a_field_of_another_api_is_not_ignored_in_silence(kind: type[msgspec.Struct]) -> None:
    """A forced tool that completions dropped would change the answer."""
    assert not OTHERS - {*kind.__struct_fields__, *FIELDS.ignored, *FIELDS.neutral}


DEFAULTS = {
    "best_of": 1,
    "documents": [],
    "functions": [],
    "length_penalty": 1.0,
    "lora_path": None,
    "modalities": ["text"],
    "return_hidden_states": False,
    "separate_reasoning": True,
    "spaces_between_special_tokens": True,
    "suffix": None,
    "thinking_token_budget": -1,
    "use_beam_search": False,
    "verbosity": "medium",
}
"""what clients send that write every field of their API"""


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_client_may_send_every_default(kind: type[ApiRequest]) -> None:
    to_fields: Any = chat_fields if kind is ChatRequest else completion_fields
    assert to_fields(decode(kind, **DEFAULTS)) == to_fields(decode(kind))


OTHERS = {name for body in BODIES for name in body.__struct_fields__}
TABLE = [name for name in FIELDS.neutral if "." not in name]
VALUES: dict[str, Any] = {"string": "any", "boolean": True, "object": {"any": ["thing"]}}


@pytest.mark.parametrize(
    ("name", "given"),
    [(name, given) for name, given in FIELDS.ignored.items() if given in VALUES],
)
def test_a_field_without_effect_has_a_type(name: str, given: str) -> None:
    for wrong in (5, *(value for kind, value in VALUES.items() if kind != given)):
        with pytest.raises(ApiError) as caught:
            decode(ChatRequest, **{name: wrong})
        assert caught.value.status == 400
        assert str(caught.value) == f"{name}: got {wrong!r}, expected {given}"


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in TABLE for value in (*FIELDS.neutral[name], None)),
        *(
            (name, VALUES[kind])
            for name, given in sorted(FIELDS.ignored.items())
            for kind in ([given] if given in VALUES else VALUES)
        ),
        *(("best_of", 1), ("min_tokens", 0), ("ignore_eos", False), ("logit_bias", None)),
    ],
)
def test_neutral_values_are_accepted(kind: type[ApiRequest], name: str, value: Any) -> None:
    if name in OTHERS and name in kind.__struct_fields__:
        return
    to_fields: Any = chat_fields if kind is ChatRequest else completion_fields
    assert to_fields(decode(kind, **{name: value})) == to_fields(decode(kind))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in (ChatRequest, CompletionRequest)
        for name in sorted(set(TABLE) - set(kind.__struct_fields__))
    ],
)
def test_other_values_are_refused_by_name(kind: type[ApiRequest], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(kind, **{name: ["what changes the answer"]})
    assert caught.value.status == 400
    assert caught.value.body.error.param == name
    assert str(caught.value).startswith(f"{name}: got ['what changes the answer'], expected ")


def test_names_of_sglang() -> None:
    request = decode(ChatRequest, rid="mine", no_stop_trim=True)
    assert request.request_id == "mine"
    assert request.include_stop_str_in_output
