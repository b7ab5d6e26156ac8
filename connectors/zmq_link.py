"""ZeroMQ as the peer connectors use it: a ROUTER that answers, and a link that says when it breaks."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from connectors.connections import BrokenError

#: What `host` may look like; `ipc://`, `inproc://` and ZeroMQ's "source;destination" form must not pass.
HOST_PATTERN = r"\A([A-Za-z0-9._-]{1,255}|\[?[0-9A-Fa-f:.]{2,45}\]?)\Z"

_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def endpoint_of(host: str, port: int) -> str:
    """ZeroMQ's name of a TCP port; an IPv6 address may come with its brackets or without."""
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{bracketed}:{port}"


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, max_frame_bytes: int, max_queued: int
) -> tuple[zmq.Socket[bytes], int]:
    """A bound ROUTER and its port. `max_queued` messages wait for one peer, more are dropped: its sends never wait.
    Raises zmq.ZMQError where it cannot be bound."""
    socket = context.socket(zmq.ROUTER)
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
        socket.set(zmq.SNDHWM, max_queued)
        socket.set(zmq.IPV6, int("[" in endpoint))
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket, int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


class Link:
    """A DEALER connected to one address, for one thread.

    ZeroMQ would reconnect behind our back and lose what was in flight, so that is switched off: a link that breaks says
    so, once and for all. The constructor raises BrokenError where the address cannot be used; it does not wait.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        connect_timeout_s: float,
        max_frame_bytes: int,
        max_queued: int,
    ) -> None:
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL, -1)
        self.socket.set(zmq.CONNECT_TIMEOUT, max(1, int(connect_timeout_s * 1000)))
        self.socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
        self.socket.set(zmq.RCVHWM, max_queued)
        self.socket.set(zmq.IPV6, int("[" in address))
        self.monitor = self.socket.get_monitor_socket(_BROKEN)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise BrokenError(f"cannot connect to {address}: {error}") from None

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)

    def unregister(self, poller: zmq.Poller) -> None:
        poller.unregister(self.socket)
        poller.unregister(self.monitor)

    def send(self, frame: bytes) -> None:
        """Raises BrokenError where the peer takes nothing any more. Never waits."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise BrokenError(f"{self.address} takes nothing any more", was_up=True) from None

    def receive(self) -> list[zmq.Frame] | None:
        """One message, or None where none is there."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def check(self) -> None:
        """Raise BrokenError if the link broke. Called after everything was received, so that what had come counts."""
        try:
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return
        if event["event"] == zmq.EVENT_DISCONNECTED:
            raise BrokenError(f"the connection to {self.address} was lost", was_up=True)
        raise BrokenError(f"the connection to {self.address} could not be made")

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
