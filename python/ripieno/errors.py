"""What can go wrong. The message says what was asked, what was found and what to do."""

__all__ = [
    "BusyError",
    "ClosedError",
    "DamagedError",
    "DeviceError",
    "Error",
    "InvalidError",
    "LockedError",
    "NoSpaceError",
    "NotFoundError",
    "OccupiedError",
    "ReadOnlyError",
    "StaleError",
    "TransferError",
]


class Error(Exception):
    """What a store refused."""


class InvalidError(Error, ValueError):
    """An argument makes no sense."""


class NotFoundError(Error):
    """There is no store in this directory, or one that was not completed."""


class OccupiedError(Error):
    """The directory holds something else, which would be lost."""


class LockedError(Error):
    """Another process uses the directory."""


class NoSpaceError(Error):
    """There is not enough space on the disk."""


class DamagedError(Error):
    """Files or journal are not what they were: damaged, missing, of another store or shape."""


class DeviceError(Error):
    """The operating system or a device refused something."""


class BusyError(Error):
    """All that may be in flight is in flight: end something, then try again."""


class TransferError(Error):
    """Data did not get where it was to go."""


class StaleError(Error):
    """A block was dropped after the lookup: look up again."""


class ReadOnlyError(Error):
    """Nothing can be stored any more; what is stored can still be loaded."""


class ClosedError(Error):
    """It was closed, or has failed for good: open it again."""
