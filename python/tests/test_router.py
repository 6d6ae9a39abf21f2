"""The router's knowledge of blocks, and its choice of an engine."""

import random

import pytest

msgspec = pytest.importorskip("msgspec")

from ripieno.router.choice import Costs, Engine, Member, choose, plan, with_shared
from ripieno.router.directory import Blocks, Feed

BLOCK = 4
PROMPT = list(range(100, 100 + 5 * BLOCK + 2))


def stored(blocks, count, medium="GPU", tokens=PROMPT, first=0):
    """Adds a prompt's first blocks, with the hashes 1, 2 and so on, from one of them on."""
    hashes = list(range(1 + first, 1 + count))
    part = tokens[first * BLOCK : count * BLOCK]
    blocks.stored(hashes, first or None, part, BLOCK, (medium, 0))


def media(blocks, tokens=PROMPT):
    return [sorted(found) for found in blocks.find(tokens)]


def test_leading_blocks_are_found_with_their_media():
    blocks = Blocks(BLOCK)
    stored(blocks, 5)
    stored(blocks, 2, "CPU")
    assert media(blocks) == [["CPU", "GPU"]] * 2 + [["GPU"]] * 3
    assert media(blocks, PROMPT[: 3 * BLOCK]) == [["CPU", "GPU"]] * 2, "the last token is computed"
    assert media(blocks, PROMPT[1:]) == []
    blocks.removed([3], ("GPU", 0))
    assert media(blocks) == [["CPU", "GPU"]] * 2
    blocks.removed([1, 99], ("GPU", 0))
    assert media(blocks) == [["CPU"], ["CPU", "GPU"]]
    blocks.cleared()
    assert media(blocks) == []


def test_a_block_may_come_before_its_parent():
    blocks = Blocks(BLOCK)
    stored(blocks, 5, first=2)
    assert media(blocks) == []
    stored(blocks, 2)
    assert media(blocks) == [["GPU"]] * 5


def test_a_block_without_tokens_is_added_if_it_is_known():
    blocks = Blocks(BLOCK)
    stored(blocks, 2)
    blocks.stored([2, 3], None, [], 0, ("STORAGE", 0))
    assert media(blocks) == [["GPU"], ["GPU", "STORAGE"]]
    assert blocks.places.keys() == {1, 2}
    blocks.stored([3], 2, PROMPT[8:10], 2, ("GPU", 0))
    blocks.stored([3], 2, [8, -1, 9, 1 << 40], BLOCK, ("GPU", 0))
    assert len(media(blocks)) == 2, "blocks of another size, and of what is no token"


def test_the_same_tokens_with_another_hash():
    """Such as those of a prompt with a salt, which not all events tell."""
    blocks = Blocks(BLOCK)
    stored(blocks, 2)
    blocks.stored([77], None, PROMPT[:BLOCK], BLOCK, ("GPU", 0))
    assert media(blocks) == [["GPU"]] * 2
    blocks.removed([77], ("GPU", 0))
    assert media(blocks) == [["GPU"]] * 2


def test_groups_of_layers_are_apart():
    blocks = Blocks(BLOCK)
    stored(blocks, 1)
    blocks.stored([1], None, PROMPT[:BLOCK], BLOCK, ("GPU", 1))
    blocks.removed([1], ("GPU", 0))
    assert media(blocks) == [["GPU"]]
    blocks.removed([1], ("GPU", 1))
    assert not blocks.hashes and not blocks.places and not blocks.keys


class Publisher:
    """An engine's side: random events of a tree of blocks, and the replay of the last ones."""

    def __init__(self, chance, kept):
        self.chance, self.kept, self.time = chance, kept, 0.0
        self.start()

    def start(self):
        self.truth, self.sent = {}, []

    def publish(self):
        """Returns a batch: its number, its time, and its events."""
        events = [self.event() for _ in range(self.chance.randrange(1, 4))]
        self.time += 1
        self.sent.append((len(self.sent), self.time, events))
        return self.sent[-1]

    def event(self):
        places = [(key, place) for key, found in self.truth.items() for place in found]
        kind = self.chance.random()
        if kind < 0.02:
            self.truth = {}
            return ("cleared",)
        place = (self.chance.choice(["GPU", "CPU", "STORAGE"]), 0)
        if kind < 0.3 and places:
            key, place = self.chance.choice(places)
            self.truth[key].discard(place)
            return "removed", [hash(key)], place
        # A path of a tree, whose parent may be gone.
        path = tuple(self.chance.randrange(2) for _ in range(self.chance.randrange(1, 5)))
        self.truth.setdefault(path, set()).add(place)
        return "stored", [hash(path)], hash(path[:-1]) if path[1:] else None, [path[-1]], 1, place

    def replay(self, first):
        return [batch for batch in self.sent[-self.kept :] if batch[0] >= first]


