"""Files beside a store: what a process leaves there for later ones."""

from __future__ import annotations

import json
import os
from typing import Any


def write(path: str, data: Any) -> None:
    """Writes JSON that only this user can read, in place of what was there. Returns when it is
    durable."""
    new = f"{path}.new"
    # Of an earlier process, perhaps one that was killed, with another mode.
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
