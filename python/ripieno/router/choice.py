"""Choice of a request's engine, by a table of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from ripieno.router.directory import GPU, STORAGE, Blocks

Positive = Annotated[float, Meta(gt=0)]
Url = Annotated[str, Meta(pattern=r"^https?://[^/]+$")]
Endpoint = Annotated[str, Meta(pattern=r"^(tcp|ipc)://.+$")]
Address = Annotated[str, Meta(pattern=r"^.+:\d{1,5}$")]

POLICIES = ("prefix", "least-loaded", "round-robin")


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    """Speeds of an engine, and of the machine's link to the others."""

    tokens_per_second: Positive
    """Of prompts that are computed."""
    token_bytes: Positive
    """KV cache of a token."""
    read: dict[str, Positive]
    """By medium, GB/s to the GPU. Blocks in other media are not counted."""
    link_gbps: Positive | None = None
    """Without it nothing is fetched over the link."""
    link_latency_ms: Annotated[float, Meta(ge=0)] = 1.0
    """Of a fetch, in addition to its bytes."""

    def seconds(self, media: set[str], size: float) -> float | None:
        """Returns the time to load `size` bytes from the fastest medium, or None."""
        if GPU in media:
            return 0.0
        return min(
            (size / self.read[each] / 1e9 for each in media & self.read.keys()), default=None
        )


class Member(Struct, frozen=True, forbid_unknown_fields=True):
    """An engine as etcd has it."""

    engine: Url
    events: Endpoint
    """Of its KV events, over ZeroMQ."""
    replay: Endpoint | None
    """Where they are repeated."""
    p2p: Address | None
    """Host and port of its `p2p` tier."""
    costs: Costs
    model: str = ""
    """Name of its base model."""
    block_tokens: Annotated[int, Meta(gt=0)] = 1
    identity: dict[str, str] = {}
    """Blocks are taken from members with an equal one only."""
    store: str = ""
    """Members with the same one, and an equal identity, have the blocks in STORAGE of each other:
    they use the same server. Empty: none."""


@dataclass(eq=False)
class Engine:
    """A member, its blocks and its load by this router's requests."""

    member: Member
    blocks: Blocks = field(init=False)
    requests: int = 0
    """Sent to it, and not ended."""
    prompts: float = 0.0
    """Seconds that it computes prompts of requests which have no answer yet."""
    failed: float = float("-inf")
    """Time of its last failure."""

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.member.block_tokens)


@dataclass(frozen=True)
class Plan:
    """A request on an engine."""

    engine: Engine
    seconds: float
    """Until its first token, after the prompts before it."""
    computes: float
    """Seconds of them that it computes."""
    source: Engine | None
    """The engine that it takes blocks from."""


Found = Mapping[Engine, list[set[str]]]
"""By engine: the media of a prompt's leading blocks."""


def with_shared(found: Found) -> Found:
    """Returns the same with the blocks that engines have in a store which others share, too."""
    whole: dict[Engine, list[set[str]]] = {}
    for engine, own in found.items():
        it, media = engine.member, list(own)
        sharers = [
            blocks
            for other, blocks in found.items()
            if it.store and (it.store, it.identity) == (other.member.store, other.member.identity)
        ]
        for at in range(max(map(len, sharers), default=0)):
            if any(STORAGE in blocks[at] for blocks in sharers if at < len(blocks)):
                media[at : at + 1] = [set().union(*media[at : at + 1], {STORAGE})]
            elif at == len(media):
                break
        whole[engine] = media
    return whole


def _fetch(engine: Engine, peer: Engine, found: Found, have: int) -> tuple[int, float]:
    """Returns how many blocks a peer has after the first ones, and the time to fetch them."""
    own, other = engine.member, peer.member
    links = own.costs.link_gbps, other.costs.link_gbps
    if None in links or not own.p2p or not other.p2p or own.identity != other.identity:
        return 0, 0.0
    gbps = min(each for each in links if each)
    size = own.block_tokens * own.costs.token_bytes
    count, seconds = 0, max(own.costs.link_latency_ms, other.costs.link_latency_ms) / 1e3
    for media in found[peer][have:]:
        # A peer does not send what only its GPU has.
        read = other.costs.seconds(media - {GPU}, size)
        if read is None:
            break
        count += 1
        seconds += max(read, size * 8 / gbps / 1e9)
    return count, seconds


def plan(engine: Engine, found: Found, tokens: int) -> Plan:
    """Returns the fastest way to serve a prompt on an engine: loads what it has, fetches more from
    another one if that beats computing, and computes the rest."""
    costs, each = engine.member.costs, engine.member.block_tokens
    have, loads = 0, 0.0
    for media in found[engine]:
        seconds = costs.seconds(media, each * costs.token_bytes)
        if seconds is None:
            break
        have, loads = have + 1, loads + seconds
    computes = (tokens - have * each) / costs.tokens_per_second
    best = Plan(engine, loads + computes, computes, None)
    for peer in found:
        count, fetches = _fetch(engine, peer, found, have) if peer is not engine else (0, 0.0)
        rest = computes - count * each / costs.tokens_per_second
        if count and loads + fetches + rest < best.seconds:
            best = Plan(engine, loads + fetches + rest, rest, peer)
    return best


def choose(policy: str, engines: Sequence[Engine], tokens: Sequence[int], turn: int) -> Plan:
    """Returns the plan for a prompt; of equal ones the next in turn. There are engines."""
    at = turn % len(engines)
    turns = [*engines[at:], *engines[:at]]
    found = with_shared({engine: engine.blocks.find(tokens) for engine in engines})
    if policy == "prefix":
        plans = [plan(engine, found, len(tokens)) for engine in turns]
        return min(plans, key=lambda it: (it.engine.prompts + it.seconds, it.engine.requests))
    if policy == "least-loaded":
        turns.sort(key=lambda it: (it.prompts, it.requests))
    return plan(turns[0], found, len(tokens))
