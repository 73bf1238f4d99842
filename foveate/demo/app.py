"""The page as a web application: fixed files, and JSON requests that name no file or address."""

import html
import inspect
import json
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from foveate.demo.handlers import SEEDS, START, Handlers, Reply
from foveate.demo.scenes import FEWEST, MOST
from foveate.demo.uploads import BYTES

LIMIT = 4 * BYTES // 3 + 2**16  # bytes of a request: a file in base64, and what goes with it
FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "digit.js": "text/javascript",
    "scene.js": "text/javascript",
}
UNSEEN = (
    "The digits to pick from, here and in the scenes, are test digits these networks never saw."
)
MAYBE_SEEN = (
    "The digits to pick from, here and in the scenes, belong to MNIST's training set, on which "
    "these networks were trained: the page shows how they work, not how accurate they are."
)
HERE = Path(__file__).parent
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def make_app(handlers: Handlers, names: Collection[str] = ()) -> Starlette:
    """Build the application; if `names` are given, requests for another host are refused."""
    pages = {"": (render(handlers), "text/html")}
    pages |= {name: ((HERE / name).read_text("utf-8"), kind) for name, kind in FILES.items()}
    requests = (handlers.look, handlers.take, handlers.offer, handlers.scene)
    app = Starlette(
        routes=[
            *(Route(f"/{name}", _page(*page, names)) for name, page in pages.items()),
            *(
                Route(f"/{work.__name__}", _work(work, names), methods=["POST"])
                for work in requests
            ),
        ],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _refuse},
    )
    app.router.redirect_slashes = False
    return app


def render(handlers: Handlers) -> str:
    """Fill in the HTML of the page as it is when it opens."""
    own = all(contender.network.source == "mnist-5k" for contender in handlers.contenders)
    networks = "".join(
        f'<label><input type="radio" name="network" value="{k}"{"" if k else " checked"}>'
        f"{html.escape(contender.title)}</label>"
        for k, contender in enumerate(handlers.explorers)
    )
    return Template((HERE / "page.html").read_text("utf-8")).substitute(
        handlers.start(), offer=handlers.offer(0)["html"], zoom=f"× {START[1]:.2f}", octave=1,
        bytes=BYTES, fewest=FEWEST, most=MOST, seeds=SEEDS, origin=UNSEEN if own else MAYBE_SEEN,
        networks=networks or "none has scale channels",
    )  # fmt: skip


def _page(text: str, kind: str, names: Collection[str]) -> Endpoint:
    async def answer(request: Request) -> Response:
        _check_origin(request, names)
        return Response(text, media_type=kind)

    return answer


def _work(work: Callable[..., Reply], names: Collection[str]) -> Endpoint:
    form = inspect.signature(work)

    async def answer(request: Request) -> Response:
        _check_origin(request, names)
        _check_posted(request)
        question = _parse(await _body(request))
        try:
            form.bind(**question)
        except TypeError as error:
            raise HTTPException(400, f"the request does not fit: {error}") from None
        reply = await run_in_threadpool(work, **question)
        return _json(reply, 400 if "error" in reply else 200)

    return answer


def _check_origin(request: Request, names: Collection[str]) -> None:
    """Refuse requests that a page of another site makes, or that reach this one by another name."""
    host = request.headers.get("host", "")
    if names and host.rpartition(":")[0] not in names and host not in names:
        raise HTTPException(400, f"this page is not served as {host}")
    for origin in request.headers.getlist("origin"):
        if origin not in (f"http://{host}", f"https://{host}"):
            raise HTTPException(403, f"requests from {origin} are refused")


def _check_posted(request: Request) -> None:
    sites = request.headers.getlist("sec-fetch-site")
    if not {"same-origin", "none"}.issuperset(sites):
        raise HTTPException(403, "requests from other sites are refused")
    kinds = [kind.partition(";")[0].strip() for kind in request.headers.getlist("content-type")]
    if kinds != ["application/json"]:
        raise HTTPException(415, "the content type must be application/json")
    if int(request.headers.get("content-length", 0)) > LIMIT:
        raise HTTPException(413, f"the request is larger than {LIMIT} bytes")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LIMIT:
            raise HTTPException(413, f"the request is larger than {LIMIT} bytes")
    return bytes(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        question = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):  # not UTF-8, not JSON, digits or levels without end
        raise HTTPException(400, "the request is not valid JSON") from None
    if not isinstance(question, dict):
        raise HTTPException(400, "the request is not a JSON object")
    return question


def _json(reply: Reply, status: int) -> Response:
    # In ASCII: a name may hold half a surrogate pair, which UTF-8 cannot encode.
    return Response(json.dumps(reply), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer a refused request; one that was not sent to its end has nobody left to answer."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    return _json({"error": str(getattr(error, "detail", "incomplete"))[:200]}, status)
