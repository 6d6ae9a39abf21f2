"""Options of a store and of the engine that uses it, given as one dict of names and values."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ._ripieno import check_options, parse_size
from .errors import InvalidError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Options:
    """Where the store is, and its options. Subclasses have those of an engine beside them."""

    OWN: ClassVar[set[str]] = {"path", "capacity"}
    """Fields that a store of this engine has, and that of a server does not."""
    SIZES: ClassVar[set[str]] = {"capacity"}
    """Fields that are numbers of bytes, or texts such as "100GiB"."""

    path: str = ""
    capacity: int = 0
    server: str | None = None
    """The socket of a server, which has the store."""
    store: dict[str, Any] = field(default_factory=dict)
    """All other options of the store: those of docs/reference/options.md."""

    @classmethod
    def parse(cls, given: dict[str, Any], place: str) -> Self:
        """Raises ValueError if an option is missing, unknown or wrong. place: where it was given,
        for the message."""
        names = {each.name for each in fields(cls)} - {"store"}
        own = {name: value for name, value in given.items() if name in names}
        store = {name: given[name] for name in given.keys() - names if given[name] is not None}
        try:
            check_options(store, sorted(names))
            if own.get("server") is not None:
                own["server"] = parse_path(own["server"], "server")
                if both := ", ".join(sorted(own.keys() & cls.OWN | store.keys())):
                    raise InvalidError(
                        f"{both} was given beside server, whose configuration has the store; leave "
                        "it out, or the server"
                    )
            elif missing := ", ".join(sorted({"path", "capacity"} - own.keys())):
                raise InvalidError(
                    f"{missing} is missing; give path and capacity of a store for this engine, or "
                    "the socket of a server"
                )
            else:
                own["path"] = parse_path(own["path"], "path")
            own |= {name: parse_size(own[name], name) for name in cls.SIZES & own.keys()}
            return cls(**own, store=store)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def parse_path(given: str | os.PathLike[str], name: str) -> str:
    """Returns the absolute path of a directory, or of a server's socket."""
    if not isinstance(given, str | os.PathLike) or not str(given).strip():
        kinds = {"path": 'a directory, "/var/lib/kv"', "server": 'a socket, "/run/ripieno/sock"'}
        raise InvalidError(f"{name}: {given!r} was given; give the name of {kinds[name]}")
    return os.path.abspath(os.path.expanduser(given))
