//! The catalog, one property after the other.

mod model;

use super::*;
use crate::{namespace::Namespace, record::Records};

fn key(number: u32) -> BlockKey {
    let mut digest = [0; 32];
    digest[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(digest)
}

fn keys(numbers: std::ops::Range<u32>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

fn config(files: u32, ranks: u32) -> CatalogConfig {
    CatalogConfig {
        files,
        ranks,
        words_per_file: 2 * ranks,
        journal: true,
        files_ahead: 0,
        seed: 1,
        policy: PolicyKind::default(),
        write_budget: None,
    }
}

fn tenant(catalog: &mut Catalog, salt: &[u8]) -> NamespaceId {
    let descriptor = Namespace { tenant_salt: salt.to_vec(), ..Namespace::default() };
    catalog.namespace(&descriptor).unwrap()
}

fn store(catalog: &mut Catalog, namespace: NamespaceId, keys: &[BlockKey]) -> Write {
    let write = catalog.begin(namespace, keys).unwrap();
    let own: Vec<FileId> = write.own().collect();
    for rank in 0..catalog.config.ranks {
        let checksums: Vec<u32> = own.iter().flat_map(|file| [file.0, rank]).collect();
        catalog.written(write.id, rank, &checksums).unwrap();
    }
    catalog.commit(write.id).unwrap();
    write
}

fn flush(catalog: &mut Catalog) -> Vec<Vec<u8>> {
    let mut groups = Vec::new();
    while let Some(group) = catalog.pending(1 << 20) {
        catalog.durable(group.lsn);
        groups.push(group.records);
    }
    groups
}

#[test]
fn a_restart_finds_what_was_committed() {
    let mut catalog = Catalog::new(config(16, 2));
    let (a, b) = (tenant(&mut catalog, b"a"), tenant(&mut catalog, b"b"));
    store(&mut catalog, a, &keys(0..5));
    store(&mut catalog, b, &keys(0..3));
    catalog.pin(a, &keys(0..1)).unwrap();
    catalog.remove(a, &keys(4..5)).unwrap();
    assert_eq!(catalog.lookup(a, &keys(0..5)), Ok(4));
    assert_eq!(catalog.lookup(b, &keys(0..5)), Ok(3));
    let mut again = Catalog::new(config(16, 2));
    for group in flush(&mut catalog) {
        for record in Records::new(&group) {
            again.apply(&record.unwrap()).unwrap();
        }
    }
    again.recovered();
    assert_eq!(again.lookup(a, &keys(0..5)), Ok(4));
    assert_eq!(again.lookup(b, &keys(0..5)), Ok(3));
    assert_eq!(again.counts(), catalog.counts());
    let reference = again.acquire(b, &keys(0..3)).unwrap();
    let file = reference.files[2];
    assert_eq!(again.checksums(file), [file.0, 0, file.0, 1]);
    assert_eq!(again.release(reference.id), Ok(()));
    assert!(again.release(reference.id).is_err());
}
