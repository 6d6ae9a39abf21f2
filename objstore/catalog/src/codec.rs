//! The codec of a store's objects.

use crate::shape::KvShape;

/// Form of the objects on the devices, the same for all of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Codec {
    /// As the engine has them.
    #[default]
    None,
    /// Encoded by `kv-codec`: bf16 with exponents of three bits, in three quarters of the bytes.
    Exp3,
}

impl Codec {
    /// All codecs.
    pub const ALL: [Self; 2] = [Self::None, Self::Exp3];

    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Exp3 => "exp3",
        }
    }

    /// Returns the shape of blocks of `shape` on the devices: the same rows, of encoded objects.
    /// `None` if objects of this size have no encoding.
    #[must_use]
    pub fn stored(self, shape: &KvShape) -> Option<KvShape> {
        let bytes = match self {
            Self::None => return Some(*shape),
            Self::Exp3 => kv_codec::encoded_len(shape.object_bytes as usize)?,
        };
        Some(KvShape { object_bytes: bytes as u32, ..*shape })
    }

    /// Returns the CRC-32C of the raw object behind the bytes of a device, of which there may be
    /// more than it needs; `None` if these are no object of this size.
    #[must_use]
    pub fn checksum(self, shape: &KvShape, found: &[u8]) -> Option<u32> {
        let object = found.get(..self.stored(shape)?.object_bytes as usize)?;
        match self {
            Self::None => Some(crc32c::crc32c(object)),
            Self::Exp3 => {
                let mut raw = vec![0; shape.object_bytes as usize];
                kv_codec::decode(object, &mut raw).ok()?;
                Some(crc32c::crc32c(&raw))
            }
        }
    }
}

impl std::fmt::Display for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
