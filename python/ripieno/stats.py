"""Counters of stores, catalogs and planes. They count from the opening; sizes are in bytes."""

from dataclasses import dataclass

__all__ = ["CatalogStats", "DramStats", "PlaneStats", "StoreStats", "Usage"]


@dataclass(frozen=True)
class Usage:
    """Use of a store by one namespace, in files: a file holds one block."""

    stored: int
    """Files that lookups find."""
    active: int
    """Of these, files in use by references and requests, or pinned: not evicted."""
    evictable: int
    """Of these, files that are neither in use nor pinned."""
    writing: int
    """Files being written."""
    quota_files: int | None
    """Maximum number of files, or None for no limit."""
    epoch: int
    """Times that bump_epoch() dropped everything."""
    asked: int
    """Blocks that were looked up."""
    hits: int
    """Blocks that were found."""
    committed: int
    """Files that were written and committed."""
    evicted: int
    """Files that were evicted."""
    refused: int
    """Files that were refused because the write budget was used up."""


@dataclass(frozen=True)
class CatalogStats:
    """Files of a catalog, over all namespaces."""

    files: int
    """Files in all."""
    free: int
    """Free files."""
    limbo: int
    """Dropped files that become free once the journal is durable: after sync()."""
    stored: int
    """Files that lookups find."""
    active: int
    """Of these, files in use by references, or pinned: not evicted."""
    evictable: int
    """Of these, files that are neither in use nor pinned."""
    writing: int
    """Files being written."""
    evicted: int
    """Files that were evicted."""


@dataclass(frozen=True)
class DramStats:
    """The memory of the option dram, which keeps copies of blocks. All 0 without such memory."""

    hits: int
    """Loaded blocks that were in it, and were copied."""
    misses: int
    """Loaded blocks that were not in it, and were read from the devices."""
    retrieved_bytes: int
    """Bytes that were copied from it."""
    blocks: int
    """Blocks in it now."""
    evictions: int
    """Blocks that were evicted from it."""
    prefetched_bytes: int
    """Bytes that were prefetched into it."""
    wasted_bytes: int
    """Prefetched bytes that were evicted or overwritten before a load."""


@dataclass(frozen=True)
class PlaneStats:
    """Transfers of a plane."""

    route: str
    """The data path: direct, staged or host."""
    stored_bytes: int
    """Bytes written to the devices, without padding."""
    retrieved_bytes: int
    """Bytes read from the devices, without padding."""
    recoveries: int
    """Recoveries of the devices from a timeout or a fault."""
    commands: int
    """NVMe commands of the I/O kernel."""
    dram: DramStats
    """The memory of the option dram."""


@dataclass(frozen=True)
class StoreStats:
    """Contents and transfers of a store, over all namespaces. A file holds one block."""

    route: str
    """The data path: direct, staged or host."""
    files: int
    """Files in all."""
    files_free: int
    """Free files."""
    files_stored: int
    """Files that lookups find."""
    file_bytes: int
    """Bytes of a file on the devices, padding included."""
    blocks_looked_up: int
    """Blocks that loads looked up."""
    blocks_hit: int
    """Of these, blocks that were found."""
    evictions: int
    """Files that were evicted."""
    files_lost: int
    """Files that lost their key because they could not be read."""
    stored_bytes: int
    """Bytes written to the devices, without padding."""
    retrieved_bytes: int
    """Bytes read from the devices, without padding."""
    journal_bytes: int
    """Bytes written to the journal, padding included."""
    recoveries: int
    """Recoveries of the devices from a timeout or a fault."""
    dram: DramStats
    """The memory of the option dram."""
