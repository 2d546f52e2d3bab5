"""Messages out of the bytes of a connection and back, encrypted or sealed, without the connection itself."""

from __future__ import annotations

import hmac
import ssl
import struct
from contextlib import suppress

STRANGERS_BYTES = 4096
"""The longest message before the other end is known."""
MOST_BYTES = 64 * 1024 * 1024
"""The longest message after that: a setup with the largest code that a job may have fits."""
CHUNK_BYTES = 1 << 18
SEAL_BYTES = 32
SIZE = struct.Struct(">I")


class Wire:
    """One end of a connection. The caller locks: two threads in one TLS object at once would break it.

    Args:
        context: For TLS; None: messages travel as they are, sealed once there is a key.
        server_name: The address that was called, which the other end's certificate must name; None: this is the end
            that was called.
    """

    def __init__(self, context: ssl.SSLContext | None, server_name: str | None = None) -> None:
        is_server = server_name is None
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = None
        if context is not None:
            self._tls = context.wrap_bio(self._in, self._out, server_side=is_server, server_hostname=server_name)
        self._shaken = self._tls is None
        self._names = (b"listener", b"caller") if is_server else (b"caller", b"listener")
        self._received, self._waiting = bytearray(), bytearray()
        self._key = b""
        self._most_bytes = STRANGERS_BYTES
        self._num_sent = self._num_received = 0

    def seal(self, key: str) -> None:
        """The other end is known: from now on messages may be long, and are sealed where they are not encrypted."""
        self._key = b"" if self._tls else key.encode()
        self._most_bytes = MOST_BYTES

    def put(self, body: bytes) -> bytes:
        """Return what is to be sent for a message, for now: before TLS has shaken hands it waits.

        Raises:
            ConnectionError: the message is too long.
        """
        seal = self._seal_of(self._names[0], self._num_sent, body)
        if len(body) > self._most_bytes:
            raise ConnectionError(f"a message has {len(body)} bytes, more than {self._most_bytes}")
        self._num_sent += 1
        frame = b"".join((SIZE.pack(len(seal) + len(body)), seal, body))
        if self._tls is None:
            return frame
        if not self._shaken:
            self._waiting += frame
            return b""
        self._encrypt(frame)
        return self._out.read()

    def shake(self) -> bytes:
        """Begin TLS, or go on with it; returns what is to be sent for it.

        Raises:
            OSError: the other end does not show what it should.
        """
        if self._tls is not None and not self._shaken:
            with suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self._shaken = True
                self._encrypt(bytes(self._waiting))
                self._waiting.clear()
        return self._out.read()

    def take(self, data: bytes) -> bytes:
        """Take in what came; returns what is to be sent for it.

        Raises:
            OSError: it is none of TLS, or the other end does not show what it should.
        """
        if self._tls is None:
            self._received += data
            return b""
        self._in.write(data)
        reply = self.shake()
        with suppress(ssl.SSLWantReadError):
            while self._shaken and (part := self._tls.read(CHUNK_BYTES)):
                self._received += part
        return reply + self._out.read()

    def next(self) -> bytes | None:
        """Return the next message that is whole, if there is one. Later ones are not looked at yet.

        Raises:
            ConnectionError: it is too long; or changed, repeated, out of order or of somebody else.
        """
        if len(self._received) < SIZE.size:
            return None
        (size,) = SIZE.unpack_from(self._received)
        num_sealed = SEAL_BYTES if self._key else 0
        if not num_sealed <= size <= self._most_bytes + num_sealed:
            raise ConnectionError(f"a message claims {size} bytes")
        end = SIZE.size + size
        if len(self._received) < end:
            return None
        with memoryview(self._received) as received:
            given = bytes(received[SIZE.size : SIZE.size + num_sealed])
            body = bytes(received[SIZE.size + num_sealed : end])
        del self._received[:end]
        if not hmac.compare_digest(given, self._seal_of(self._names[1], self._num_received, body)):
            raise ConnectionError("a message is not what the other end sent next")
        self._num_received += 1
        return body

    def _encrypt(self, data: bytes) -> None:
        assert self._tls is not None
        left = memoryview(data)
        while left:  # it takes a record at a time
            left = left[self._tls.write(left) :]

    def _seal_of(self, sender: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, b"%b %d " % (sender, number) + body, "sha256") if self._key else b""
