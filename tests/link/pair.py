"""Two ends of a connection in one thread, and a man in the middle of a real connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from morph.link.authority import authority_of, credential_of
from morph.link.wire import Wire
from tests.waiting import BOUND_S

SECRET = "s3cret-of-this-run"
Change = Callable[[bytes], bytes]


def own(secret: str = SECRET) -> str:
    """Return the credential that follows from the secret."""
    return credential_of(secret)


def of_caller(name: str = "vm0", secret: str = SECRET) -> str:
    """Return the credential of a process that received it."""
    return authority_of(secret).credential(name)


class Pair:
    """A listener's wire and a caller's, which have shaken hands."""

    def __init__(self, listener: str = "", caller: str = "") -> None:
        self.listener = Wire(listener or own(), listens=True)
        self.caller = Wire(caller or of_caller(), listens=False)
        self.pass_on(self.caller.shake())

    def pass_on(self, data: bytes) -> None:
        """Bring the caller's bytes over, and the answers back, until neither end has any."""
        while data:
            answer = self.listener.take(data)
            data = self.caller.take(answer) if answer else b""


def unchanged(message: bytes) -> bytes:
    return message


@contextlib.contextmanager
def man_in_the_middle(
    port: int, source: str, of_caller: Change = unchanged, of_listener: Change = unchanged
) -> Iterator[int]:
    """Stand between a caller and a listener, where TLS records may be changed; yield the address for the caller."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(BOUND_S)

        def stand() -> None:
            connection, _ = listener.accept()
            with connection, socket.create_connection(("127.0.0.1", port), BOUND_S, (source, 0)) as onward:
                connection.settimeout(BOUND_S)
                back = threading.Thread(target=pass_on, args=(onward, connection, of_listener))
                back.start()
                pass_on(connection, onward, of_caller)
                back.join(BOUND_S)

        thread = threading.Thread(target=stand)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join(BOUND_S)


def pass_on(one: socket.socket, other: socket.socket, change: Change) -> None:
    """Hand on the records of one end to the other until either end hangs up."""
    with contextlib.suppress(OSError), one.makefile("rb") as records:
        while len(head := records.read(5)) == 5:
            other.sendall(change(head + records.read(int.from_bytes(head[3:], "big"))))
    for end in (one, other):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Tamper:
    """Changes one of the records, and counts all of them."""

    def __init__(self, place: int | None = None) -> None:
        self.place, self.records = place, list[bytes]()

    def __call__(self, record: bytes) -> bytes:
        self.records.append(record)
        return record if len(self.records) - 1 != self.place else record[:-1] + bytes([record[-1] ^ 1])
