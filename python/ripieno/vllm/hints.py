"""Hints of requests, in vLLM's form (KvHintsEnvelope), each with an answer of its own.

Requests of `ripieno serve` over HTTP have the same hints and answers: docs/reference/openapi.json.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    from .place import Catalog

logger = init_logger("vllm.ripieno")

ANSWERS = "ripieno.hints"
"""Name of the answers in the kv_transfer_params of a request's output."""

UNSUPPORTED = {
    "kv.prefetch": "waiting requests are announced to the store by themselves",
    "kv.demote": "the store decides what its DRAM keeps",
    "kv.fetch": "the store decides what its DRAM keeps",
    "kv.retain": "the order of eviction is that of expected reuse; use kv.pin to keep blocks",
}


class Rejected(ValueError):
    """A hint that is not carried out; its text is the reason."""


def answer(
    catalog: Catalog,
    hints: KvHintsEnvelope,
    space: int,
    keys: Sequence[bytes],
    saves: bool,
) -> list[dict[str, Any]]:
    """Carries out the hints of a request that has ended, and returns an answer to each.

    keys: those of the prompt's blocks; saves: some of these blocks are being saved.
    """
    answers = []
    for hint in hints.actions:
        try:
            outcome, reason, pin = carry_out(catalog, hint, space, keys, saves)
        except Rejected as error:
            outcome, reason, pin = "rejected", str(error), None
        if outcome == "rejected":
            logger.warning("ripieno: hint %s is rejected: %s", hint.action_id, reason)
        named = {"action_id": hint.action_id, "outcome": outcome}
        answers.append(named | {"reason": reason, "pin": pin})
    return answers


def carry_out(
    catalog: Catalog, hint: KvHintAction, space: int, keys: Sequence[bytes], saves: bool
) -> tuple[str, str | None, int | None]:
    kind, given = hint.action_type, hint.payload
    if hint.action_version.split(".")[0] != "1":
        raise Rejected(f"{kind} has version {hint.action_version}; version 1 is known")
    if kind == "kv.pin":
        seconds = number(given, "ttl_s", {"ttl_s", "bytes_max"})
        bytes_max = number(given, "bytes_max") if "bytes_max" in given else None
        return catalog.pin(space, keys, seconds, bytes_max=bytes_max, wait=saves)
    if kind == "kv.deref":
        if catalog.unpin(number(given, "pin", {"pin"})):
            return "accepted", None, None
        return "missing", "there is no such pin, or not any more", None
    raise Rejected(UNSUPPORTED.get(kind, f"{kind} is unknown"))


def number(given: dict[str, Any], name: str, known: Collection[str] = ()) -> int:
    """Returns a positive number of a payload, of which all names must be known, if given."""
    if known and (unknown := set(given) - set(known)):
        raise Rejected(f"{', '.join(sorted(unknown))} is unknown; there is {', '.join(sorted(known))}")
    value = given.get(name)
    if type(value) is not int or not 1 <= value < 1 << 64:
        raise Rejected(f"{name}: {value!r} was given; give a whole number from 1 on, of 64 bits")
    return value
