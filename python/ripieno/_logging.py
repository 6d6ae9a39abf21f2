"""Forwards the crates' events to `logging` on a thread of its own: their threads must not wait for
the GIL."""

import atexit
import logging
import os
import threading

from . import _ripieno

PERIOD = 1.0
"""Seconds until a changed level takes effect when no events arrive."""

_lock = threading.Lock()
_thread: threading.Thread | None = None


def start() -> None:
    """Starts the thread unless it runs: a forked process has no threads. Called whenever something
    is opened."""
    global _thread
    _ripieno.set_event_level(_level())
    with _lock:
        if _thread is not None and _thread.is_alive():
            return
        if _thread is None:
            atexit.register(_end)
        _thread = threading.Thread(target=_run, name="ripieno-logging", daemon=True)
        _thread.start()


def _run() -> None:
    while (events := _ripieno.take_events(PERIOD)) is not None:
        _ripieno.set_event_level(_level())
        for created, level, target, file, line, message in events:
            logger = logging.getLogger("ripieno." + target.replace("::", "."))
            if logger.isEnabledFor(level):
                record = logger.makeRecord(logger.name, level, file, line, message, (), None)
                record.created = created
                logger.handle(record)


def _end() -> None:
    """Logs the remaining events. Later ones are not logged: the interpreter may be gone."""
    _ripieno.end_events()
    if _thread is not None:
        _thread.join(5)


def _forked() -> None:
    """Replaces what another thread of the parent may have had locked."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _level() -> int:
    """Returns the lowest level of the `ripieno` loggers."""
    known = list(logging.root.manager.loggerDict.items())
    ours = [logging.getLogger("ripieno")]
    for name, logger in known:
        if name.startswith("ripieno.") and isinstance(logger, logging.Logger):
            ours.append(logger)
    level = min(logger.getEffectiveLevel() for logger in ours)
    return max(level, logging.root.manager.disable + 1)
