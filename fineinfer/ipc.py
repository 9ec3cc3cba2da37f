"""Sockets between the processes: zmq ROUTER/DEALER over ipc, typed msgpack, a per-boot token (no torch)."""

from __future__ import annotations

import hmac
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from fineinfer.messages import MAX_MESSAGE_BYTES

SendT = TypeVar("SendT")
RecvT = TypeVar("RecvT")
HIGH_WATER_MARK = 100_000


class ProtocolError(Exception):
    """A peer sent something that is not a message of the agreed type."""


class Codec(Generic[SendT, RecvT]):
    """Encodes what one side sends and decodes what it receives.

    Args:
        recv_type: Union of the structs this side accepts.
    """

    def __init__(self, recv_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RecvT] = msgspec.msgpack.Decoder(recv_type)

    def encode(self, message: SendT) -> bytes:
        """Message -> msgpack bytes."""
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> RecvT:
        """Msgpack bytes -> message.

        Raises:
            ProtocolError: Too large, malformed, or of an unknown type.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {len(data)} bytes is over the cap of {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(str(error)) from error


def _configure(socket: Any) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + 1024)


def _bind(socket: Any, address: str) -> None:
    _configure(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.bind(address)


class _Gate(Generic[SendT, RecvT]):
    """Lets only whole messages with the right token in."""

    def __init__(self, token: bytes, recv_type: Any) -> None:
        self._token = token
        self.codec: Codec[SendT, RecvT] = Codec(recv_type)

    def open(self, frames: list[bytes]) -> tuple[bytes, RecvT] | None:
        """(peer identity, message) of received frames; None if they are to be dropped."""
        if len(frames) != 3 or not hmac.compare_digest(frames[1], self._token):
            return None
        try:
            return frames[0], self.codec.decode(frames[2])
        except ProtocolError:
            return None


class Router(Generic[SendT, RecvT]):
    """The bound side; blocking API for the engine loop.

    Args:
        address: ``ipc://`` address to bind.
        token: Secret that the first frame of every message must carry.
        recv_type: Union of the accepted structs.
    """

    def __init__(self, address: str, token: bytes, recv_type: Any) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        _bind(self._socket, address)
        self._gate: _Gate[SendT, RecvT] = _Gate(token, recv_type)

    def poll(self, timeout_ms: int) -> bool:
        """Whether a message waits, after at most ``timeout_ms``."""
        return bool(self._socket.poll(timeout_ms))

    def recv(self) -> tuple[bytes, RecvT] | None:
        """Next (peer identity, message), or None if none waits. Frames that fail the token or codec are dropped."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if (item := self._gate.open(frames)) is not None:
                return item

    def send(self, peer: bytes, message: SendT) -> bool:
        """Send to one peer; False if that peer is gone."""
        try:
            self._socket.send_multipart([peer, self._gate.codec.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class AsyncRouter(Generic[SendT, RecvT]):
    """The bound side for asyncio programs (the supervisor's control socket); arguments as for ``Router``."""

    def __init__(self, address: str, token: bytes, recv_type: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        _bind(self._socket, address)
        self._gate: _Gate[SendT, RecvT] = _Gate(token, recv_type)

    async def recv(self) -> tuple[bytes, RecvT]:
        """Next (peer identity, message); frames that fail the token or codec are dropped."""
        while True:
            frames = await self._socket.recv_multipart()
            if (item := self._gate.open(frames)) is not None:
                return item

    async def send(self, peer: bytes, message: SendT) -> bool:
        """Send to one peer; False if that peer is gone."""
        try:
            await self._socket.send_multipart([peer, self._gate.codec.encode(message)])
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class AsyncDealer(Generic[SendT, RecvT]):
    """The connecting side for asyncio programs; reconnects by itself when the bound side comes back.

    Args:
        address: ``ipc://`` address of the Router.
        token: The shared secret.
        identity: Unique name of this peer.
        recv_type: Union of the accepted structs.
    """

    def __init__(self, address: str, token: bytes, identity: bytes, recv_type: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(address)
        self._token = token
        self._codec: Codec[SendT, RecvT] = Codec(recv_type)

    async def send(self, message: SendT) -> None:
        """Queue one message (kept while the other side is away)."""
        await self._socket.send_multipart([self._token, self._codec.encode(message)])

    async def recv(self) -> RecvT:
        """Next message.

        Raises:
            ProtocolError: The bound side sent something else.
        """
        frames = await self._socket.recv_multipart()
        return self._codec.decode(frames[-1])

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
        self._socket.close()
