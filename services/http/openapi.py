"""`/openapi.json`, made from the table of routes and the structs that decode and encode."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.services.http.replies import ErrorBody
from penstock.services.http.routes import Operation


def describe(operations: Sequence[Operation], version: str) -> bytes:
    """Return the document, as OpenAPI 3.1."""
    types = [ErrorBody, *(kind for one in operations for kind in (one.body, one.reply) if kind)]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _operation(one: Operation) -> dict[str, Any]:
    content = _content(one.reply) if one.reply else {}
    if one.media_type:
        content[one.media_type] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "summary": (one.run.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "Success.", "content": content},
            "default": {"description": "An error.", "content": _content(ErrorBody)},
        },
    }
    if one.body:
        described["requestBody"] = {"required": True, "content": _content(one.body)}
    if not one.is_open:
        described["security"] = [{"key": []}, {}]
    return described


def _content(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
