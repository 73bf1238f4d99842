"""Open the demo page for some networks, and serve it; pages load nothing from other hosts."""

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from foveate.data.sources import load_source
from foveate.demo.digit_page import DigitPage
from foveate.demo.networks import to_digit_networks, to_photo_networks
from foveate.demo.photo_page import PhotoPage
from foveate.errors import ConfigError
from foveate.evaluation.models import TIMM, load_model

WebPage: TypeAlias = DigitPage | PhotoPage
DEFAULT_NETWORKS = ("cnn-mnist-tr2", "fovmax-mnist-tr2", "fovavg-mnist-tr2")
MAX_NETWORKS = 4  # networks that fit next to each other on the page

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


def open_page(
    refs: Sequence[str] = (),
    *,
    trust: bool = False,
    pretrained: bool = False,
    weights: str | Path | None = None,
) -> WebPage:
    """Load networks as `load_model` does, and build the page for digits or for photographs."""
    if len(refs) > MAX_NETWORKS:
        raise ConfigError(
            f"the demo compares at most {MAX_NETWORKS} networks, got {len(refs)}; remove --model "
            "options"
        )
    timm = [ref for ref in refs if ref.startswith(TIMM)]
    start: dict[str, Any] = {"pretrained": pretrained, "weights": weights}
    if not timm and (pretrained or weights):
        option = "--pretrained" if pretrained else "--weights"
        raise ConfigError(f"{option} applies to timm models only: add --model timm:NAME")
    if weights and len(timm) > 1:
        raise ConfigError(f"--weights is for one timm model, got {len(timm)}; use --pretrained")
    if timm and not (pretrained or weights):
        raise ConfigError(f"{timm[0]} has no trained weights here: add --pretrained or --weights")
    chosen = refs or DEFAULT_NETWORKS
    models = [load_model(r, trust=trust, **(start if r in timm else {})) for r in chosen]
    photos = [m for m in models if (m.photo and m.config) or m.name.startswith(TIMM)]
    if not photos:
        return DigitPage(to_digit_networks(models), load_source("mnist-5k").test)
    if other := next((model for model in models if model not in photos), None):
        raise ConfigError(
            f"{photos[0].name} classifies photographs and {other.name} does not; run a separate "
            "demo for each"
        )
    return PhotoPage(to_photo_networks(models))


def serve(
    page: WebPage,
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
