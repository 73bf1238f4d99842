"""HTTP connections with time-outs and limits, so that idle clients keep nobody out."""

import asyncio
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

PER_CLIENT, TOTAL = 32, 64  # open connections of one client address, and of all
# Seconds that a client has to send the head of a request, to send its body, and to read the
# reply. A body may have megabytes, over a slow line.
PATIENCE = {"head": 8.0, "body": 20.0, "reply": 20.0}


def _watched(method: Callable[[H11Protocol], None]) -> Callable[["Connection"], None]:
    """A method that runs uvicorn's, and then starts the clock if the server waits."""

    def call(self: "Connection") -> None:
        method(self)
        self._watch()

    return call


class Connection(H11Protocol):
    """A connection that is closed when its client takes too long, or when others need its place."""

    waiting = ""  # what the client is expected to send or read, a key of PATIENCE
    since = 0.0
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and close the connection that has been idle longest if there is none."""
        super().connection_made(transport)
        self._watch()
        self._make_room(PER_CLIENT, lambda other: other.address == self.address)
        self._make_room(TOTAL, lambda other: True)

    @property
    def address(self) -> str:
        """The client's address, without the port."""
        return self.client[0] if self.client else ""

    def drop(self) -> None:
        """Close at once, whatever is left to send."""
        self.connections.discard(self)
        self.transport.abort()

    handle_events = _watched(H11Protocol.handle_events)
    pause_writing = _watched(H11Protocol.pause_writing)
    resume_writing = _watched(H11Protocol.resume_writing)
    on_response_complete = _watched(H11Protocol.on_response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        if self.timer:
            self.timer.cancel()

    def shutdown(self) -> None:
        """Close, after the reply if one is due."""
        if self.waiting:
            self.drop()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a request; uvicorn would wait for unread replies."""
        self.drop()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP: in place of the reply to its request, or after it by closing."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.drop()

    def _make_room(self, limit: int, counts: Callable[["Connection"], bool]) -> None:
        found = [c for c in self.connections if isinstance(c, Connection) and counts(c)]
        if len(found) > limit:  # this connection is idle too, and closed if no other is
            min((c for c in found if c.waiting), key=lambda c: c.since).drop()

    def _watch(self) -> None:
        """Start the clock when the server begins to wait for the client."""
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
            self.timer = self.loop.call_later(PATIENCE[waiting], self.drop) if waiting else None
