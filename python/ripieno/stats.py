"""Counts of a store's files. Counters are from its opening on."""

from dataclasses import dataclass

__all__ = ["CatalogStats", "Usage"]


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
