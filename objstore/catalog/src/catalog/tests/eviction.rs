//! Policies by what they keep.

use super::*;

/// Part of a working set that is found when blocks used once go past it: in hundredths.
fn working_set_beside_scans(policy: PolicyKind) -> u32 {
    let (files, requests, blocks, rounds) = (1000, 50, 12, 30);
    let mut catalog = Catalog::new(CatalogConfig { journal: false, policy, ..config(files, 1) });
    let a = tenant(&mut catalog, b"a");
    let (mut hits, mut once) = (0, 1_000_000);
    for round in 0..rounds {
        for request in 0..requests {
            let own = keys(request * blocks..(request + 1) * blocks);
            let reference = catalog.acquire(a, &own).unwrap();
            hits += if round == 0 { 0 } else { reference.files.len() as u32 };
            store(&mut catalog, a, &own);
            catalog.release(reference.id).unwrap();
            // As many as the working set has.
            store(&mut catalog, a, &keys(once..once + blocks));
            once += blocks;
        }
    }
    100 * hits / ((rounds - 1) * requests * blocks)
}

#[test]
fn scans_flush_an_lru_cache_and_not_the_default() {
    assert_eq!(working_set_beside_scans(PolicyKind::Lru), 0);
    let kept = working_set_beside_scans(PolicyKind::default());
    assert!(kept > 90, "{kept} %");
    let kept = working_set_beside_scans(PolicyKind::S3Fifo);
    assert!(kept > 90, "{kept} %");
}

/// Where nothing is ever used again, all policies have to go by age alone, roughly.
#[test]
fn without_any_use_the_oldest_go() {
    for policy in PolicyKind::ALL.iter().copied() {
        let mut catalog = Catalog::new(CatalogConfig { journal: false, policy, ..config(100, 1) });
        let a = tenant(&mut catalog, b"a");
        for request in 0..100 {
            store(&mut catalog, a, &keys(request * 10..(request + 1) * 10));
        }
        for request in 91..100 {
            let own = keys(request * 10..(request + 1) * 10);
            assert_eq!(catalog.lookup(a, &own), Ok(10), "{policy:?} {request}");
        }
    }
}
