"""Waits that no busy machine ends, and ports that no other program gets."""

import socket
import time

WATCHDOG = 600
"""Seconds after which a wait is a hang, on any machine."""

_kept = []


def until(is_so, why):
    """Waits until is_so() is true."""
    late = time.monotonic() + WATCHDOG
    while not is_so():
        assert time.monotonic() < late, why
        time.sleep(0.01)


def kept_port():
    """Returns a port that nobody else is given as long as this process lives. A server that sets
    SO_REUSEADDR, as servers do, can listen at it."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    _kept.append(port)
    return port.getsockname()[1]
