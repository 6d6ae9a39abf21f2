"""Exceptions. The message states the request, the finding and the remedy."""

__all__ = [
    "BusyError",
    "ClosedError",
    "DamagedError",
    "DeviceError",
    "Error",
    "InvalidError",
    "LockedError",
    "LostError",
    "NoSpaceError",
    "NotFoundError",
    "OccupiedError",
    "ReadOnlyError",
    "StaleError",
    "TransferError",
]


class Error(Exception):
    """Base class of all errors of a store."""


class InvalidError(Error, ValueError):
    """An argument is invalid."""


class NotFoundError(Error):
    """There is no store in this directory, or one that was not completed; or no server at this
    socket."""


class OccupiedError(Error):
    """The directory holds something else, which would be lost."""


class LockedError(Error):
    """Another process uses the directory."""


class LostError(Error):
    """The connection to the server is lost. It is made again when the server is back: until then,
    treat blocks as misses."""


class NoSpaceError(Error):
    """There is not enough space on the disk."""


class DamagedError(Error):
    """Files or journal are damaged, missing, or belong to another store or shape."""


class DeviceError(Error):
    """The operating system or a device refused something."""


class BusyError(Error):
    """The maximum number of transfers is in flight: end one, then try again."""


class TransferError(Error):
    """A transfer failed."""


class StaleError(Error):
    """A block was dropped after the lookup: look up again."""


class ReadOnlyError(Error):
    """Nothing can be stored any more; stored blocks can still be loaded."""


class ClosedError(Error):
    """It was closed, has failed permanently, or was opened in the process that this one was forked
    from: open it again."""
