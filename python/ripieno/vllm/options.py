"""Options given by the user in kv_connector_extra_config."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ripieno import parse_size

Overwrite = Literal["nothing", "store", "anything"]
Executor = Literal["host", "cuda"]
Route = Literal["direct", "staged", "host"]
DramMode = Literal["write-through", "read-ahead"]

CHOICES = {
    "overwrite": get_args(Overwrite),
    "executor": get_args(Executor),
    "route": get_args(Route),
    "dram_mode": get_args(DramMode),
}

SIZES = {"capacity", "dram"}

COUNT_MAX = 0xFFFF
"""Largest number of devices, engines or SMs."""

NEEDED = {"path", "capacity"}
"""Options of a store of this engine's own, which must be given."""

OWN = NEEDED | {
    *("devices", "engines", "overwrite", "executor", "route", "io_sms", "dram", "dram_mode"),
    *("schedule", "metrics"),
}
"""All options of such a store, which a server's store has without the engine."""


@dataclass(frozen=True)
class Options:
    """See the documentation of the package."""

    path: str = ""
    capacity: int = 0
    server: str | None = None
    devices: int | list[str] = 1
    engines: int | None = None
    overwrite: Overwrite = "nothing"
    executor: Executor | None = None
    route: Route | None = None
    io_sms: int | None = None
    dram: int = 0
    dram_mode: DramMode = "write-through"
    load_async: bool | None = None
    save_decode: bool = True
    save_backlog: float = 0.5
    schedule: bool | None = None
    shutdown: str = "drain"
    drain_seconds: float = 10.0
    keep_on_reset: bool = False
    piecewise: bool = False
    weights_id: str = ""
    tenants: list[str] = field(default_factory=list)
    layer_times: str | None = None
    metrics: str | None = None

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Options:
        """Returns the options from a dict by name."""
        known = {each.name: each for each in fields(cls)}
        if unknown := set(given) - set(known):
            raise ValueError(
                f"kv_connector_extra_config: {', '.join(sorted(unknown))} is unknown; there are "
                f"{', '.join(sorted(known))}"
            )
        if "server" in given:
            if both := OWN & set(given):
                raise ValueError(
                    f"kv_connector_extra_config: {', '.join(sorted(both))} was given beside "
                    "server, whose configuration has the store; leave it out, or the server"
                )
            return cls(**given | {"server": parse_path(given["server"], "server")})
        if missing := NEEDED - set(given):
            raise ValueError(
                f"kv_connector_extra_config: {', '.join(sorted(missing))} is missing; give path "
                "and capacity of a store for this engine, or the socket of a server"
            )
        sizes = {name: parse_size(given[name], name) for name in SIZES & set(given)}
        return cls(**given | sizes | {"path": parse_path(given["path"])})

    def __post_init__(self) -> None:
        for name in ("load_async", "save_decode", "schedule", "keep_on_reset", "piecewise"):
            check(name, getattr(self, name) in (True, False, None), "give true or false", self)
        # Threads cannot wait for longer than these seconds.
        for name, most in (("drain_seconds", int(threading.TIMEOUT_MAX)), ("save_backlog", 1)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            check(name, is_number and 0 <= value <= most, f"give a number from 0 to {most}", self)
        if isinstance(self.devices, list):
            are_drives = all(str(each).startswith("vfio:") for each in self.devices)
            is_right = bool(self.devices) and are_drives
        else:
            is_right = type(self.devices) is int and 1 <= self.devices <= COUNT_MAX
        hint = 'give a number of files from 1 on, or drives: ["vfio:0000:65:00.0"]'
        check("devices", is_right, hint, self)
        texts = self.tenants if isinstance(self.tenants, list) else [None]
        is_right = all(isinstance(it, str) and re.fullmatch("[0-9a-f]{64}", it) for it in texts)
        hint = "give a list of SHA-256 digests of salts, each of 64 small hexadecimal digits"
        check("tenants", is_right, hint, self)
        for name in ("io_sms", "engines"):
            value = getattr(self, name)
            is_right = value is None or (type(value) is int and 1 <= value <= COUNT_MAX)
            check(name, is_right, f"give a whole number from 1 to {COUNT_MAX}", self)
        for name, words in CHOICES.items():
            hint = f"give one of {', '.join(words)}"
            is_default = getattr(self, name) == getattr(Options, name)
            check(name, is_default or getattr(self, name) in words, hint, self)
        is_right = self.dram > 0 or self.dram_mode == Options.dram_mode
        check("dram_mode", is_right, "give dram, too", self)
        is_name = type(self.layer_times) is str and self.layer_times
        check("layer_times", self.layer_times is None or is_name, "give the name of a file", self)
        hint = 'give text, a port ("9400") or a Unix socket\'s path with a /'
        check("metrics", isinstance(self.metrics, str | None), hint, self)
        check("shutdown", self.shutdown in ("drain", "drop"), 'give "drain" or "drop"', self)

    @property
    def is_paced(self) -> bool:
        """True if the plane decides when layers start; by default with host memory."""
        return self.dram > 0 if self.schedule is None else self.schedule

    @property
    def patience(self) -> float:
        """Seconds that pending saves get at shutdown."""
        return self.drain_seconds if self.shutdown == "drain" else 0.0


def metrics_of(address: str | None, number: int) -> str | None:
    """Returns the address of a rank's metrics: the next ports, or a suffix to a socket's path."""
    if address is None or number == 0:
        return address
    if "/" in address:
        return f"{address}.{number}"
    host, colon, port = address.rpartition(":")
    return f"{host}{colon}{int(port) + number}" if port.isdecimal() else address


def check(name: str, is_right: Any, hint: str, options: Options) -> None:
    if not is_right:
        raise ValueError(f"{name}: {getattr(options, name)!r} was given; {hint}")


def parse_path(given: str | os.PathLike[str], name: str = "path") -> str:
    """Returns the absolute path of a directory, or of a server's socket."""
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        kinds = {"path": 'a directory, "/var/lib/kv"', "server": 'a socket, "/run/ripieno/sock"'}
        raise ValueError(f"{name}: {given!r} was given; give the name of {kinds[name]}")
    return os.path.abspath(os.path.expanduser(given))
