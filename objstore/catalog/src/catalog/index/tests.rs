//! Tests of the index.

use super::{super::tests::config, *};

#[test]
fn more_references_than_32_bits_protect_a_file() {
    let (mut index, file) = (Index::new(&config(2, 1)), FileId(0));
    let namespace = NamespaceId(0);
    index.register(namespace, [0; 32], String::new());
    let space = index.tenants.get(namespace).unwrap().space;
    index.insert(file, space, BlockKey([1; 32]), State::Writing);
    index.store(namespace, file);
    assert!(index.candidate(namespace).is_some());
    index.change(file, |entry| entry.refs = u32::MAX.into());
    index.refer(file);
    assert!(index.candidate(namespace).is_none());
}
