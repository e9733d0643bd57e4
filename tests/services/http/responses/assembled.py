"""Streams of responses, put together as a client does it."""

import json
from typing import Any


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response that events add up to, after checks of their order and of each end."""
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    first, second, *middle, last = events
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    response = json.loads(json.dumps(first["response"]))
    assert (response["status"], response["output"]) == ("in_progress", [])
    for event in middle:
        _add(response["output"], event)
    assert [item["status"] for item in response["output"][:-1]] == ["completed"] * (
        len(response["output"]) - 1
    )
    status = last["type"].removeprefix("response.")
    assert last["response"]["status"] == status
    assert last["response"]["output"] == response["output"]
    return last["response"]  # type: ignore[no-any-return]


def _add(output: list[dict[str, Any]], event: dict[str, Any]) -> None:
    kind = event["type"].removeprefix("response.")
    if kind == "output_item.added":
        assert event["output_index"] == len(output)
        assert event["item"]["status"] == "in_progress"
        output.append(event["item"])
        return
    assert event["output_index"] == len(output) - 1
    item = output[-1]
    assert item["status"] == "in_progress"
    assert event.get("item_id", item["id"]) == item["id"]
    assert event.get("content_index", 0) == 0
    part = (item.get("content") or [{}])[0]
    match kind:
        case "content_part.added":
            assert item["content"] == []
            item["content"].append(event["part"])
        case "output_text.delta" | "reasoning_text.delta":
            assert event["delta"]
            part["text"] += event["delta"]
        case "output_text.done" | "reasoning_text.done":
            assert event["text"] == part["text"]
            assert event.get("logprobs") == part.get("logprobs")
        case "content_part.done":
            assert event["part"] == part
        case "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        case "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        case _:
            assert kind == "output_item.done"
            assert event["item"] | {"status": "in_progress"} == item
            item["status"] = event["item"]["status"]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without its random ids and its times."""
    items = [
        {k: v for k, v in one.items() if k not in ("id", "call_id")} for one in response["output"]
    ]
    return response | {"id": "", "created_at": 0, "completed_at": 0, "output": items}
