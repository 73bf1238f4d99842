"""HTTP connections with timeouts and limits, so that idle clients cannot block the server."""

import asyncio
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PER_CLIENT, TOTAL = 32, 64  # maximum open connections per client address and in total
# Timeouts in seconds for sending the headers of a request, sending its body, and reading the
# reply. A body can be several megabytes on a slow connection.
TIMEOUTS = {"head": 8.0, "body": 20.0, "reply": 20.0}


def _watched(method: Callable[[H11Protocol], None]) -> Callable[["Connection"], None]:
    """Wrap a uvicorn method so that it updates the timeout afterwards."""

    def call(self: "Connection") -> None:
        method(self)
        self._watch()

    return call


class Connection(H11Protocol):
    """HTTP connection that closes on a timeout, or if idle when the limit is reached."""

    waiting = ""  # key of TIMEOUTS while the server waits for the client, else empty
    since = 0.0
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, and close the longest-idle one if a limit is exceeded."""
        super().connection_made(transport)
        self._watch()
        self._make_room(PER_CLIENT, lambda other: other.address == self.address)
        self._make_room(TOTAL, lambda other: True)

    @property
    def address(self) -> str:
        """Client address without the port."""
        return self.client[0] if self.client else ""

    def drop(self) -> None:
        """Close immediately and discard unsent data."""
        self.connections.discard(self)
        self.transport.abort()

    handle_events = _watched(H11Protocol.handle_events)
    pause_writing = _watched(H11Protocol.pause_writing)
    resume_writing = _watched(H11Protocol.resume_writing)
    on_response_complete = _watched(H11Protocol.on_response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        super().connection_lost(exc)
        if self.timer:
            self.timer.cancel()

    def shutdown(self) -> None:
        """Close the connection, after sending the pending reply if there is one."""
        if self.waiting:
            self.drop()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; uvicorn would wait until pending replies are read."""
        self.drop()

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP with status 400, or close if a reply has already started."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.drop()

    def _make_room(self, limit: int, counts: Callable[["Connection"], bool]) -> None:
        found = [c for c in self.connections if isinstance(c, Connection) and counts(c)]
        if len(found) > limit:  # the new connection counts as idle: it is closed if no other is
            min((c for c in found if c.waiting), key=lambda c: c.since).drop()

    def _watch(self) -> None:
        """Start the timeout when the server begins to wait for the client."""
        if self.flow.write_paused:
            waiting = "reply"
        elif self.cycle is None or self.cycle.response_complete:
            waiting = "head"
        else:
            waiting = "body" if self.cycle.more_body else ""
        if waiting != self.waiting:
            if self.timer:
                self.timer.cancel()
            self.waiting, self.since = waiting, self.loop.time()
            self.timer = self.loop.call_later(TIMEOUTS[waiting], self.drop) if waiting else None
