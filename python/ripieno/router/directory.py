"""Blocks of an engine, by the events that it published."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

Hash = int | bytes
"""An engine's hash of a block and all before it. Those of two engines are not compared."""
Place = tuple[str, int | None]
"""A medium, such as "GPU", "CPU" or "STORAGE", and a group of layers."""
Batch = TypeVar("Batch")

GPU, STORAGE = "GPU", "STORAGE"


def blocks_of(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Returns the whole blocks of a prompt, as keys of tokens.

    Raises OverflowError for what is no token.
    """
    size = block_tokens * array("I").itemsize
    packed = array("I", tokens).tobytes()
    return [packed[at : at + size] for at in range(0, len(packed) - size + 1, size)]


class Blocks:
    """Where an engine has blocks. Late, and possibly wrong: only the engine knows.

    An event whose parent was not seen is kept, and found as soon as the parent is.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.hashes: dict[tuple[Hash | None, bytes], Hash] = {}
        """By the hash before it and its tokens: a block's hash."""
        self.places: dict[Hash, set[Place]] = {}
        self.keys: dict[Hash, tuple[Hash | None, bytes]] = {}
        """The inverse of `hashes`."""

    def stored(
        self,
        hashes: Sequence[Hash],
        parent: Hash | None,
        tokens: Sequence[int],
        block_tokens: int,
        place: Place,
    ) -> None:
        """Adds blocks that follow each other. Those without tokens, or of another size, are added
        if they are known from other places."""
        packed: list[bytes] = []
        if block_tokens == self.block_tokens:
            with contextlib.suppress(OverflowError):
                packed = blocks_of(tokens, block_tokens)
        if len(packed) == len(hashes):
            for block, own in zip(packed, hashes):
                if own not in self.keys and (parent, block) not in self.hashes:
                    self.keys[own] = parent, block
                    self.hashes[parent, block] = own
                parent = own
        for own in hashes:
            if own in self.keys:
                self.places.setdefault(own, set()).add(place)

    def removed(self, hashes: Iterable[Hash], place: Place) -> None:
        for own in hashes:
            places = self.places.get(own, set())
            places.discard(place)
            if not places and own in self.keys:
                del self.hashes[self.keys.pop(own)]
                self.places.pop(own, None)

    def cleared(self) -> None:
        self.hashes.clear()
        self.places.clear()
        self.keys.clear()

    def find(self, tokens: Sequence[int]) -> list[set[str]]:
        """Returns the media of each leading block of a prompt; the block of its last token, which
        is computed in any case, is not among them."""
        found: list[set[str]] = []
        before: Hash | None = None
        for block in blocks_of(tokens[:-1], self.block_tokens):
            before = self.hashes.get((before, block))
            if before is None:
                break
            found.append({medium for medium, _ in self.places[before]})
        return found


class Feed(Generic[Batch]):
    """Batches of an engine, applied once each and in their order.

    A batch has a sequence number, from 0 in each life of the engine, and the time at which it was
    sent.
    """

    def __init__(self, apply: Callable[[Batch], None], clear: Callable[[], None]) -> None:
        self.apply, self.clear = apply, clear
        self.next = 0
        self.newest = float("-inf")
        """Time of the newest batch that was applied."""

    def take(self, number: int, sent: float, batch: Batch) -> bool:
        """Applies a batch, unless it was. Returns False if others are missing before it: resume()
        must come next."""
        if number < self.next and sent <= self.newest:
            return True
        if number < self.next or sent < self.newest:
            # The engine was started again, or this is from before that.
            self.clear()
            self.next, self.newest = 0, float("-inf")
        if number > self.next:
            return False
        self.apply(batch)
        self.next, self.newest = number + 1, sent
        return True

    def resume(self, replayed: Iterable[tuple[int, float, Batch]], until: int) -> None:
        """Applies batches that were asked for from `next` on. Forgets all blocks if one is missing:
        it may have removed any."""
        for number, sent, batch in sorted(replayed, key=lambda each: each[0]):
            if number > self.next:
                self.clear()
                self.next = number
            if number == self.next:
                self.take(number, sent, batch)
        if self.next < until:
            self.clear()
            self.next = until
