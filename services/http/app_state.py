"""State that all routes share."""

import asyncio
import time

from penstock.protocol.checkpoint import max_request_bytes, read_model_config
from penstock.protocol.client.client import AsyncClient
from penstock.protocol.config import Config
from penstock.protocol.generation_config import read_generation_config
from penstock.protocol.tokenizer_file import read_chat_template
from penstock.services.http.errors import ApiError
from penstock.services.http.responses.store import ResponseStore
from penstock.services.http.tool_call_parser import format_of
from penstock.services.http.tool_grammar import ToolFormat

MAX_BATCH = 8
"""requests of the greatest length that one body with several inputs may have"""
START_TIMEOUT = 5.0
"""seconds that a request waits for a pipeline that is starting"""


class AppState:
    """A client of the pipeline, and properties of its model."""

    def __init__(self, config: Config, client: AsyncClient) -> None:
        folder = config.model_folder
        self.config = config
        self.client = client
        self.model = config.model_name
        self.created = int(time.time())
        model = read_model_config(folder)
        self.max_model_len = model.context(config.max_model_len)
        self.is_embedding_model = model.is_embedding_model
        self.max_request_bytes = max_request_bytes(config)
        self.max_batch_bytes = MAX_BATCH * self.max_request_bytes
        self.max_answers = config.max_running + config.max_waiting_requests
        """answers to one HTTP request: the gateway would refuse more"""
        given = config.tool_call_parser
        name = format_of(read_chat_template(folder)) if given == "auto" else given
        self.tool_format = ToolFormat(name)
        self.generation_config = read_generation_config(folder)
        self.end_of_thought: list[int] = []
        """token ids of `</think>`"""
        self.responses = ResponseStore()
        self._was_ready = asyncio.Event()

    async def start(self) -> None:
        """Wait for the pipeline, and examine its vocabulary."""
        await self.client.status(wait=True)
        tag = await self.client.tokenize("<tool_call>")
        self.tool_format = self.tool_format._replace(tags_are_tokens=len(tag.token_ids) == 1)
        self.end_of_thought = (await self.client.tokenize("</think>")).token_ids
        self._was_ready.set()

    def check_name(self, model: str | None) -> None:
        """Raise ApiError for the name of another model; None is any."""
        if model not in (None, self.model):
            sentence = f"model: got {model!r}, expected {self.model!r}"
            raise ApiError(404, sentence, "model", "model_not_found")

    async def check(self, model: str | None) -> None:
        """Raise ApiError for another model, and before the pipeline was ready for the first time.

        A request to a pipeline that was ready waits in the gateway while processes restart.
        """
        self.check_name(model)
        try:
            await asyncio.wait_for(self._was_ready.wait(), START_TIMEOUT)
        except TimeoutError:
            sentence = "the pipeline is starting; /health reports what is missing"
            raise ApiError(503, sentence) from None
