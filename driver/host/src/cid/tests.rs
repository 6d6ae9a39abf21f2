use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[test]
fn depth_minus_one_commands_and_never_ffff() {
    let mut table = CidTable::new(4096);
    let mut cids = Vec::new();
    for _ in 0..40 {
        while let Some(cid) = table.take(7) {
            assert_ne!(cid.0, 0xFFFF);
            cids.push(cid);
        }
        assert_eq!(cids.len(), 4095);
        for cid in cids.drain(..) {
            assert_eq!(table.finish(cid), Ok(Finished::Live(7)));
        }
    }
}

#[test]
fn old_generation_is_refused() {
    let mut table = CidTable::new(4);
    let old = table.take(1).unwrap();
    assert_eq!(table.finish(old), Ok(Finished::Live(1)));
    assert_eq!(table.finish(old), Err(CidFault::Unknown), "duplicate completion");
    let new = table.take(2).unwrap();
    assert_eq!(old.0 & 3, new.0 & 3, "the stack reuses the slot");
    assert_eq!(table.finish(old), Err(CidFault::Stale));
    assert_eq!(table.finish(new), Ok(Finished::Live(2)));
}

#[test]
fn abandoned_slot_stays_taken() {
    let mut table = CidTable::new(2);
    let cid = table.take(9).unwrap();
    assert!(table.abandon(cid));
    assert!(!table.abandon(cid));
    assert_eq!(table.take(10), None);
    assert_eq!(table.finish(cid), Ok(Finished::Late(9)));
    assert!(table.take(10).is_some());
}

proptest! {
    /// Checks the table against a map from CID to user word.
    #[test]
    fn behaves_like_a_map(
        log2 in 1u32..7,
        ops in prop::collection::vec(any::<(u8, u16)>(), 1..400),
    ) {
        let depth = 1 << log2;
        let (mut table, mut model) = (CidTable::new(depth), BTreeMap::<u16, u64>::new());
        for (i, (op, pick)) in ops.into_iter().enumerate() {
            match op % 3 {
                0 => {
                    let cid = table.take(i as u64);
                    prop_assert_eq!(cid.is_some(), model.len() < depth as usize - 1);
                    if let Some(cid) = cid {
                        prop_assert_eq!(model.insert(cid.0, i as u64), None);
                    }
                }
                1 if !model.is_empty() => {
                    let (&cid, &user) = model.iter().nth(pick as usize % model.len()).unwrap();
                    model.remove(&cid);
                    prop_assert_eq!(table.finish(Cid(cid)), Ok(Finished::Live(user)));
                }
                _ => {
                    if let std::collections::btree_map::Entry::Vacant(_) = model.entry(pick) {
                        prop_assert!(table.finish(Cid(pick)).is_err());
                    }
                }
            }
            prop_assert_eq!(table.outstanding() as usize, model.len());
        }
    }
}
