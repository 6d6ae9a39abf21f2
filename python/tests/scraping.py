"""Reads metrics as Prometheus does."""

import socket


def scrape(path):
    """Returns the types of all metrics, and their samples with labels."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    head, body = answer.split("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ") and body.endswith("# EOF\n"), answer
    types = [line.split() for line in body.splitlines() if line.startswith("# TYPE ")]
    samples = [line.rsplit(" ", 1) for line in body.splitlines() if not line.startswith("#")]
    return {name: kind for _, _, name, kind in types}, {name: float(at) for name, at in samples}
