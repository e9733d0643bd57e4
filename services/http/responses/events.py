"""An answer as the events of the Responses API, and as a whole response."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import UNSET

from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.services.http.generation.chat import ChatChoice
from penstock.services.http.generation.generation import Events
from penstock.services.http.generation.replies import CalledTool, Delta
from penstock.services.http.responses.replies import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseReply,
    ResponseUsage,
)
from penstock.services.http.shared.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from penstock.services.http.shared.event_stream import DONE

Event = dict[str, Any]
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseEvents(Events):
    """Converter of one answer, which fills a response; a whole answer takes the same way.

    A stream ends with `[DONE]`, as the Open Responses specification demands.
    """

    end = DONE

    def __init__(
        self,
        response: ResponseReply,
        choice: ChatChoice,
        names: Mapping[str, tuple[str | None, str]],
        end_of_thought: list[int],
        keep: Callable[[ResponseReply], None],
    ) -> None:
        """Prepare the events of `response`.

        names: namespace and name of each function, by the name that the model sees.
        end_of_thought: the token ids of `</think>`. keep: called with the final response.
        """
        self.response = response
        self._choice = choice
        self._names = names
        self._end_of_thought = end_of_thought
        self._keep = keep
        self._num_events = 0
        self._item: OutputItem | None = None  # the last one of the response, while it is open
        self._pieces: list[str] = []  # of the open item's text

    def events(
        self, new: TextDelta | GenerateReply | None, reply: GenerateReply | None
    ) -> Iterator[Event]:
        """Yield the events of new tokens, and, with the reply, the last ones."""
        if not self._num_events:
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)
        for delta in self._choice.deltas(new, reply):
            yield from self._piece(delta)
        if reply:
            yield from self._end(reply)

    def whole(self, reply: GenerateReply) -> ResponseReply:
        """Return the response that the events of a whole answer add up to."""
        for _ in self.events(reply, reply):
            pass
        return self.response

    def failed(self, error: ApiError) -> Iterator[Event]:
        """Yield the event of an error after the first event."""
        detail = error.body.error
        yield from self._close("incomplete")
        self.response.status = "failed"
        code = _CODES.get(error.status, "server_error")
        if error.too_long:
            code = CONTEXT_LENGTH_EXCEEDED
        self.response.error = ResponseError(code=code, message=detail.message)
        self._keep(self.response)
        yield self._event("response.failed", response=self.response)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _of_item(self, kind: str, /, **fields: Any) -> Event:
        """Return an event about the last item."""
        index = len(self.response.output) - 1
        item_id = self.response.output[index].id
        return self._event(kind, item_id=item_id, output_index=index, **fields)

    def _of_part(self, kind: str, /, **fields: Any) -> Event:
        """Return an event about the only part of the last item."""
        return self._of_item(kind, content_index=0, **fields)

    def _piece(self, delta: Delta) -> Iterator[Event]:
        """Yield the events of one piece, which may end an item and begin another one."""
        if delta.reasoning:
            if not isinstance(self._item, ReasoningItem):
                yield from self._begin(ReasoningItem(id=_new_id("rs")))
            self._pieces.append(delta.reasoning)
            yield self._of_part("response.reasoning_text.delta", delta=delta.reasoning)
        elif delta.content:
            if not isinstance(self._item, OutputMessage):
                yield from self._begin(OutputMessage(id=_new_id("msg")))
            self._pieces.append(delta.content)
            yield self._of_part("response.output_text.delta", delta=delta.content, logprobs=[])
        for call in delta.tool_calls or ():
            yield from self._call(call)

    def _call(self, call: CalledTool) -> Iterator[Event]:
        name, arguments = call.function.name, call.function.arguments
        if call.id:
            namespace, name = self._names.get(name or "", (None, name or ""))
            item = FunctionCallItem(
                id=_new_id("fc"), call_id=call.id, name=name, namespace=namespace or UNSET
            )
            yield from self._begin(item)
        if arguments:
            self._pieces.append(arguments)
            yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self.response.output.append(item)
        self._item, self._pieces = item, []
        index = len(self.response.output) - 1
        yield self._event("response.output_item.added", output_index=index, item=item)
        if isinstance(item, OutputMessage):
            yield self._of_part("response.content_part.added", part=OutputText())
        elif isinstance(item, ReasoningItem):
            yield self._of_part("response.content_part.added", part=ReasoningText())

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        """End the open item."""
        item, text = self._item, "".join(self._pieces)
        match item:
            case None:
                return
            case OutputMessage():
                part = OutputText(text=text)
                item.content = [part]
                yield self._of_part("response.output_text.done", text=text, logprobs=[])
                yield self._of_part("response.content_part.done", part=part)
            case ReasoningItem():
                thought = ReasoningText(text=text)
                item.content = [thought]
                yield self._of_part("response.reasoning_text.done", text=text)
                yield self._of_part("response.content_part.done", part=thought)
            case FunctionCallItem():
                item.arguments = text
                yield self._of_item(
                    "response.function_call_arguments.done", name=item.name, arguments=text
                )
        item.status = status
        self._item = None
        index = len(self.response.output) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _end(self, reply: GenerateReply) -> Iterator[Event]:
        response = self.response
        if not response.output:
            yield from self._begin(OutputMessage(id=_new_id("msg")))
            # clients that measure wait for a piece, even if no token had text
            yield self._of_part("response.output_text.delta", delta="", logprobs=[])
        is_whole = reply.finish_reason == "stop"
        yield from self._close("completed" if is_whole else "incomplete")
        response.usage = self._usage(reply)
        if is_whole:
            response.status, response.completed_at = "completed", int(time.time())
            self._keep(response)
            yield self._event("response.completed", response=response)
        else:
            is_long = reply.finish_reason == "length"
            response.status = "incomplete"
            response.incomplete_details = {"reason": "max_output_tokens" if is_long else "abort"}
            self._keep(response)
            yield self._event("response.incomplete", response=response)

    def _usage(self, reply: GenerateReply) -> ResponseUsage:
        usage = reply.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details={"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            output_tokens=usage.output_tokens,
            output_tokens_details={"reasoning_tokens": self._num_reasoning_tokens(reply)},
            total_tokens=usage.prompt_tokens + usage.output_tokens,
        )

    def _num_reasoning_tokens(self, reply: GenerateReply) -> int:
        """Return the number of tokens up to `</think>`; without it, all are in reasoning."""
        output, ids, end = self.response.output, reply.token_ids, self._end_of_thought
        if not isinstance(output[0], ReasoningItem):
            return 0
        if len(output) == 1:
            return len(ids)
        length = len(end)
        starts = range(len(ids) - length + 1)
        return next((n + length for n in starts if ids[n : n + length] == end), len(ids))


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
