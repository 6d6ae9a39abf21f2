"""Options given by the user in kv_connector_extra_config."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ripieno import parse_size
from ripieno.options import Options as StoreOptions

COUNT_MAX = 0xFFFF
"""Largest number of engines."""


@dataclass(frozen=True)
class Options(StoreOptions):
    """See the documentation of the package."""

    OWN: ClassVar[set[str]] = StoreOptions.OWN | {"engines"}

    engines: int | None = None
    load_async: bool | None = None
    save_decode: bool = True
    save_backlog: float = 0.5
    shutdown: str = "drain"
    drain_seconds: float = 10.0
    keep_on_reset: bool = False
    piecewise: bool = False
    weights_id: str = ""
    tenants: list[str] = field(default_factory=list)
    layer_times: str | None = None

    def __post_init__(self) -> None:
        for name in ("load_async", "save_decode", "keep_on_reset", "piecewise"):
            check(name, getattr(self, name) in (True, False, None), "give true or false", self)
        # Threads cannot wait for longer than these seconds.
        for name, most in (("drain_seconds", int(threading.TIMEOUT_MAX)), ("save_backlog", 1)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            check(name, is_number and 0 <= value <= most, f"give a number from 0 to {most}", self)
        texts = self.tenants if isinstance(self.tenants, list) else [None]
        is_right = all(isinstance(it, str) and re.fullmatch("[0-9a-f]{64}", it) for it in texts)
        hint = "give a list of SHA-256 digests of salts, each of 64 small hexadecimal digits"
        check("tenants", is_right, hint, self)
        is_right = self.engines is None or (
            type(self.engines) is int and 1 <= self.engines <= COUNT_MAX
        )
        check("engines", is_right, f"give a whole number from 1 to {COUNT_MAX}", self)
        is_name = type(self.layer_times) is str and self.layer_times
        check("layer_times", self.layer_times is None or is_name, "give the name of a file", self)
        check("shutdown", self.shutdown in ("drain", "drop"), 'give "drain" or "drop"', self)

    @property
    def has_dram(self) -> bool:
        """True if the store keeps blocks in host memory."""
        return parse_size(self.store.get("dram", 0)) > 0

    @property
    def has_drives(self) -> bool:
        """True if the store is on drives instead of files."""
        return not str(self.store.get("devices") or 1).isdecimal()

    @property
    def is_paced(self) -> bool:
        """True if the plane decides when layers start; by default with host memory."""
        return str(self.store.get("pacing", self.has_dram)).lower() == "true"

    def plane(self, rank: int) -> dict[str, Any]:
        """Returns the options of the plane of a rank; each has an address of its own."""
        address = self.store.get("metrics")
        metrics = None if address is None else metrics_of(str(address), rank)
        return self.store | {"pacing": self.is_paced, "metrics": metrics}

    @property
    def patience(self) -> float:
        """Seconds that pending saves get at shutdown."""
        return self.drain_seconds if self.shutdown == "drain" else 0.0


def metrics_of(address: str, number: int) -> str:
    """Returns the address of a rank's metrics: the next ports, or a suffix to a socket's path."""
    if number == 0:
        return address
    if "/" in address:
        return f"{address}.{number}"
    host, colon, port = address.rpartition(":")
    return f"{host}{colon}{int(port) + number}" if port.isdecimal() else address


def check(name: str, is_right: Any, hint: str, options: Options) -> None:
    if not is_right:
        raise ValueError(f"{name}: {getattr(options, name)!r} was given; {hint}")
