"""Turns messages into bytes of a TLS 1.3 connection and back, without the connection itself.

Both ends show a certificate of the same authority (``morph.link.authority``). An end's certificate and key, and the
authority that it trusts, are one line of text, its *credential*. The process at the other end of a manager's connection
may be an old Python with only the standard library (``manager.providers.boot``): this module must run on 3.8.
"""

from __future__ import annotations

import base64
import os
import ssl
import struct
import tempfile
from contextlib import suppress
from functools import lru_cache
from typing import Iterator, cast  # noqa: UP035 (a booting VM may have Python 3.8)

LISTENER = "listener"
"""The name in the certificate of an end that may listen."""
MOST_BYTES = 64 * 1024 * 1024
"""The longest message, in bytes: a setup with the largest code that a job may have fits."""
CHUNK_BYTES = 1 << 18
PART_BYTES = 1 << 16
RECORD_BYTES = 1 << 14
"""TLS decrypts this many bytes at a time."""
SIZE = struct.Struct(">I")


@lru_cache(maxsize=8)
def context(credential: str, *, listens: bool) -> ssl.SSLContext:
    """Return the TLS context of one end. A caller also demands that the other end may listen.

    Raises ValueError if the text is not a credential.
    """
    try:
        key, certificate, authority = (base64.b64decode(part, validate=True) for part in credential.split("."))
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(cadata=authority)
        _show(made, key, certificate)
    except (ValueError, ssl.SSLError) as error:
        raise ValueError("this is not a credential") from error
    if listens:
        made.num_tickets = 0  # tickets would stay unread on one-way connections
    return made


def _show(made: ssl.SSLContext, key: bytes, certificate: bytes) -> None:
    """Make a context show a certificate; it accepts the key only from a file, which is kept in memory if possible."""
    begin, end = (f"-----{word} PRIVATE KEY-----\n" for word in ("BEGIN", "END"))
    text = begin + base64.encodebytes(key).decode() + end + ssl.DER_cert_to_PEM_cert(certificate)
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("key"), "wb") if in_memory else tempfile.NamedTemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        made.load_cert_chain(f"/proc/self/fd/{file.fileno()}" if in_memory else file.name)


class Wire:
    """One end of a connection. The caller must lock: two threads in one TLS object at once would break it.

    ``listens``: whether this end was called.
    """

    def __init__(self, credential: str, *, listens: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if listens else LISTENER
        self._tls = context(credential, listens=listens).wrap_bio(self._in, self._out, listens, name)
        self._is_shaken = False
        self._received, self._waiting = bytearray(), bytearray()

    @property
    def other_name(self) -> str:
        """The name in the other end's certificate; empty before the handshake is complete."""
        found = self._tls.getpeercert() if self._is_shaken else None
        names = (found or {}).get("subjectAltName", ())
        return str(names[0][1]) if names else ""

    def put(self, body: bytes) -> bytes:
        """Return the bytes to send now for a message; before the handshake is complete, the message waits.

        Raises ConnectionError if the message is too long.
        """
        if len(body) > MOST_BYTES:
            raise ConnectionError(f"a message has {len(body)} bytes, more than {MOST_BYTES}")
        frame = SIZE.pack(len(body)) + body
        if self._is_shaken:
            return self.encrypt(frame)
        self._waiting += frame
        return b""

    def parts(self, body: bytes) -> Iterator[bytes]:
        """Yield the bytes to send for a message piece by piece, so that a long message is in memory once for all ends.

        Raises ConnectionError if the message is too long.
        """
        if len(body) <= PART_BYTES or not self._is_shaken:
            yield self.put(body)
            return
        if len(body) > MOST_BYTES:
            raise ConnectionError(f"a message has {len(body)} bytes, more than {MOST_BYTES}")
        yield self.encrypt(SIZE.pack(len(body)))
        data = memoryview(body)
        for first in range(0, len(data), PART_BYTES):
            yield self.encrypt(data[first : first + PART_BYTES])

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """Return the bytes to send for data that is not a message, once the handshake is complete."""
        left = memoryview(data)
        while left:  # TLS takes a record at a time
            left = left[self._tls.write(left) :]
        return self._out.read()

    def shake(self) -> bytes:
        """Begin the handshake, or continue it; return the bytes to send for it.

        Raises OSError if the other end does not show a valid certificate.
        """
        if not self._is_shaken:
            with suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self._is_shaken = True
                waiting, self._waiting = bytes(self._waiting), bytearray()
                return self._out.read() + self.encrypt(waiting)
        return self._out.read()

    def take(self, data: bytes) -> bytes:
        """Take received bytes; return the bytes to send in reply. Raises OSError as for ``shake``."""
        self._in.write(data)
        return self.shake()

    def alert(self) -> bytes:
        """Return the bytes that tell the other end why the handshake failed."""
        return self._out.read()

    def next(self) -> bytes | None:
        """Return the next whole message; None if there is none yet. Later messages are not examined yet.

        Raises OSError if the message is too long, was changed, repeated or reordered, or is from another sender.
        """
        while True:
            if len(self._received) >= SIZE.size:
                (size,) = SIZE.unpack_from(self._received)
                if size > MOST_BYTES:
                    raise ConnectionError(f"a message claims {size} bytes")
                end = SIZE.size + size
                if len(self._received) >= end:
                    with memoryview(self._received) as received:
                        body = bytes(received[SIZE.size : end])
                    del self._received[:end]
                    return body
            part = bytearray(RECORD_BYTES)
            num_bytes = self._decrypt(memoryview(part))
            if not num_bytes:
                return None
            self._received += memoryview(part)[:num_bytes]

    def fill(self, data: memoryview) -> int:
        """Write received bytes that are not a message to ``data``; return how many there were.

        Raises OSError if the bytes were changed on their way.
        """
        num_bytes = min(len(self._received), len(data))
        if num_bytes:
            data[:num_bytes] = self._received[:num_bytes]
            del self._received[:num_bytes]
        while num_bytes < len(data) and (part := self._decrypt(data[num_bytes : num_bytes + RECORD_BYTES])):
            num_bytes += part
        return num_bytes

    def _decrypt(self, data: memoryview) -> int:
        """Write the content of one record to ``data``; return its size in bytes, 0 if no record is whole yet."""
        if not self._is_shaken:
            return 0
        try:
            num_bytes = cast("int", self._tls.read(len(data), data))
        except ssl.SSLWantReadError:
            return 0
        if not num_bytes:
            raise ConnectionError("the other end closed the connection")
        return num_bytes
