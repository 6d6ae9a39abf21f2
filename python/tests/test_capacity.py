"""A directory's capacity is shared by all stores in it."""

import pytest

import ripieno
from ripieno.capacity import made_in, sizes

SHAPE = ripieno.Shape(layers=3, segments=1, object_bytes=4096, block_tokens=16)
MIB = 1 << 20


def prepared(path, name, capacity, engines=1, **options):
    def make(bytes):
        return ripieno.prepare(path / name, SHAPE, capacity=bytes, **options)

    return made_in(path, name, capacity, make, engines)


def test_stores_share_what_the_directory_has(tmp_path):
    path = tmp_path / "kv"
    made = prepared(path, "a", 16 * MIB)
    assert sizes(path) == {"a": 16 * MIB}
    assert path.stat().st_mode & 0o777 == 0o700, "nobody else can put files there"
    with pytest.raises(ripieno.InvalidError, match="nothing of 16.00 MiB is left") as refused:
        prepared(path, "b", 16 * MIB)
    assert "others there are a (16.00 MiB)" in str(refused.value)
    assert f"rm -r {path}/NAME" in str(refused.value)
    assert sizes(path) == {"a": 16 * MIB}, "nothing was made"
    # With more capacity, the new one gets the difference; and both are found again.
    prepared(path, "b", 24 * MIB)
    assert sizes(path) == {"a": 16 * MIB, "b": 8 * MIB}
    assert prepared(path, "a", 24 * MIB) == made
    with pytest.raises(ripieno.InvalidError, match="others there are b"):
        prepared(path, "a", 32 * MIB)
    # The first one with its first options, and the second one with less than it has.
    assert prepared(path, "a", 16 * MIB) == made
    with pytest.raises(ripieno.InvalidError, match="capacity: .* give more than their sum"):
        prepared(path, "b", 7 * MIB)


@pytest.mark.parametrize("capacity", [10_000_000, 16 * MIB + 4096, 3 * MIB + 1])
def test_a_second_layout_does_not_lock_out_the_first(tmp_path, capacity):
    """Their files may have fewer bytes than what was given."""
    made = prepared(tmp_path, "a", capacity)
    other = prepared(tmp_path, "b", 3 * capacity, engines=2)
    assert prepared(tmp_path, "a", capacity) == made
    assert prepared(tmp_path, "b", 3 * capacity, engines=2) == other


def test_engines_share_it_in_equal_parts(tmp_path):
    for engine in ("a-dp0", "a-dp1"):
        prepared(tmp_path, engine, 32 * MIB, engines=2)
    assert sizes(tmp_path) == {"a-dp0": 16 * MIB, "a-dp1": 16 * MIB}
    with pytest.raises(ripieno.InvalidError, match="capacity or devices changed"):
        prepared(tmp_path, "a-dp0", 32 * MIB, engines=4)


@pytest.mark.parametrize(
    ("capacity", "devices", "said"),
    [
        (6 << 30, 1, "the store has 64 MiB in 1 files a rank, and 6 GiB in 1 were asked for"),
        (32 * MIB, 1, "and 32 MiB in 1 were asked for"),
        (64 * MIB, 2, "and 64 MiB in 2 were asked for"),
    ],
)
def test_a_store_keeps_its_size(tmp_path, capacity, devices, said):
    made = prepared(tmp_path, "a", 64 * MIB)
    with pytest.raises(ripieno.InvalidError, match=said):
        prepared(tmp_path, "a", capacity, devices=devices)
    assert prepared(tmp_path, "a", 64 * MIB) == made


def test_too_little_is_not_damage(tmp_path):
    with pytest.raises(ripieno.InvalidError, match="^capacity: .* give more"):
        prepared(tmp_path, "a", MIB)
    with pytest.raises(ripieno.InvalidError, match="at least a MiB a device: 1000 B"):
        prepared(tmp_path, "b", 1000)
