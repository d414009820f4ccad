"""The network between the Prefect server and its clients: a relay that can be cut."""

import socket
import ssl
import threading
from contextlib import suppress


class Proxy:
    """Passes TCP connections at ``port`` of the loopback on to ``target``, unless it is cut.

    Args:
        tls: has its clients speak TLS; the target hears what they say.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.target, self._cut = 0, False
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections, and refuse further connections."""
        self._cut = True
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        self._cut = False

    def close(self) -> None:
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._cut:
                    raise OSError("cut")
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            try:
                client = self._tls.wrap_socket(client, server_side=True) if self._tls else client
            except OSError:  # the client does not trust the certificate
                server.close()
                continue
            self._open |= {client, server}
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while received := one.recv(1 << 16):
                other.sendall(received)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            self._open.discard(each)
