"""What a lookup found, and why it did not find the rest: counted, logged and traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from . import spans

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from .groups import Groups, Places
    from .metrics import Stats

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")


@dataclass
class Asked:
    """A lookup."""

    first: int
    """Units that vLLM has by itself."""
    last: int
    """Units to the end of the hit."""
    places: Places
    """Blocks found."""
    begun: int
    ended: int
    """Both in nanoseconds since 1970."""


def why(
    request: Request, unit: int, groups: Groups, state_of: Callable[[bytes], str]
) -> tuple[str, bytes]:
    """Returns why a hit ends before a unit, and the key of the block that is missing there."""
    found = []
    for group, count in enumerate(groups.blocks):
        state, key = "stored", b""
        for at in range(unit * count, (unit + 1) * count):
            (key,) = groups.keys(request, [(group, at)] if groups.is_hybrid else range(at, at + 1))
            state = state_of(key)
            if state != "stored":
                break
        found.append((state, key))
    missing = [each for each in found if each[0] != "stored"]
    if len(missing) < len(found):
        # A draft wants the next block, too; or the windows or states of other groups are missing.
        return "incomplete", (missing or found)[0][1]
    return missing[0]


def note(
    asked: Asked,
    request: Request,
    tokens: int,
    groups: Groups,
    state_of: Callable[[bytes], str],
    stats: Stats,
) -> None:
    """Notes a lookup of a request that got blocks, for `tokens` of which a load is planned."""
    size = groups.tokens
    wanted, whole = request.num_tokens - asked.first * size, (request.num_tokens - 1) // size
    found = (asked.last - asked.first) * size
    # The last token is always computed.
    missed = {"tail": request.num_tokens - whole * size, "declined": found - tokens}
    key = b""
    if asked.last < whole:
        reason, key = why(request, asked.last, groups, state_of)
        missed[reason] = (whole - asked.last) * size
    stats.count("lookup_tokens", wanted)
    stats.count("hit_tokens", tokens)
    for reason, number in missed.items():
        stats.count(f"missed_tokens_{reason}", number)
    counts = {"tokens": wanted, "hit_tokens": tokens}
    span = spans.begin("ripieno.lookup", request.trace_headers, asked.begun, **counts)
    spans.end(span, at=asked.ended)
    logger.debug(
        "ripieno: %s: of %d tokens behind vLLM's own, %d are loaded; missed: %s%s",
        request.request_id,
        wanted,
        tokens,
        ", ".join(f"{number} {reason}" for reason, number in missed.items() if number),
        f"; the hit ends before block {key.hex()}" if key else "",
    )
