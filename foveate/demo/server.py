"""Serve the page: on loopback unless told otherwise, with nothing fetched from outside."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from foveate.data.sources import load_source
from foveate.demo.handlers import Handlers
from foveate.demo.networks import Contender
from foveate.demo.uploads import BYTES
from foveate.errors import ConfigError
from foveate.files import cache_dir

if TYPE_CHECKING:
    from fastapi import FastAPI

LIMIT = 2 * BYTES  # of a request: a file in base64, and what goes with it
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# The browser itself enforces that nothing is fetched from elsewhere. Gradio builds functions from
# texts, which it calls 'unsafe-eval'.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'"
)


def serve(
    contenders: Sequence[Contender],
    host: str,
    port: int,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until Ctrl-C; `ready` is told its address. Port 0 takes any that is free."""
    with _bound(host, port) as bound:
        app = make_app(contenders, host)
        import uvicorn

        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{bound.getsockname()[1]}")
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=1, limit_concurrency=200
        )
        with suppress(KeyboardInterrupt):  # how it ends
            uvicorn.Server(config).run(sockets=[bound])


def make_app(contenders: Sequence[Contender], host: str) -> "FastAPI":
    """The page as a web application, guarded."""
    # Read when gradio is imported: nothing is counted or sent, and files stay in the cache.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["GRADIO_TEMP_DIR"] = str(cache_dir() / "demo")
    os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "demo" / "matplotlib"))
    try:
        import gradio as gr
    except ImportError:
        raise ConfigError("the page needs gradio: pip install 'foveate[demo]'") from None
    from fastapi import FastAPI
    from fastapi.middleware.trustedhost import TrustedHostMiddleware

    from foveate.demo.app import build, head, theme

    page = build(Handlers(contenders, load_source("mnist-5k").test))
    page.queue(default_concurrency_limit=1, max_size=100)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard)
    if host in LOOPBACK:  # another site cannot pretend that its name means this machine
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"])
    guarded: FastAPI = gr.mount_gradio_app(
        app, page, "/", server_name=host, theme=theme(), head=head(), footer_links=[],
        run_history=False, ssr_mode=False, mcp_server=False, pwa=False, show_error=True,
        max_file_size=BYTES,
    )  # fmt: skip
    return guarded


class Guard:
    """Refuse requests that are too large, and tell browsers to fetch nothing from elsewhere."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > LIMIT:
            await _refuse(send, 413)
            return
        if scope["path"].startswith("/gradio_api/upload"):  # files come with questions, unstored
            await _refuse(send, 404)
            return
        arrived = 0

        async def counted() -> Any:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            return message if arrived <= LIMIT else {"type": "http.disconnect"}

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"content-security-policy", POLICY.encode()))
            await send(message)

        await self.app(scope, counted, guarded)


async def _refuse(send: Any, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body"})


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens; bound here, so that the address is known before the page is served."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By the protocol asyncio knows to send small packets at once: 40 ms less for an answer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen()
        return bound
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port} ({reason}); choose another --host or --port"
        ) from None
