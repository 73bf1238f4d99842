"""Web server of the demo; pages load nothing from other hosts."""

import ipaddress
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from foveate.errors import ConfigError

if TYPE_CHECKING:
    from foveate.demo.pages import WebPage

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
BUSY = 96  # concurrent requests, including those of closed connections; more get status 503
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; "
        "style-src-attr 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(
    page: "WebPage",
    host: str,
    port: int,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve a page until Ctrl-C; `ready` receives its address. Port 0 selects a free port."""
    try:
        import uvicorn

        from foveate.demo.connections import Connection
        from foveate.demo.web import make_app
    except ImportError:
        raise ConfigError(
            "the demo requires starlette and uvicorn: pip install 'foveate[demo]'"
        ) from None
    with _bound(host, port) as bound, suppress(KeyboardInterrupt):
        address, used = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        # Accepting only loopback names prevents DNS rebinding from other sites.
        names = (*LOOPBACK, shown) if ipaddress.ip_address(address).is_loopback else ()
        app = make_app(page, names)
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="off",
            log_level="error", headers=list(HEADERS.items()), server_header=False,
            proxy_headers=False, limit_concurrency=BUSY, timeout_graceful_shutdown=5,
        )  # fmt: skip

        class Server(uvicorn.Server):
            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                app.state.closing = True
                super().handle_exit(sig, frame)

        ready(f"http://{shown}:{used}")
        Server(config).run(sockets=[bound])


def _bound(host: str, port: int) -> socket.socket:
    """Open the listening socket, so that the port is known before the server starts."""
    if not re.fullmatch(r"[A-Za-z0-9.:%_-]+", host):  # an empty host would mean all interfaces
        raise ConfigError(
            f"--host must be an address or a host name, got {host!r}; "
            "use 0.0.0.0 to listen on all interfaces"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With IPPROTO_TCP asyncio disables Nagle's algorithm: replies arrive 40 ms earlier.
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
            f"cannot listen on {host} port {port}: {reason}; choose another --host or --port"
        ) from None
