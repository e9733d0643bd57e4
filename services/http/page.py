"""The page at `/`: files of this folder's `page/`, read once."""

import mimetypes
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; font-src 'self'; img-src 'self' data:; "
        "script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""nothing comes from, or goes to, anywhere else"""


class Page:
    """The files, by name: no other file can be asked for."""

    def __init__(self, folder: Path = Path(__file__).parent / "page") -> None:
        self._files = {path.name: path.read_bytes() for path in folder.iterdir()}

    async def answer(self, request: Request) -> Response:
        """`/` is `index.html`."""
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise HTTPException(404)
        media_type = mimetypes.guess_type(name)[0]
        return Response(self._files[name], headers=_HEADERS, media_type=media_type)
