"""Bodies of responses in JSON."""

import msgspec
from starlette.responses import Response

ENCODER = msgspec.json.Encoder()


def json_response(body: object, status: int = 200) -> Response:
    """Return a response with a body in JSON."""
    return Response(ENCODER.encode(body), status, media_type="application/json")
