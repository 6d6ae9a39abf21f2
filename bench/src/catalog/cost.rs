//! Cost of a file in the catalog: stored, acquired, copied by a snapshot.

use kv_catalog::{BlockKey, Catalog, CatalogConfig, Namespace, SnapshotCursor};
use rand::{RngCore as _, SeedableRng as _, rngs::SmallRng};

use super::eviction::config;
use crate::sample::timed;

/// Blocks per request.
const REQUEST: usize = 1000;
/// Bytes of records that the journal requests per piece.
const PIECE_BYTES: usize = 1 << 20;

/// Seconds for all files.
pub struct Found {
    /// Begin and commit, until the catalog is full.
    pub store: f64,
    /// Acquire and release.
    pub acquire: f64,
    /// Encoding the state as records, in pieces; the next field is the longest piece.
    pub snapshot: f64,
    pub piece: f64,
    /// Bytes of records per file.
    pub bytes_a_file: f64,
}

/// Fills a catalog without checksums, acquires everything, and copies it.
pub fn measure(files: u32) -> Found {
    let mut catalog = Catalog::new(CatalogConfig { journal: true, ..config(files) });
    let namespace = catalog.namespace(&Namespace::default()).expect("the label is short");
    let mut random = SmallRng::seed_from_u64(1);
    let mut keys = vec![BlockKey([0; 32]); files as usize];
    keys.iter_mut().for_each(|key| random.fill_bytes(&mut key.0));
    let ((), store) = timed(|| {
        for keys in keys.chunks(REQUEST) {
            let write = catalog.begin(namespace, keys).expect("it is registered");
            catalog.written(write.id, 0, &[]).expect("it has begun");
            catalog.commit(write.id).expect("its rank has reported");
            catalog.pending(PIECE_BYTES);
        }
    });
    while catalog.pending(PIECE_BYTES).is_some() {}
    let ((), acquire) = timed(|| {
        for keys in keys.chunks(REQUEST) {
            let prefix = catalog.acquire(namespace, keys).expect("it is registered");
            assert_eq!(prefix.files.len(), keys.len(), "all of them are stored");
            catalog.release(prefix.id).expect("it was acquired");
        }
    });
    while catalog.pending(PIECE_BYTES).is_some() {}
    let (mut bytes, mut cursor, mut piece) = (0, Some(SnapshotCursor::default()), 0.0);
    let ((), snapshot) = timed(|| {
        while let Some(at) = cursor {
            let mut records = Vec::new();
            let (next, time) = timed(|| catalog.snapshot(at, PIECE_BYTES, &mut records));
            piece = f64::max(piece, time.as_secs_f64());
            bytes += records.len();
            cursor = next;
        }
    });
    Found {
        store: store.as_secs_f64(),
        acquire: acquire.as_secs_f64(),
        snapshot: snapshot.as_secs_f64(),
        piece,
        bytes_a_file: bytes as f64 / f64::from(files),
    }
}
