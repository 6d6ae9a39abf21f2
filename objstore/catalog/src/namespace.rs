//! Namespaces: separate one engine's blocks from another's.

use sha2::{Digest as _, Sha256};

/// Prefix of the hashed fields: a new version of the fields makes new namespaces.
const DOMAIN: &[u8] = b"ripieno namespace 1";

/// The properties that must be equal for two engines to read each other's blocks.
///
/// A key identifies tokens; a namespace identifies the model, the format and the tenant. Equal keys
/// of two namespaces never match. The catalog keeps the namespace's epoch.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Namespace {
    /// Digest of the model's weights (or of their name and revision).
    pub weights: [u8; 32],
    /// Memory format of a block: shape, order of dimensions, rows.
    pub layout: String,
    /// Type of an element, such as `bfloat16`.
    pub dtype: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Adapter (LoRA) with which the blocks were computed; empty without one.
    pub adapter: String,
    /// Salt that keeps the tenant's blocks apart; empty if tenants share. Only its digest is
    /// stored.
    pub tenant_salt: Vec<u8>,
    /// Name for reports, not part of the identity. At most [`crate::LABEL_BYTES_MAX`] bytes.
    pub label: String,
}

impl Namespace {
    /// Returns the SHA-256 of all fields but the label, each preceded by its length.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let block_tokens = self.block_tokens.to_le_bytes();
        for field in [
            DOMAIN,
            &self.weights,
            self.layout.as_bytes(),
            self.dtype.as_bytes(),
            &block_tokens,
            self.adapter.as_bytes(),
            &self.tenant_salt,
        ] {
            hash.update((field.len() as u64).to_le_bytes());
            hash.update(field);
        }
        hash.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_but_the_label_makes_another_namespace() {
        let text = |text: &str| text.to_owned();
        let base = || Namespace { block_tokens: 16, ..Namespace::default() };
        let all = [
            base(),
            Namespace { weights: [1; 32], ..base() },
            Namespace { layout: text("a"), ..base() },
            Namespace { dtype: text("a"), ..base() },
            Namespace { block_tokens: 17, ..base() },
            Namespace { adapter: text("a"), ..base() },
            Namespace { tenant_salt: b"a".to_vec(), ..base() },
            Namespace { layout: text("ab"), dtype: text("c"), ..base() },
            Namespace { layout: text("a"), dtype: text("bc"), ..base() },
        ];
        for (at, one) in all.iter().enumerate() {
            for other in &all[..at] {
                assert_ne!(one.digest(), other.digest(), "{one:?} {other:?}");
            }
        }
        let labelled = Namespace { label: text("x"), ..base() };
        assert_eq!(labelled.digest(), base().digest());
    }
}
