"""Web application of a page: fixed files, and JSON requests without paths or URLs."""

import asyncio
import inspect
import json
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from foveate.demo.uploads import MAX_FILE_BYTES
from foveate.errors import ConfigError, FoveateError
from foveate.files import parse_json

if TYPE_CHECKING:
    from foveate.demo.server import WebPage

MAX_REQUEST_BYTES = 4 * MAX_FILE_BYTES // 3 + 2**16  # a base64 file and other fields
KINDS = {".css": "text/css", ".js": "text/javascript"}
HERE = Path(__file__).parent
Handler: TypeAlias = Callable[..., dict[str, Any]]


def make_app(page: "WebPage", names: Collection[str] = ()) -> Starlette:
    """Build the application. With `names`, it rejects requests for any other host name.

    Each request is a method of the page: its name is the path, and its arguments are the fields of
    the JSON object. It returns the reply, or raises a `FoveateError` with a message for the user.
    A single thread does all computation, so that requests queue instead of competing for cores.
    Set `app.state.closing` to reject queued requests, so that the server can shut down.
    """
    files = [_file("", page.html(), "text/html")]
    for path in (HERE / name for name in page.files):
        files.append(_file(path.name, path.read_text("utf-8"), KINDS[path.suffix]))
    app = Starlette(
        routes=[*files, *map(_request, page.requests())],
        exception_handlers=dict.fromkeys((HTTPException, ClientDisconnect, FoveateError), _refuse),
    )
    app.router.redirect_slashes = False
    app.state.names, app.state.closing = names, False
    # A second core does not help with one digit: three networks take 4 ms on one or two cores.
    app.state.worker = ThreadPoolExecutor(1, "foveate-demo", lambda: torch.set_num_threads(1))
    return app


def _file(name: str, text: str, kind: str) -> Route:
    async def reply(request: Request) -> Response:
        _check_origin(request)
        return Response(text, media_type=kind)

    return Route(f"/{name}", reply)


def _request(work: Handler) -> Route:
    form = inspect.signature(work)

    async def reply(request: Request) -> Response:
        _check_origin(request)
        _check_posted(request)
        fields = _parse(await _body(request))
        try:
            form.bind(**fields)
        except TypeError as error:
            raise HTTPException(400, f"invalid request fields: {error}") from None

        def run() -> dict[str, Any]:
            if request.app.state.closing:
                raise ConfigError("the server is shutting down")
            return work(**fields)

        worker = request.app.state.worker
        return _json(await asyncio.get_running_loop().run_in_executor(worker, run))

    return Route(f"/{work.__name__}", reply, methods=["POST"])


def _check_origin(request: Request) -> None:
    """Reject requests from pages of other sites, and requests for other host names."""
    host, names = request.headers.get("host", ""), request.app.state.names
    if names and host.rpartition(":")[0] not in names and host not in names:
        raise HTTPException(400, f"unknown host {host}; open the address that foveate demo prints")
    for origin in request.headers.getlist("origin"):
        if origin not in (f"http://{host}", f"https://{host}"):
            raise HTTPException(403, f"requests from {origin} are not allowed")


def _check_posted(request: Request) -> None:
    sites = request.headers.getlist("sec-fetch-site")
    if not {"same-origin", "none"}.issuperset(sites):
        raise HTTPException(403, "requests from other sites are not allowed")
    kinds = [kind.partition(";")[0].strip() for kind in request.headers.getlist("content-type")]
    if kinds != ["application/json"]:
        raise HTTPException(415, "the content type must be application/json")
    if int(request.headers.get("content-length", 0)) > MAX_REQUEST_BYTES:
        raise HTTPException(413, f"the request is larger than {MAX_REQUEST_BYTES} bytes")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_REQUEST_BYTES:
            raise HTTPException(413, f"the request is larger than {MAX_REQUEST_BYTES} bytes")
    return bytes(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        fields = parse_json(body.decode("utf-8"))
    except ValueError:  # not UTF-8, not JSON, too long a number, or too deeply nested
        raise HTTPException(400, "the request is not valid JSON") from None
    if not isinstance(fields, dict):
        raise HTTPException(400, "the request is not a JSON object")
    return fields


def _json(reply: dict[str, Any], status: int = 200) -> Response:
    # ASCII escapes: a file name can contain a lone surrogate, which UTF-8 cannot encode.
    return Response(json.dumps(reply), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    """Reply to a rejected request; the client of an incomplete request has disconnected."""
    if isinstance(error, HTTPException):
        return _json({"error": error.detail[:200]}, error.status_code)
    return _json({"error": str(error) or "incomplete request"}, 400)