def known(blocks, truth):
    """Returns the media of each prompt of the tree, by the directory and by the truth."""
    paths = [tuple(number >> bit & 1 for bit in range(4)) for number in range(16)]

    def real(path):
        found = []
        for end in range(1, 5):
            places = truth.get(path[:end])
            if not places:
                break
            found.append({medium for medium, _ in places})
        return found

    return [(blocks.find([*path, 9]), real(path)) for path in paths]


@pytest.mark.parametrize("seed", range(100))
def test_events_that_are_lost_late_twice_or_in_disorder(seed):
    """The directory is exact if all is repeated, as for even seeds; else it has nothing that is
    gone."""
    chance, is_repeated = random.Random(seed), seed % 2 == 0
    publisher, blocks = Publisher(chance, 1000 if is_repeated else 3), Blocks(1)

    def apply(events):
        for kind, *args in events:
            getattr(blocks, kind)(*args)

    feed, late = Feed(apply, blocks.cleared), []

    def receive(number, sent, events):
        if not feed.take(number, sent, events):
            is_lost = not is_repeated and chance.random() < 0.2
            replayed = [] if is_lost else publisher.replay(feed.next)
            chance.shuffle(replayed)
            feed.resume(replayed, number)
            feed.take(number, sent, events)

    for _ in range(200):
        if chance.random() < 0.01:
            publisher.start()
        batch, kind = publisher.publish(), chance.random()
        if kind < 0.6:
            receive(*batch)
        elif kind < 0.8:
            late.append(batch)
        if late and chance.random() < 0.3:
            receive(*late.pop(chance.randrange(len(late))))
        if chance.random() < 0.1:
            receive(*chance.choice(publisher.sent))
    # One arrives at last.
    receive(*publisher.publish())
    assert feed.next == len(publisher.sent)
    for found, real in known(blocks, publisher.truth):
        assert len(found) <= len(real)
        assert all(part <= whole for part, whole in zip(found, real))
        assert found == real or not is_repeated
    # All events again, as after a restart of the router.
    again = Blocks(1)

    def apply_again(events):
        for kind, *args in events:
            getattr(again, kind)(*args)

    Feed(apply_again, again.cleared).resume(publisher.sent, len(publisher.sent))
    assert all(found == real for found, real in known(again, publisher.truth))


def test_a_batch_of_an_earlier_life_is_not_kept():
    applied = []
    feed = Feed(applied.append, applied.clear)
    assert feed.take(0, 10.0, "new")
    assert not feed.take(1, 5.0, "old")
    feed.resume([(0, 10.0, "new")], 0)
    assert applied == ["new"]


def engine(name, speed=100.0, link=None, p2p="h:1", weights="", **costs):
    """Computes 100 tokens a second, and has 1 MB of KV cache a token."""
    read = {"CPU": 10.0, "STORAGE": 1.0}
    table = Costs(tokens_per_second=speed, token_bytes=1e6, read=read, link_gbps=link, **costs)
    identity = {"weights": weights}
    return Engine(Member(name, "", None, p2p, table, "model", BLOCK, identity))


def planned(engine, *peers):
    found = {each: each.blocks.find(PROMPT) for each in (engine, *peers)}
    return plan(engine, found, len(PROMPT))


def test_the_engine_with_the_prefix_is_chosen_unless_it_is_busy():
    one, two = engine("one"), engine("two")
    stored(two.blocks, 5)
    for turn in range(2):
        found = choose("prefix", [one, two], PROMPT, turn)
        assert (found.engine, found.source) == (two, None)
        assert found.seconds == found.computes == pytest.approx(2 / 100)
    two.prompts = 1.0
    found = choose("prefix", [one, two], PROMPT, 0)
    assert found.engine is one and found.computes == pytest.approx(22 / 100)


