"""Hints of requests, in vLLM's form (KvHintsEnvelope), each with an answer of its own.

Requests of `ripieno serve` over HTTP have the same hints and answers: docs/reference/openapi.json.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    import ripieno

logger = init_logger("vllm.ripieno")

ANSWERS = "ripieno.hints"
"""Name of the answers in the kv_transfer_params of a request's output."""

PINNED_MAX = 0.5
"""Part of the store's files that pins may hold."""
PINS_MAX = 4096
SECONDS_MAX = 24 * 60 * 60
"""Time after which a pin ends, at most."""

UNSUPPORTED = {
    "kv.prefetch": "waiting requests are announced to the store by themselves",
    "kv.demote": "the store decides what its DRAM keeps",
    "kv.fetch": "the store decides what its DRAM keeps",
    "kv.retain": "the order of eviction is that of expected reuse; use kv.pin to keep blocks",
}


class Rejected(ValueError):
    """A hint that is not carried out; its text is the reason."""


@dataclass
class Pin:
    """Blocks that are referenced, so that nothing evicts them, until a time."""

    request: str
    space: int
    keys: Sequence[bytes]
    reference: ripieno.Reference
    until: float

    @property
    def is_whole(self) -> bool:
        return len(self.reference.files) == len(self.keys)


class Hints:
    """Carries out the hints of requests that have ended."""

    def __init__(self, catalog: ripieno.Catalog, block_bytes: int) -> None:
        """block_bytes: of a block, on all ranks."""
        self.catalog, self.block_bytes = catalog, block_bytes
        self.pins: dict[int, Pin] = {}
        self.last = 0

    def answer(
        self, hints: KvHintsEnvelope, request: str, space: int, keys: Sequence[bytes], saves: bool
    ) -> list[dict[str, Any]]:
        """Carries out the hints of a request, and returns an answer to each.

        keys: those of the prompt's blocks; saves: some of these blocks are being saved.
        """
        answers: list[dict[str, Any]] = []
        for hint in hints.actions:
            answer = {"action_id": hint.action_id, "reason": None, "pin": None}
            try:
                answers.append(answer | self._answer(hint, request, space, keys, saves))
            except Rejected as reason:
                logger.warning("ripieno: hint %s is rejected: %s", hint.action_id, reason)
                answers.append(answer | {"outcome": "rejected", "reason": str(reason)})
        return answers

    def _answer(
        self, hint: KvHintAction, request: str, space: int, keys: Sequence[bytes], saves: bool
    ) -> dict[str, Any]:
        kind, given = hint.action_type, hint.payload
        if hint.action_version.split(".")[0] != "1":
            raise Rejected(f"{kind} has version {hint.action_version}; version 1 is known")
        if kind == "kv.pin":
            seconds = number(given, "ttl_s", {"ttl_s", "bytes_max"})
            bytes_max = number(given, "bytes_max") if "bytes_max" in given else None
            return self._pin(request, space, keys, saves, seconds, bytes_max)
        if kind == "kv.deref":
            pin = self.pins.pop(number(given, "pin", {"pin"}), None)
            if pin is None:
                return {"outcome": "missing", "reason": "there is no such pin, or not any more"}
            self.catalog.release(pin.reference.id)
            return {"outcome": "accepted"}
        raise Rejected(UNSUPPORTED.get(kind, f"{kind} is unknown"))

    def _pin(
        self,
        request: str,
        space: int,
        keys: Sequence[bytes],
        saves: bool,
        seconds: int,
        bytes_max: int | None,
    ) -> dict[str, Any]:
        used = sum(len(pin.keys) for pin in self.pins.values())
        room = max(0, int(self.catalog.stats().files * PINNED_MAX) - used)
        if bytes_max is not None:
            room = min(room, bytes_max // self.block_bytes)
        wanted = keys[:room]
        if keys and (not wanted or len(self.pins) >= PINS_MAX):
            raise Rejected(f"there is room for {room} blocks and {PINS_MAX} pins")
        found = self.catalog.acquire(space, wanted)
        pin = Pin(request, space, wanted, found, time.monotonic() + min(seconds, SECONDS_MAX))
        is_deferred = saves and not pin.is_whole
        if not found.files and not is_deferred:
            self.catalog.release(found.id)
            return {"outcome": "missing", "reason": "no block of the prompt is stored"}
        reasons = []
        if len(wanted) < len(keys):
            reasons.append(f"there is room for {len(wanted)} of {len(keys)} blocks")
        if not pin.is_whole:
            ending = ", the others are being saved" if is_deferred else ""
            reasons.append(f"{len(found.files)} of {len(keys)} blocks are stored{ending}")
        if seconds > SECONDS_MAX:
            reasons.append(f"a pin ends after {SECONDS_MAX} s at most")
        outcome = "deferred" if is_deferred else "clipped" if reasons else "accepted"
        self.last += 1
        self.pins[self.last] = pin
        return {"outcome": outcome, "reason": "; ".join(reasons) or None, "pin": self.last}

    def refresh(self, saving: Collection[str]) -> None:
        """Ends pins whose time is over, and completes those whose request's saves have ended.

        saving: the requests that have saves.
        """
        now = time.monotonic()
        for name, pin in list(self.pins.items()):
            if pin.until <= now:
                self.catalog.release(self.pins.pop(name).reference.id)
            elif not pin.is_whole and pin.request not in saving:
                old = pin.reference
                pin.reference = self.catalog.acquire(pin.space, pin.keys)
                # Blocks that could not be saved are not waited for.
                pin.keys = pin.keys[: len(pin.reference.files)]
                self.catalog.release(old.id)

    def forget(self) -> None:
        """Ends all pins."""
        for pin in self.pins.values():
            self.catalog.release(pin.reference.id)
        self.pins.clear()


def number(given: dict[str, Any], name: str, known: Collection[str] = ()) -> int:
    """Returns a positive number of a payload, of which all names must be known, if given."""
    if known and (unknown := set(given) - set(known)):
        raise Rejected(f"{', '.join(sorted(unknown))} is unknown; there is {', '.join(sorted(known))}")
    value = given.get(name)
    if type(value) is not int or value < 1:
        raise Rejected(f"{name}: {value!r} was given; give a whole number from 1 on")
    return value
