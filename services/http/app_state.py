"""What all routes share."""

import asyncio
import time

from penstock.protocol.checkpoint import max_request_bytes, read_model_config
from penstock.protocol.client.client import AsyncClient
from penstock.protocol.config import Config
from penstock.services.http.errors import ApiError

START_TIMEOUT = 5.0
"""seconds that a request waits for a pipeline that is not there yet"""
_DEMO = "qwen3-demo"


class Service:
    """The pipeline behind the routes, and what is known of its model."""

    def __init__(self, config: Config, client: AsyncClient) -> None:
        folder = config.model_folder
        self.config = config
        self.client = client
        self.model = config.served_model_name or (folder.name if config.model else _DEMO)
        self.created = int(time.time())
        model = read_model_config(folder)
        self.max_model_len = model.context(config.max_model_len)
        self.max_request_bytes = max_request_bytes(config)
        self.max_answers = config.max_running + config.max_waiting_requests
        """to one HTTP request: the gateway would refuse more"""
        self.tags_are_tokens = False
        """the vocabulary has `<tool_call>`"""
        self._was_ready = asyncio.Event()

    async def start(self) -> None:
        """Waits for the pipeline, and looks at its vocabulary."""
        await self.client.status(wait=True)
        tag = await self.client.tokenize("<tool_call>")
        self.tags_are_tokens = len(tag.token_ids) == 1
        self._was_ready.set()

    async def check(self, model: str | None) -> None:
        """Raises ApiError if the pipeline was not ready yet, or for another model. One that was
        ready is asked in any case: what restarts goes on with what it is asked."""
        if model not in (None, self.model):
            sentence = f"model is {model!r}; {self.model!r} is served"
            raise ApiError(404, sentence, "model", "model_not_found")
        try:
            await asyncio.wait_for(self._was_ready.wait(), START_TIMEOUT)
        except TimeoutError:
            headers = {"Retry-After": "1"}
            raise ApiError(503, "the pipeline starts; /health says more", headers=headers) from None
