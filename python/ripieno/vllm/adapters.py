"""Identity of LoRA adapters: a digest of the files that vLLM reads.

vLLM's hash of a block has an adapter's name and path. Its files may be others when a worker reads
them again: in place of those that it has, or after it dropped them for another adapter's. So each
worker tells what it has read, and the scheduler uses the store only where that, the files now, and
the files when the request arrived are the same.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.lora.worker_manager import WorkerLoRAManager

from .identity import WEIGHTS, place_of_weights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")

CONFIGURATION = "adapter_config.json"
ATTEMPTS = 3
"""Attempts to read files that change meanwhile."""

_known: dict[str, tuple[list[Any], str]] = {}
"""By folder: what stat said of its files, and their digest."""


def digest_of(adapter: LoRARequest) -> str:
    """Returns the digest of an adapter: of its files' names and contents. Nothing if they cannot
    be read now, or change meanwhile."""
    place = _place_of(adapter)
    if place is None:
        # vLLM has not fetched it from the hub yet.
        return ""
    # vLLM reads files of one format in two ways.
    form = "3d " if adapter.is_3d_lora_weight else ""
    try:
        for _ in range(ATTEMPTS):
            stats = _stats(place)
            known = _known.get(place)
            if known is None or known[0] != stats:
                known = _known[place] = stats, _digest(place, [name for name, *_ in stats])
                if _stats(place) != stats:
                    continue
            return form + known[1]
    except OSError:
        pass
    return ""


def _place_of(adapter: LoRARequest) -> str | None:
    return place_of_weights(os.path.expanduser(adapter.lora_path))


def _stats(place: str) -> list[Any]:
    names = sorted(os.listdir(place))
    stats = []
    for name in names:
        if name == CONFIGURATION or name.endswith(WEIGHTS):
            found = os.stat(os.path.join(place, name))
            # The time of the last change of anything cannot be set, unlike that of the contents.
            times = found.st_mtime_ns, found.st_ctime_ns
            stats.append((name, found.st_dev, found.st_ino, found.st_size, *times))
    return stats


def _digest(place: str, names: list[str]) -> str:
    whole = hashlib.sha256()
    for name in names:
        with open(os.path.join(place, name), "rb") as file:
            whole.update(f"{name}\0".encode() + hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


Adapter = tuple[int, str]
"""An adapter's number, and the digest of its files; nothing if it is not known."""


class Adapters:
    """What the scheduler knows of adapters."""

    def __init__(self) -> None:
        self.of: dict[str, Adapter] = {}
        """By request: its adapter when it arrived. Without a digest nothing of it is kept."""
        self.held: dict[int, str] = {}
        """By number: what the workers have read."""
        self.names: dict[int, tuple[str, str]] = {}
        """By number: name and path, which vLLM's hashes have."""
        self.last: dict[tuple[str, str], str] = {}
        self.mixed: set[tuple[str, str]] = set()
        """Those whose files changed: vLLM's own cache may have blocks of both."""
        self.now: dict[str, str] = {}
        """Digests by path, in this step."""

    def arrived(self, request: Request) -> None:
        if lora := request.lora_request:
            digest, number = self._now(lora), lora.lora_int_id
            self.names[number] = lora.lora_name, lora.lora_path
            if digest:
                self._used(number, digest)
            # It is read again for this request, or the workers have it, unless they dropped it.
            known = lora.load_inplace or self.held.get(number, digest) == digest
            self.of[request.request_id] = number, digest if known else ""

    def digest(self, request: Request) -> str:
        """Returns the digest of a request's adapter; nothing if the workers may have another one."""
        lora = request.lora_request
        assert lora is not None
        if request.request_id not in self.of:
            self.arrived(request)
        number, digest = self.of[request.request_id]
        is_held = lora.load_inplace or self.held.get(number, digest) == digest
        return digest if is_held and self._now(lora) == digest else ""

    def expected(self, request: Request) -> Adapter | None:
        """Returns the adapter that a request's load is for, unless it is read again before."""
        lora = request.lora_request
        return None if lora is None or lora.load_inplace else self.of[request.request_id]

    def hit(self, request: Request) -> None:
        """Notes that vLLM has blocks of a request by itself."""
        lora = request.lora_request
        if lora and (lora.lora_name, lora.lora_path) in self.mixed:
            self.of[request.request_id] = lora.lora_int_id, ""

    def read(self, news: dict[int, str]) -> None:
        """Notes what the workers have read. Requests for other files compute with these."""
        self.held |= news
        for number in news.keys() & self.names.keys():
            self._used(number, news[number])
        for name, adapter in self.of.items():
            if is_other(adapter, news):
                self.of[name] = adapter[0], ""

    def end_step(self) -> None:
        self.now.clear()

    def _now(self, lora: LoRARequest) -> str:
        if lora.lora_path not in self.now:
            self.now[lora.lora_path] = digest_of(lora)
        return self.now[lora.lora_path]

    def _used(self, number: int, digest: str) -> None:
        name = self.names[number]
        if self.last.setdefault(name, digest) != digest:
            self.last[name] = digest
            if name not in self.mixed:
                self.mixed.add(name)
                logger.warning(
                    "ripieno: adapter %s in %s has other files than before: of what vLLM finds in "
                    "its own cache for it, nothing is stored from now on",
                    *name,
                )


def is_other(adapter: Adapter | None, read: dict[int, str]) -> bool:
    """Returns True if the adapter was read, and is not this one."""
    return adapter is not None and read.get(*adapter) != adapter[1]


class Read:
    """What a worker of this process has read."""

    _all: weakref.WeakSet[Read] = weakref.WeakSet()

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        """By number."""
        self.news: dict[int, str] = {}
        """Those read since the last take() that are others than before."""
        load = WorkerLoRAManager._load_adapter
        if not hasattr(load, "__wrapped__"):
            # vLLM has no hook for it.
            WorkerLoRAManager._load_adapter = _noted(load)
        Read._all.add(self)

    def note(self, number: int, digest: str) -> None:
        if self.digests.get(number) != digest:
            self.digests[number] = self.news[number] = digest

    def take(self) -> dict[int, str]:
        news, self.news = self.news, {}
        return news


def _noted(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def noting(manager: Any, adapter: LoRARequest) -> Any:
        was_there, before = _place_of(adapter) is not None, digest_of(adapter)
        loaded = load(manager, adapter)
        after = digest_of(adapter)
        is_whole = before == after or not was_there
        for read in Read._all:
            read.note(adapter.lora_int_id, after if is_whole else "")
        return loaded

    return noting
