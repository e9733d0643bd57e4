"""`/openapi.json`, generated from the table of routes and their types."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.services.http.routes import Operation
from penstock.services.http.shared.errors import ErrorBody


def describe(operations: Sequence[Operation], version: str) -> bytes:
    """Return the document, as OpenAPI 3.1."""
    types = [ErrorBody, *(kind for one in operations for kind in (one.body, one.reply) if kind)]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    contents = {
        str(kind): {"application/json": {"schema": schema}}
        for kind, schema in zip(types, schemas, strict=True)
    }
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, contents)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _operation(one: Operation, contents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Describe a route. contents: by the name of the type."""
    content = contents[str(one.reply)] if one.reply else {}
    if one.media_type:
        content = content | {one.media_type: {"schema": {"type": "string"}}}
    described: dict[str, Any] = {
        "summary": (one.run.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "Success.", "content": content},
            "default": {"description": "An error.", "content": contents[str(ErrorBody)]},
        },
    }
    if one.body:
        described["requestBody"] = {"required": True, "content": contents[str(one.body)]}
    if not one.is_open:
        described["security"] = [{"key": []}, {}]
    return described
