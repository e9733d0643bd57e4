"""A server that answers as the Hugging Face Hub does, with repositories of a test."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.launch.pipeline.target import free_port

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"  # noqa: S105
CHUNK = 1 << 16


class FakeHub:
    """Repositories are folders by name; `gated` ones need TOKEN."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self.gated: set[str] = set()
        self.asked: list[str] = []
        """`METHOD path` of every request"""
        self.cut_after: dict[str, int] = {}
        """bytes after which a file's first transfer breaks"""
        self.held = threading.Event()
        """set: transfers of weights begin, and never end"""
        self.is_sending = threading.Event()
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        routes = [
            Route("/api/models/{org}/{repo}", self._info),
            Route("/api/models/{org}/{repo}/revision/{revision}", self._info),
            Route("/api/models/{org}/{repo}/tree/{revision}", self._tree),
            Route("/{org}/{repo}/resolve/{revision}/{path:path}", self._file),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            port=port,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Self:
        started = threading.Event()
        startup = self._server.startup

        async def notify(sockets: object = None) -> None:
            await startup(sockets)  # type: ignore[arg-type]
            started.set()

        self._server.startup = notify  # type: ignore[method-assign]
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.held.clear()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _refusal(self, request: Request, *, of_file: bool = False) -> Response | None:
        name = f"{request.path_params['org']}/{request.path_params['repo']}"
        self.asked.append(f"{request.method} {request.url.path}")
        token = request.headers.get("authorization", f"Bearer {TOKEN}").removeprefix("Bearer ")
        if token not in (TOKEN, "hf_other"):
            words = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return Response(status_code=401, headers=words)
        if name not in self.folders:
            return Response(status_code=401, headers={"X-Error-Code": "RepoNotFound"})
        if request.path_params.get("revision", "main") not in ("main", "v1", COMMIT):
            return Response(status_code=404, headers={"X-Error-Code": "RevisionNotFound"})
        has_access = request.headers.get("authorization") == f"Bearer {TOKEN}"
        if of_file and name in self.gated and not has_access:
            return Response(status_code=403, headers={"X-Error-Code": "GatedRepo"})
        return None

    def _folder(self, request: Request) -> Path:
        return self.folders[f"{request.path_params['org']}/{request.path_params['repo']}"]

    async def _info(self, request: Request) -> Response:
        refused = self._refusal(request)
        names = [] if refused else [path.name for path in self._folder(request).iterdir()]
        siblings = [{"rfilename": name} for name in names]
        return refused or JSONResponse({"id": "x/y", "sha": COMMIT, "siblings": siblings})

    async def _tree(self, request: Request) -> Response:
        refused = self._refusal(request)
        files = [] if refused else sorted(self._folder(request).iterdir())
        rows = [
            {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": _etag(one)}
            for one in files
        ]
        return refused or JSONResponse(rows)

    async def _file(self, request: Request) -> Response:
        if refused := self._refusal(request, of_file=True):
            return refused
        path = self._folder(request) / request.path_params["path"]
        if not path.exists():
            return Response(status_code=404, headers={"X-Error-Code": "EntryNotFound"})
        content, start = path.read_bytes(), 0
        if given := request.headers.get("range"):
            start = int(given.removeprefix("bytes=").partition("-")[0])
        headers = {
            "ETag": f'"{_etag(path)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(content) - start),
        }
        if given:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if request.method == "HEAD":
            return Response(headers=headers)
        end = self.cut_after.pop(path.name, len(content))
        body = self._body(path, content[start:end])
        return StreamingResponse(body, 206 if given else 200, headers=headers)

    def _body(self, path: Path, content: bytes) -> Iterator[bytes]:
        for start in range(0, len(content), CHUNK):
            yield content[start : start + CHUNK]
            if path.suffix == ".safetensors":
                self.is_sending.set()
                while self.held.is_set() and not self._server.should_exit:
                    self._left.wait(0.1)

    _left = threading.Event()


def _etag(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324  as git
