"""Hints of requests, in vLLM's form (KvHintsEnvelope), each with an answer of its own.

Requests of `ripieno serve` over HTTP have the same hints and answers: docs/reference/openapi.json.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.logger import init_logger

import ripieno

if TYPE_CHECKING:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.request import Request

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


Pin: TypeAlias = Callable[..., tuple[str, str | None, int | None]]
"""Pins a request's blocks: pin(seconds, bytes_max=...). Returns what Catalog.pin() does."""


def stores(request: Request | ReqContext) -> bool:
    """Returns False if a request asks to store nothing."""
    return (request.kv_transfer_params or {}).get("ripieno.store", True) is not False


def answer(
    hints: KvHintsEnvelope,
    pin: Pin,
    unpin: Callable[[int], bool],
    failed: Callable[[ripieno.Error], object] | None = None,
) -> list[dict[str, Any]]:
    """Carries out the hints of a request that has ended, and returns an answer to each. Calls
    `failed` with an error of the store."""
    answers = []
    for hint in hints.actions:
        try:
            outcome, reason, number = carry_out(hint, pin, unpin)
        except (Rejected, ripieno.Error) as error:
            outcome, reason, number = "rejected", str(error), None
            if failed and isinstance(error, ripieno.Error):
                failed(error)
        if outcome == "rejected":
            logger.warning("ripieno: hint %s is rejected: %s", hint.action_id, reason)
        named = {"action_id": hint.action_id, "outcome": outcome}
        answers.append(named | {"reason": reason, "pin": number})
    return answers


def carry_out(
    hint: KvHintAction, pin: Pin, unpin: Callable[[int], bool]
) -> tuple[str, str | None, int | None]:
    kind, given = hint.action_type, hint.payload
    if hint.action_version.split(".")[0] != "1":
        raise Rejected(f"{kind} has version {hint.action_version}; version 1 is known")
    if kind == "kv.pin":
        seconds = number(given, "ttl_s", {"ttl_s", "bytes_max"})
        bytes_max = number(given, "bytes_max") if "bytes_max" in given else None
        return pin(seconds, bytes_max=bytes_max)
    if kind == "kv.deref":
        if unpin(number(given, "pin", {"pin"})):
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
