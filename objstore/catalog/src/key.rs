//! Content-based names of KV blocks: equal keys mean equal tokens and an equal prefix.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// The name of one KV block: a 256-bit digest over its tokens and everything before them, such as
/// vLLM's `sha256` block hashes.
///
/// Collisions are cryptographically infeasible, accidental or deliberate. Tenants are separated by
/// the namespace, not by the key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub [u8; 32]);

impl BlockKey {
    /// Returns the first 16 bytes as a number: a seed for the block contents of tests and replays.
    #[must_use]
    pub fn seed(&self) -> u128 {
        u128::from_le_bytes(self.0[..16].try_into().expect("16 of 32 bytes"))
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({self})")
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Computes the keys of one sequence, block after block: `key = SHA-256(previous || tokens)`.
#[derive(Debug, Clone)]
pub struct KeyChain {
    previous: BlockKey,
}

impl KeyChain {
    /// Starts a chain with `seed`, for engines that have no block hashes of their own.
    #[must_use]
    pub fn new(seed: &[u8]) -> Self {
        Self { previous: BlockKey(Sha256::digest(seed).into()) }
    }

    /// Continues a chain after a block whose key is known.
    #[must_use]
    pub fn after(key: BlockKey) -> Self {
        Self { previous: key }
    }

    /// Returns the key of the next block, which holds exactly these tokens.
    pub fn next(&mut self, tokens: &[u32]) -> BlockKey {
        let mut hash = Sha256::new();
        hash.update(self.previous.0);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        self.previous = BlockKey(hash.finalize().into());
        self.previous
    }

    /// Returns the keys of all whole blocks of `tokens`; a partial block at the end has none.
    ///
    /// # Panics
    /// Panics if `block_tokens` is zero.
    pub fn keys(&mut self, tokens: &[u32], block_tokens: u32) -> Vec<BlockKey> {
        tokens.chunks_exact(block_tokens as usize).map(|block| self.next(block)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sequences_share_keys_exactly_as_long_as_they_share_tokens(
            tokens in proptest::collection::vec(any::<u32>(), 0..200),
            at in any::<prop::sample::Index>(), block in 1u32..9,
        ) {
            let keys = KeyChain::new(b"m").keys(&tokens, block);
            prop_assert_eq!(keys.len(), tokens.len() / block as usize);
            prop_assume!(!tokens.is_empty());
            let at = at.index(tokens.len());
            let mut other = tokens.clone();
            other[at] = other[at].wrapping_add(1);
            let others = KeyChain::new(b"m").keys(&other, block);
            for (i, (a, b)) in keys.iter().zip(&others).enumerate() {
                prop_assert_eq!(a == b, i < at / block as usize, "block {}", i);
            }
        }
    }

    #[test]
    fn salt_and_continuation() {
        let tokens: Vec<u32> = (0..64).collect();
        let keys = KeyChain::new(b"llama").keys(&tokens, 16);
        assert_ne!(keys, KeyChain::new(b"qwen").keys(&tokens, 16));
        assert_eq!(KeyChain::after(keys[1]).keys(&tokens[32..], 16), keys[2..]);
    }

    /// Spells the definition out: engines compute the same keys in other languages.
    #[test]
    fn a_key_is_the_hash_of_previous_key_and_little_endian_tokens() {
        let mut bytes = Sha256::digest(b"s").to_vec();
        bytes.extend([7, 0, 0, 0, 1, 2, 0, 0]);
        let expected = BlockKey(Sha256::digest(&bytes).into());
        assert_eq!(KeyChain::new(b"s").next(&[7, 513]), expected);
    }
}
