"""Responses of OpenAI's API, and their items."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from penstock.protocol.messages.client import CacheSalt, Priority, RequestId
from penstock.protocol.messages.sampling import NumLogprobs, Positive, SamplingParams
from penstock.services.http.generation.schema import ToolName

MAX_ITEMS = 10_000
MAX_TOOLS = 128
ResponseId = Annotated[str, Meta(min_length=1, max_length=128)]
Include = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class Part(Struct, kw_only=True, omit_defaults=True):
    """A part of an item's content; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


Parts = list[Part]


class Item(Struct, kw_only=True, omit_defaults=True):
    """An item of the input. Unknown fields are ignored: clients send back received items."""

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    summary: Parts | None = None  # summary of a reasoning item
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None


class FunctionTool(Struct, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call; `parameters`: the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Functions = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


class NamespaceTool(Struct, kw_only=True, tag_field="type", tag="namespace"):
    """Functions of a namespace, such as those of one MCP server."""

    name: ToolName
    description: str | None = None
    tools: Functions


class ResponseTool(Struct, kw_only=True):
    """A function, a namespace of functions, or a tool that this server does not run."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Functions = field(default_factory=list)  # functions of a namespace


class NamedFunction(Struct, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: str
    namespace: str | None = None


class AllowedTool(Struct, kw_only=True, omit_defaults=True):
    """A function that may be called; tools of other types are left out here as in `tools`."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedFunctions(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Functions that the model may call (`auto`), or of which it must call one (`required`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    """Form of the answer's text; a schema is always followed, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Any | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True, omit_defaults=True):
    """Options of the answer's text; `verbosity` changes nothing."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct, kw_only=True):
    """Options of reasoning: effort `none` turns it off; other values change nothing."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, kw_only=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None
    """changes nothing"""


class RetrieveQuery(Struct, kw_only=True):
    """Parameters of `GET /v1/responses/{response_id}`."""

    response_id: str
    stream: bool = False


class InputItemsQuery(Struct, kw_only=True):
    """Parameters of `GET /v1/responses/{response_id}/input_items`."""

    response_id: str
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # id of the item before the first to list


class ResponseFields(SamplingParams, kw_only=True):
    """Fields of a response, and of the count of its input's tokens."""

    n: Annotated[int, Meta(ge=1, le=1, description="number of answers")] = 1
    model: str | None = None
    instructions: str | None = None  # a system message before the input
    previous_response_id: ResponseId | None = None  # a stored response to continue
    store: bool = True  # in the memory of this process
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] = field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = field(default_factory=TextOptions)
    reasoning: Reasoning | None = None
    include: list[Include] = field(default_factory=list)  # changes nothing
    top_logprobs: NumLogprobs | None = None  # only 0
    # `auto`: leave out the beginning of a prompt that is too long
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: dict[str, str] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    cache_salt: CacheSalt | None = None
    priority: Priority = 0
    request_id: RequestId | None = None  # in the pipeline's logs; default: the header X-Request-Id
    max_tool_calls: Positive | None = None  # this and all later fields change nothing
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ResponsesRequest(ResponseFields, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_ITEMS)]


class InputTokensRequest(ResponseFields, kw_only=True):
    """`POST /v1/responses/input_tokens`: the fields that make a prompt count."""

    input: str | Annotated[list[Item], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)


AnyRequest = ResponsesRequest | InputTokensRequest


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str = ""


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant, with one part."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = field(default_factory=list)


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning, in one part and without summaries."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)


class FunctionCallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function; `arguments`: JSON text."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class ResponseUsage(Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseError(Struct, kw_only=True):
    """The reason of a failed response."""

    code: str
    message: str


class TextUsed(Struct, kw_only=True):
    """The text options of the request."""

    format: TextFormat = field(default_factory=lambda: TextFormat(type="text"))
    verbosity: Literal["low", "medium", "high"] = "medium"


class ResponseReply(Struct, kw_only=True):
    """Reply to ResponsesRequest: the answer, and the request's parameters."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: dict[Literal["reason"], str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextUsed
    tool_choice: str | NamedFunction | AllowedFunctions
    tools: list[FunctionTool | NamespaceTool]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: str = "default"
    metadata: dict[str, str]


class InputItems(Struct, kw_only=True):
    """A part of a response's input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct, kw_only=True):
    """The length of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(Struct, kw_only=True):
    """Reply to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
