"""One capacity for all stores of a directory, which has one store for each layout used so far."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .errors import InvalidError

Made = TypeVar("Made")


def made_in(
    path: str | os.PathLike[str],
    name: str,
    capacity: int,
    make: Callable[[int], Made],
    engines: int = 1,
) -> Made:
    """Returns make(bytes) for the store `name` in a directory. The bytes are the rest of `capacity`
    after the other stores there, divided among `engines`: stores whose names differ only in the
    engine's number (`-dp1`). A store that was made when there was more left keeps what it has, so
    that it opens with the options that it was made with. A lock prevents concurrent creation.

    Raises InvalidError if no capacity is left, and lists the other stores in the directory.
    """
    # Others who can write to it could replace a store's files.
    os.makedirs(path, mode=0o700, exist_ok=True)
    with _locked(path):
        made = sizes(path)
        others = {other: size for other, size in made.items() if _family(other) != _family(name)}
        share, own = (capacity - sum(others.values())) // engines, made.get(name, 0)
        if share < own <= capacity // engines:
            share = own
        try:
            if share <= 0:
                raise InvalidError(f"capacity: nothing of {_size(capacity)} is left for {name}")
            return make(share)
        except InvalidError as error:
            if not others:
                raise
            listed = ", ".join(f"{other} ({_size(size)})" for other, size in others.items())
            raise InvalidError(
                f"{error}; a capacity is for all stores in {path}, and others there are {listed}: "
                f"give more than their sum, or remove what no engine needs: rm -r {os.path.join(path, 'NAME')}"
            ) from error


def sizes(path: str | os.PathLike[str]) -> dict[str, int]:
    """Returns each store's data size in bytes by name; without catalogs and drives."""
    found = {}
    with os.scandir(path) as entries:
        for entry in entries:
            homes = [entry.path, *_ranks(entry)]
            if any(os.path.exists(os.path.join(entry.path, its)) for its in MANIFESTS):
                found[entry.name] = sum(_files(home) for home in homes)
    return dict(sorted(found.items()))


MANIFESTS = ("store.json", "home.json")


def _ranks(entry: os.DirEntry[str]) -> list[str]:
    if not entry.is_dir():
        return []
    with os.scandir(entry.path) as inside:
        return [each.path for each in inside if each.name.startswith("rank-")]


def _files(home: str) -> int:
    with os.scandir(home) as entries:
        return sum(each.stat().st_size for each in entries if each.name.startswith("device-"))


def _size(count: int) -> str:
    """A number of bytes in the largest unit of which it has one: 1.50 GiB."""
    power = min(max(count.bit_length() - 1, 0) // 10, 5)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")[power]
    return f"{count / 1024**power:.{2 if power else 0}f} {unit}"


def _family(name: str) -> str:
    return re.sub(r"-dp\d+$", "", name)


@contextmanager
def _locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Locks a directory. Leaves no file behind, and the lock ends with the process."""
    directory = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
