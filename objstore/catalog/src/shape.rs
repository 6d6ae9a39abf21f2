//! The shape of one KV block of a model.

use std::{fmt, ops::Range};

use serde::{Deserialize, Serialize};

use crate::{
    error::LayoutError,
    ids::{Layer, Row},
};

/// Maximum rows of a shape: the limit of the I/O kernel's batch.
pub const ROWS_MAX: u32 = 65_535;

/// The shape of one KV block: number and size of its objects.
///
/// An object is the data of one layer and segment for the tokens of one block: contiguous in the
/// engine's memory and moved as a whole. As JSON it is a part of the server's protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvShape {
    /// Layers of the model (of this GPU's share of it).
    pub layers: u32,
    /// Objects of one layer: 2 if K and V are separate tensors, 1 if they are packed (MLA).
    pub segments: u32,
    /// Bytes of one object.
    pub object_bytes: u32,
    /// Tokens in a block. Only keys and reports use it.
    pub block_tokens: u32,
}

impl fmt::Display for KvShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layers, segments, object_bytes, block_tokens } = self;
        write!(
            f,
            "{layers} layers x {segments} segments, objects of {object_bytes} bytes, \
             {block_tokens} tokens a block"
        )
    }
}

impl KvShape {
    /// Checks that nothing is zero and that the row count can be represented.
    ///
    /// # Errors
    /// Returns [`LayoutError`], which names the field.
    pub fn validate(&self) -> Result<(), LayoutError> {
        for (field, value) in [
            ("layers", self.layers),
            ("segments", self.segments),
            ("object_bytes", self.object_bytes),
            ("block_tokens", self.block_tokens),
        ] {
            if value == 0 {
                return Err(LayoutError::shape(field, "is zero"));
            }
        }
        if self.layers.checked_mul(self.segments).is_none_or(|rows| rows > ROWS_MAX) {
            return Err(LayoutError::shape("layers", "gives over 65535 rows"));
        }
        Ok(())
    }

    /// Returns the objects of one file.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.layers * self.segments
    }

    /// Returns the rows of `layer`.
    #[must_use]
    pub fn layer_rows(&self, layer: Layer) -> Range<u32> {
        let first = layer.0 * self.segments;
        first..first + self.segments
    }

    /// Returns the layer of `row`.
    #[must_use]
    pub fn layer_of(&self, row: Row) -> Layer {
        Layer(row.0 / self.segments)
    }

    /// Returns the bytes of one block over all rows in the engine's memory, without padding.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        u64::from(self.rows()) * u64::from(self.object_bytes)
    }

    /// Returns the bytes that one token needs over all layers, rounded up.
    #[must_use]
    pub fn token_bytes(&self) -> u64 {
        self.block_bytes().div_ceil(u64::from(self.block_tokens))
    }
}
