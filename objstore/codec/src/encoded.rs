//! Where the parts of an encoded object are, and the walk over its chunks.

use crate::{CHUNK, Damaged, DoesNotFit, encoded_len};

/// 64 scalars.
pub(crate) type Scalars = [u8; 2 * CHUNK];

/// A byte for each of 64 scalars.
pub(crate) type Bytes = [u8; CHUNK];

/// The exponents of 64 scalars.
#[derive(Clone, Copy)]
pub(crate) struct Codes {
    pub base: u8,
    /// Bit i of word k is bit k of the code of scalar i.
    pub words: [u64; 3],
}

impl Codes {
    /// Returns a bit for each scalar that is an escape.
    #[inline(always)]
    pub(crate) fn escapes(self) -> u64 {
        self.words[0] & self.words[1] & self.words[2]
    }
}

/// Encodes an object with a function for 64 scalars: it gets their bytes, and writes their low
/// bytes and, in any room, the exponents of their escapes.
#[inline(always)]
pub(crate) fn encode(
    raw: &[u8],
    out: &mut [u8],
    chunk: impl Fn(&Scalars, &mut Bytes, &mut Bytes) -> Codes,
) -> Result<(), DoesNotFit> {
    let budget = budget(out.len(), raw.len());
    let (raw, _) = raw.as_chunks();
    let (room, rest) = out.split_at_mut(budget);
    let (bases, rest) = rest.split_at_mut(raw.len());
    let (low, words) = rest.split_at_mut(raw.len() * CHUNK);
    let parts = bases.iter_mut().zip(low.as_chunks_mut().0).zip(words.as_chunks_mut::<24>().0);
    let mut escapes = 0;
    for (raw, ((base, low), words)) in raw.iter().zip(parts) {
        let mut these = [0; CHUNK];
        let codes = chunk(raw, low, &mut these);
        *base = codes.base;
        for (to, word) in words.as_chunks_mut().0.iter_mut().zip(codes.words) {
            *to = word.to_le_bytes();
        }
        let count = codes.escapes().count_ones() as usize;
        if let Some(room) = room.get_mut(escapes..escapes + count) {
            room.copy_from_slice(&these[..count]);
        }
        escapes += count;
    }
    let rest = room.get_mut(escapes..).ok_or(DoesNotFit { escapes, budget })?;
    rest.fill(0);
    Ok(())
}

/// Decodes an object with a function for 64 scalars: it gets their low bytes, 64 bytes that begin
/// with the exponents of their escapes, and the room for their bytes.
#[inline(always)]
pub(crate) fn decode(
    encoded: &[u8],
    out: &mut [u8],
    chunk: impl Fn(Codes, &Bytes, &Bytes, &mut Scalars),
) -> Result<(), Damaged> {
    let budget = budget(encoded.len(), out.len());
    let (out, _) = out.as_chunks_mut();
    let (bases, rest) = encoded[budget..].split_at(out.len());
    let (low, words) = rest.split_at(out.len() * CHUNK);
    let parts = bases.iter().zip(low.as_chunks().0).zip(words.as_chunks::<24>().0);
    let mut next = 0;
    for (((&base, low), words), out) in parts.zip(out) {
        let (words, _) = words.as_chunks();
        let words = std::array::from_fn(|bit| u64::from_le_bytes(words[bit]));
        let codes = Codes { base, words };
        // A base, 64 low bytes and more are behind the last escape.
        let these = encoded[next..].first_chunk().expect("64 bytes");
        next += codes.escapes().count_ones() as usize;
        if next > budget {
            return Err(Damaged { budget });
        }
        chunk(codes, low, these, out);
    }
    Ok(())
}

/// Returns how many escapes fit, after checking both lengths.
fn budget(given: usize, raw_len: usize) -> usize {
    let least = encoded_len(raw_len);
    assert!(
        least.is_some_and(|least| given >= least),
        "an object of {raw_len} bytes is encoded in {least:?} bytes or more, not in {given}"
    );
    given - raw_len / 2 / CHUNK * 89
}
