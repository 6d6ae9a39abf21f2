//! Which of some keys are stored: the rule of all loads, wherever the store is.

use std::{any::Any, fmt::Debug};

use objstore::{BlockId, BlockKey, Prefix, StoreError};

use crate::error::StackError;

/// Stored blocks that a lookup found. They stay stored until this is dropped.
pub trait KvPrefix: Any + Debug + Send + Sync {
    /// Returns the number of blocks found.
    fn blocks(&self) -> usize;
}

impl KvPrefix for Prefix {
    fn blocks(&self) -> usize {
        self.len()
    }
}

/// Finds those of the keys that are stored, and holds them: `lookup` holds leading ones of some
/// keys, `are_stored` holds nothing. Returns what is held, the blocks of the keys found, and for
/// each key if it was found.
///
/// Most engines store prefixes: one lookup is all for these. Keys behind a gap are looked up once
/// more without the gap, since a store knows no order of keys. This counts as two lookups. A key
/// that is evicted between the two is not found, nor are those after it.
///
/// # Errors
/// Returns [`StoreError::Argument`] unless there is a block for each key, or an error of the two.
pub fn find<P: KvPrefix, E: From<StackError>>(
    keys: &[BlockKey],
    blocks: &[BlockId],
    lookup: impl Fn(&[BlockKey]) -> Result<P, E>,
    are_stored: impl Fn(&[BlockKey]) -> Result<Vec<bool>, E>,
) -> Result<(P, Vec<BlockId>, Vec<bool>), E> {
    if keys.len() != blocks.len() {
        let (blocks, positions) = (blocks.len(), keys.len());
        return Err(StackError::from(StoreError::positions(blocks, positions, "keys")).into());
    }
    let mut held = lookup(keys)?;
    let leading = held.blocks();
    let mut found = vec![true; leading];
    found.extend(are_stored(&keys[leading..])?);
    if found[leading..].contains(&true) {
        // Or it would count twice against a limit of what is held.
        drop(held);
        held = lookup(&chosen(keys, &found))?;
        found.iter_mut().filter(|it| **it).skip(held.blocks()).for_each(|it| *it = false);
    }
    let blocks = chosen(blocks, &found);
    Ok((held, blocks, found))
}

fn chosen<T: Copy>(all: &[T], which: &[bool]) -> Vec<T> {
    all.iter().zip(which).filter(|(_, is_chosen)| **is_chosen).map(|(each, _)| *each).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[derive(Debug)]
    struct Count(usize);

    impl KvPrefix for Count {
        fn blocks(&self) -> usize {
            self.0
        }
    }

    /// Finds keys of which these are stored, and of which the second lookup no longer finds `gone`.
    /// Returns what is found, its blocks, and the number of lookups.
    fn found(stored: &[u8], gone: u8) -> (Vec<bool>, Vec<u32>, usize) {
        let (keys, blocks): (Vec<_>, Vec<_>) =
            (0..5).map(|at| (BlockKey([at; 32]), BlockId(10 + u32::from(at)))).unzip();
        let lookups = RefCell::new(0);
        let lookup = |keys: &[BlockKey]| {
            *lookups.borrow_mut() += 1;
            let is_there = |key: &&BlockKey| {
                stored.contains(&key.0[0]) && (*lookups.borrow() == 1 || key.0[0] != gone)
            };
            Ok(Count(keys.iter().take_while(is_there).count()))
        };
        let are_stored =
            |keys: &[BlockKey]| Ok(keys.iter().map(|key| stored.contains(&key.0[0])).collect());
        let (held, blocks, found) =
            find::<Count, StackError>(&keys, &blocks, lookup, are_stored).unwrap();
        assert_eq!(held.0, blocks.len());
        (found, blocks.iter().map(|block| block.0).collect(), lookups.into_inner())
    }

    #[test]
    fn keys_behind_a_gap_are_found() {
        const T: bool = true;
        const F: bool = false;
        const NONE: u8 = 9;
        assert_eq!(found(&[0, 1, 2, 3, 4], NONE), (vec![T; 5], vec![10, 11, 12, 13, 14], 1));
        assert_eq!(found(&[0, 1], NONE), (vec![T, T, F, F, F], vec![10, 11], 1));
        assert_eq!(found(&[], NONE), (vec![F; 5], vec![], 1));
        assert_eq!(found(&[0, 2, 4], NONE), (vec![T, F, T, F, T], vec![10, 12, 14], 2));
        assert_eq!(found(&[1, 3], NONE), (vec![F, T, F, T, F], vec![11, 13], 2));
        // One is evicted between the two lookups.
        assert_eq!(found(&[0, 2, 4], 2), (vec![T, F, F, F, F], vec![10], 2));
        let error =
            find::<Count, StackError>(&[], &[BlockId(0)], |_| unreachable!(), |_| unreachable!());
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "1 blocks were given for 0 keys; give one for each");
    }
}