def test_tiers_are_weighed():
    disk, host, gpu = engines = [engine(name) for name in ("disk", "host", "gpu")]
    stored(disk.blocks, 5, "STORAGE")
    assert planned(disk).seconds == pytest.approx(0.02 + 20 * 1e6 / 1e9)
    assert choose("prefix", engines, PROMPT, 1).engine is disk
    stored(host.blocks, 5, "CPU")
    assert choose("prefix", engines, PROMPT, 0).engine is host
    stored(gpu.blocks, 5)
    assert choose("prefix", engines, PROMPT, 0).engine is gpu
    stored(disk.blocks, 5, "OTHER")
    assert planned(disk).seconds == pytest.approx(0.02 + 20 * 1e6 / 1e9)


def test_engines_on_a_server_have_the_blocks_of_each_other():
    """A server has what any of them stored; what is only in another one's memory is not there."""
    one, two, alone, other = engines = [
        engine(name, weights=weights)
        for name, weights in [("one", "w"), ("two", "w"), ("alone", "w"), ("other", "x")]
    ]
    for each in (one, two, other):
        each.member = msgspec.structs.replace(each.member, store="here")
    stored(one.blocks, 2, "STORAGE")
    stored(two.blocks, 2)
    stored(two.blocks, 4, "STORAGE", first=2)
    stored(two.blocks, 5, "CPU", first=4)
    found = with_shared({each: each.blocks.find(PROMPT) for each in engines})
    assert found[one] == [{"STORAGE"}] * 4
    assert found[two] == [{"GPU", "STORAGE"}] * 2 + [{"STORAGE"}] * 2 + [{"CPU"}]
    assert found[alone] == found[other] == []
    assert choose("prefix", [alone, one], PROMPT, 0).engine is one
    two.prompts = 1.0
    # Four blocks of four tokens are read, and six tokens computed.
    assert choose("prefix", engines, PROMPT, 0).engine is one
    assert choose("prefix", engines, PROMPT, 0).seconds == pytest.approx(0.06 + 16 * 1e6 / 1e9)


def test_blocks_are_fetched_only_if_that_beats_computing():
    """20 tokens take 0.2 s to compute, and 160 Mbit to fetch."""
    for gbps, is_fetched in [(0.79, False), (0.85, True), (100.0, True)]:
        own, peer = engine("own", link=gbps), engine("peer", link=100.0)
        stored(peer.blocks, 5, "STORAGE")
        found = planned(own, peer)
        assert (found.source is peer) == is_fetched
        takes = max(20 * 8e6 / gbps / 1e9, 0.02) + 0.001 if is_fetched else 0.2
        assert found.seconds == pytest.approx(takes + 0.02)
        assert found.computes == pytest.approx(0.02 if is_fetched else 0.22)


def test_only_more_blocks_than_its_own_are_fetched():
    own, peer = engine("own", link=10.0), engine("peer", link=10.0)
    stored(own.blocks, 4, "CPU")
    stored(peer.blocks, 4, "CPU")
    assert planned(own, peer).source is None
    stored(peer.blocks, 5, "CPU")
    found = planned(own, peer)
    loads, fetches = 4 * BLOCK * 1e6 / 10e9, 0.001 + BLOCK * 8e6 / 10e9
    assert found.source is peer
    assert found.seconds == pytest.approx(loads + fetches + 0.02)


@pytest.mark.parametrize(
    "peer, medium",
    [
        ({"link": None}, "CPU"),
        ({"link": 100.0, "p2p": None}, "CPU"),
        ({"link": 100.0, "weights": "others"}, "CPU"),
        ({"link": 100.0, "link_latency_ms": 250}, "CPU"),
        ({"link": 100.0}, "GPU"),
        ({"link": 100.0}, "OTHER"),
    ],
)
def test_nothing_is_fetched_from_who_cannot_send(peer, medium):
    own, peer = engine("own", link=100.0), engine("peer", **peer)
    stored(peer.blocks, 5, medium)
    assert planned(own, peer).source is None


def test_a_busy_engine_is_a_source_for_the_others():
    idle, busy = engine("idle", link=100.0), engine("busy", link=100.0)
    stored(busy.blocks, 5, "CPU")
    assert choose("prefix", [idle, busy], PROMPT, 0).engine is busy
    busy.prompts = 1.0
    found = choose("prefix", [idle, busy], PROMPT, 1)
    assert (found.engine, found.source) == (idle, busy)


def test_other_policies():
    engines = [engine(str(number)) for number in range(3)]
    stored(engines[0].blocks, 5)
    turns = [choose("round-robin", engines, PROMPT, turn).engine for turn in range(4)]
    assert turns == [*engines, engines[0]]
    engines[0].requests, engines[1].prompts = 1, 0.1
    assert choose("least-loaded", engines, PROMPT, 0).engine is engines[2]
