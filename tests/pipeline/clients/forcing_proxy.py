"""A server between an agent and a pipeline, which decides what the model has to write.

The demo model can't follow an agent's prompt. So each request is changed: the model must call the
next tool of a list, with given arguments, or must write the last sentence. The pipeline writes the
call by the grammar of the forced tool, and parses it as any other call.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx

MAX_TOKENS = 400
LAST = "The tools have answered."


class Call(NamedTuple):
    """A call that the model has to make."""

    name: str
    arguments: dict[str, Any]
    namespace: str | None = None


class Conversation(NamedTuple):
    """Requests of an agent, and the headers and errors that it got."""

    url: str
    bodies: list[dict[str, Any]]
    headers: list[httpx.Headers]
    errors: list[str]


def results(body: dict[str, Any]) -> list[str]:
    """Return the results of tools in a request, as JSON."""
    items = [item for item in body.get("input", ()) if item["type"] == "function_call_output"]
    messages = [message for message in body.get("messages", ()) if message["role"] == "tool"]
    return [json.dumps(each) for each in [*items, *messages]]


def force(body: dict[str, Any], calls: list[Call]) -> None:
    """Change a request so that its answer is the next call, or the last sentence."""
    is_response = "input" in body
    if is_response:
        body |= {"truncation": "auto", "max_output_tokens": MAX_TOKENS}
    else:
        body |= {"truncate_prompt_tokens": -1, "max_tokens": MAX_TOKENS}
    number = len(results(body))
    if not body.get("tools") or number == len(calls):
        body |= {"tool_choice": "none", "structured_outputs": {"choice": [LAST]}}
        return
    call = calls[number]
    named = {"name": call.name} | ({"namespace": call.namespace} if call.namespace else {})
    body["tool_choice"] = {"type": "function", **(named if is_response else {"function": named})}
    tools: list[Any] = body["tools"]
    if call.namespace:
        (tools,) = (tool["tools"] for tool in tools if tool.get("name") == call.namespace)
    functions = (tool.get("function", tool) for tool in tools)
    next(each for each in functions if each.get("name") == call.name)["parameters"] = {
        "type": "object",
        "properties": {name: {"const": value} for name, value in call.arguments.items()},
        "required": list(call.arguments),
        "additionalProperties": False,
    }


@contextmanager
def forcing(url: str, key: str, calls: list[Call]) -> Iterator[Conversation]:
    """Serve before `url`. `conversation.url` is the base URL for an agent."""
    client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(client.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            conversation.bodies.append(json.loads(json.dumps(body)))
            force(body, calls)
            response = client.post(self.path, json=body)
            conversation.headers.append(response.headers)
            if response.is_error:
                conversation.errors.append(response.text)
            self.pass_on(response)

        def pass_on(self, response: httpx.Response) -> None:
            self.send_response(response.status_code)
            self.send_header("content-type", response.headers["content-type"])
            self.send_header("content-length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    conversation = Conversation(f"http://127.0.0.1:{server.server_port}/v1", [], [], [])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield conversation
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()
