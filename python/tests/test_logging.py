"""Log messages of the crates, in Python's logging."""

import logging
import subprocess
import sys
import time

import pytest
from waiting import WATCHDOG, until

import ripieno

SHAPE = ripieno.Shape(layers=2, segments=1, object_bytes=4096, block_tokens=16)
CAPACITY = 32 << 20
DRIVER = "ripieno.nvme_driver.controller"

LIFE = """
import logging, sys
import ripieno

logging.basicConfig(level=LEVEL, format="%(name)s %(levelname)s %(message)s")
shape = ripieno.Shape(layers=2, segments=1, object_bytes=4096, block_tokens=16)

def open_one(**options):
    pool = ripieno.Pool.contiguous(bytearray(9 * 8192), shape)
    return ripieno.Store(sys.argv[1], shape, pool, capacity=32 << 20, **options)
"""


def live(path, level, code):
    """Runs a process, with a timeout."""
    program = LIFE.replace("LEVEL", level) + code
    run = subprocess.run(
        [sys.executable, "-c", program, path], timeout=WATCHDOG, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stderr


def open_and_close(path):
    pool = ripieno.Pool.contiguous(bytearray(9 * 8192), SHAPE)
    with ripieno.Store(path, SHAPE, pool, capacity=CAPACITY):
        pass


@pytest.fixture(autouse=True)
def levels():
    yield
    logging.getLogger("ripieno").setLevel(logging.NOTSET)


def test_events_are_logged_from_the_level_of_the_loggers_on(tmp_path, caplog):
    def said():
        return [record for record in caplog.records if record.name == DRIVER]

    logging.getLogger("ripieno").setLevel(logging.WARNING)
    open_and_close(tmp_path / "s")
    logging.getLogger("ripieno").setLevel(logging.INFO)
    before = time.time()
    open_and_close(tmp_path / "s")
    until(said, "nothing was logged")
    (record,) = said()
    assert record.levelno == logging.INFO
    message = record.getMessage()
    assert message.startswith("controller is ready ctrl=") and " namespaces=1 " in message
    assert record.pathname.endswith("controller.rs") and record.lineno > 0
    assert before <= record.created <= time.time()
    # The lowest level of all loggers applies.
    before = time.time()
    logging.getLogger("ripieno").setLevel(logging.ERROR)
    logging.getLogger(DRIVER).setLevel(logging.INFO)
    open_and_close(tmp_path / "s")
    until(lambda: len(said()) == 2, "nothing more was logged")
    later = [record for record in caplog.records if record.created >= before]
    assert [record.name for record in later if record.name.startswith("ripieno")] == [DRIVER]
    logging.getLogger(DRIVER).setLevel(logging.NOTSET)


def test_a_level_that_is_changed_while_a_store_is_open_counts(tmp_path, caplog, monkeypatch):
    levels = []
    set_level = ripieno._ripieno.set_event_level

    def observed(level):
        set_level(level)
        levels.append(level)

    monkeypatch.setattr(ripieno._ripieno, "set_event_level", observed)
    logging.getLogger("ripieno").setLevel(logging.ERROR)
    pool = ripieno.Pool.contiguous(bytearray(9 * 8192), SHAPE)
    # A thread runs its controllers, and logs its end.
    with ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=CAPACITY, executor="host"):
        assert levels[0] == logging.ERROR
        logging.getLogger("ripieno").setLevel(logging.DEBUG)
        until(lambda: levels[-1] == logging.DEBUG, "the level stays")
    ended = "a thread of software controllers ended"
    until(lambda: ended in caplog.text, "nothing was logged")


def test_a_thread_that_logs_while_the_gil_is_held_is_no_deadlock(tmp_path):
    """A dropped store waits for its threads while it holds the GIL, and they log their end."""
    said = live(tmp_path / "s", "1", "store = open_one(executor='host')\ndel store\n")
    assert "ripieno.nvme_emu.runner DEBUG a thread of software controllers ended" in said


def test_nothing_is_lost_at_the_end_of_a_process(tmp_path):
    code = """
import time
take = ripieno._ripieno.take_events

def late(timeout):
    time.sleep(1)
    return take(timeout)

ripieno._ripieno.take_events = late
store = open_one()
"""
    assert f"{DRIVER} INFO controller is ready" in live(tmp_path / "s", "20", code)


def test_a_forked_process_logs_too(tmp_path):
    code = """
import os
open_one().close()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
open_one().close()
"""
    assert live(tmp_path / "s", "20", code).count("controller is ready") == 2
