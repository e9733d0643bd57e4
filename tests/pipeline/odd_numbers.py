"""Requests with one odd number each, for every numeric field of every route of `/openapi.json`."""

import json
from collections.abc import Iterator
from typing import Any

_SOME = """
5e-324 -5e-324 1e-320 1e-46 1e-45 1.17e-38 1e-8 0.99999999999 1.0000000000000002 16777217 1e39
1.7976931348623157e308 -1.7976931348623157e308 1e400 -1e400 NaN Infinity -Infinity
0 0.0 -0 -0.0 -1 1 1.0 0.5 100.0 2147483647 2147483648 -2147483649 4294967296 9223372036854775807
9223372036854775808 -9223372036854775809 18446744073709551616 99999999999999999999.5
true false "1" [] {}
"""
NUMBERS = [*_SOME.split(), "1" + "0" * 400]
"""as texts: some are not JSON, or not numbers"""
_MESSAGES = [{"role": "user", "content": "17+25="}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "17+25=", "max_tokens": 4},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/v1/responses": {"input": "17+25=", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "17+25="},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["a"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
SAME = {"/v2/rerank": "/v1/rerank", "/rerank": "/v1/rerank", "/score": "/v1/score"}
"""further names of a route"""
WITHOUT_BODY = {"/ping"}
_MAX_DEPTH = 5
_KEY = "65"
"""of maps: a token id"""
_HOLE = "@"
Path = list[str | int]


def requests(document: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield route and body of every request; document: the OpenAPI document."""
    posts = {path for path, routes in document["paths"].items() if "post" in routes}
    assert posts == {*BODIES, *SAME, *WITHOUT_BODY}
    schemas = document["components"]["schemas"]
    for route, body in BODIES.items():
        content = document["paths"][route]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        for path in {json.dumps(one): one for one in _numbers(schema, schemas, [])}.values():
            text = json.dumps(_filled(body, path))
            for number in NUMBERS:
                yield route, text.replace(f'"{_HOLE}"', number).encode()


def _numbers(schema: dict[str, Any], schemas: dict[str, Any], path: Path) -> Iterator[Path]:
    """Yield the paths of numbers and booleans in a schema."""
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if len(path) > _MAX_DEPTH:
        return
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _numbers(one, schemas, path)
    if schema.get("type") in ("integer", "number", "boolean"):
        yield path
    for name, one in schema.get("properties", {}).items():
        yield from _numbers(one, schemas, [*path, name])
    for name, key in (("items", 0), ("additionalProperties", _KEY)):
        if isinstance(schema.get(name), dict):
            yield from _numbers(schema[name], schemas, [*path, key])


def _filled(body: Any, path: Path) -> Any:
    """Return the body with `_HOLE` at a path."""
    if not path:
        return _HOLE
    key, *rest = path
    if key == 0:
        return [_filled(body[0] if isinstance(body, list) else None, rest)]
    body = body if isinstance(body, dict) else {}
    return body | {key: _filled(body.get(key), rest)}
