use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::model::MODELS;

/// Unlimited prefix cache as a tree: an ID names a block only below its parent.
#[derive(Default)]
struct Tree {
    children: HashMap<(usize, u64), usize>,
}

impl Tree {
    fn hits(&mut self, ids: &[u64]) -> u64 {
        let (mut node, mut hits) = (0, 0);
        for &id in ids {
            let fresh = self.children.len() + 1;
            let next = *self.children.entry((node, id)).or_insert(fresh);
            hits += u64::from(next != fresh);
            node = next;
        }
        hits
    }
}

fn plan(requests: &[&[u64]], block_tokens: u32, max: Option<u64>) -> Plan {
    let requests: Vec<Request> = requests
        .iter()
        .map(|ids| Request {
            input_tokens: 512 * ids.len() as u64,
            output_tokens: 1,
            hash_ids: (*ids).into(),
            ..Request::default()
        })
        .collect();
    Plan::new(requests.into_iter(), &Shape::new(&MODELS[0], block_tokens).unwrap(), max)
}

#[test]
fn the_same_id_behind_another_prefix_is_another_block() {
    let plan = plan(&[&[1, 2, 3], &[4, 2, 3], &[1, 2, 9], &[3], &[], &[4, 2, 3, 1]], 512, None);
    assert_eq!(plan.ideal_hits, 2 + 3);
    assert_eq!(plan.trace_blocks(), 3 + 3 + 3 + 1 + 4);
    assert_eq!(plan.distinct, 3 + 3 + 1 + 1 + 1);
    assert_eq!((plan.requests(), plan.longest), (6, 4));
    assert_eq!(plan.keys(0)[..2], plan.keys(2)[..2]);
    assert_ne!(plan.keys(0)[1], plan.keys(1)[1]);
    assert!(plan.keys(4).is_empty());
}

#[test]
fn ids_are_more_than_32_bits() {
    let plan = plan(&[&[1], &[1 | 1 << 32], &[1 << 32]], 512, None);
    assert_eq!((plan.ideal_hits, plan.distinct), (0, 3));
}

#[test]
fn small_blocks_are_parts_of_trace_blocks() {
    let plan = plan(&[&[1, 2], &[1, 3]], 128, None);
    assert_eq!((plan.subs, plan.keys(0).len(), plan.longest), (4, 8, 8));
    assert_eq!((plan.ideal_hits, plan.trace_blocks(), plan.distinct), (1, 4, 12));
    assert_eq!(plan.keys(0)[..4], plan.keys(1)[..4]);
    assert!(plan.keys(0)[4..].iter().all(|key| !plan.keys(1).contains(key)));
}

#[test]
fn a_plan_ends_where_the_room_does() {
    let requests: [&[u64]; 4] = [&[1, 2, 3], &[1, 2], &[7, 8], &[1]];
    for (max, wanted) in [(0, 1), (3, 2), (4, 2), (5, 4)] {
        let plan = plan(&requests, 512, Some(max));
        assert_eq!(plan.requests(), wanted, "{max}");
        assert_eq!(plan.keys(plan.requests() - 1).len(), requests[wanted - 1].len());
    }
}

proptest! {
    #[test]
    fn hits_are_those_of_a_cache_without_limits(
        requests in prop::collection::vec(prop::collection::vec(0u64..4, 0..7), 0..40),
        log2 in 0u32..3,
    ) {
        let mut tree = Tree::default();
        let hits: u64 = requests.iter().map(|ids| tree.hits(ids)).sum();
        let slices: Vec<&[u64]> = requests.iter().map(Vec::as_slice).collect();
        let plan = plan(&slices, 512 >> log2, None);
        prop_assert_eq!(plan.ideal_hits, hits);
        prop_assert_eq!(plan.distinct, (tree.children.len() as u64) << log2);
        for (request, ids) in requests.iter().enumerate() {
            prop_assert_eq!(plan.keys(request).len(), ids.len() << log2);
        }
    }
}
