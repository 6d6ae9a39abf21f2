//! Where the parts of an encoded object are.

use crate::{CHUNK, Damaged, HEADER, encoded_len};

/// An encoded object.
pub(crate) struct Encoded<'a> {
    header: &'a [u8; HEADER],
    /// The escapes, and all that follows them: so many escapes as fit into a vector can be read
    /// wherever one begins.
    escapes: &'a [u8],
    /// Escapes that there is room for.
    pub budget: usize,
    pub low: &'a [[u8; CHUNK]],
    pub codes: &'a [[u8; 24]],
}

impl<'a> Encoded<'a> {
    /// Finds the parts of an object whose raw length is `raw_len`.
    pub(crate) fn of(encoded: &'a [u8], raw_len: usize) -> Result<Self, Damaged> {
        let budget = budget(encoded.len(), raw_len);
        let (header, escapes) = encoded.split_first_chunk().expect("a header");
        let (low, codes) = escapes[budget..].split_at(raw_len / 2);
        let (low, codes) = (low.as_chunks().0, codes.as_chunks().0);
        match header[7] {
            0 => Ok(Self { header, escapes, budget, low, codes }),
            found => Err(Damaged::Format { found }),
        }
    }

    /// Returns the exponent of each code; zero for escapes.
    pub(crate) fn table(&self) -> [u8; 8] {
        *self.header
    }

    /// Returns 64 bytes that begin with escape `next`, which is at most the budget.
    pub(crate) fn window(&self, next: usize) -> &[u8; CHUNK] {
        self.escapes[next..].first_chunk().expect("64 other bits and more follow the escapes")
    }
}

/// An object to be encoded.
pub(crate) struct Room<'a> {
    pub escapes: &'a mut [u8],
    pub low: &'a mut [[u8; CHUNK]],
    pub codes: &'a mut [[u8; 24]],
}

/// Returns how many escapes fit, after checking both lengths.
pub(crate) fn budget(given: usize, raw_len: usize) -> usize {
    let least = encoded_len(raw_len);
    assert!(
        least.is_some_and(|least| given >= least),
        "an object of {raw_len} bytes is encoded in {least:?} bytes or more, not in {given}"
    );
    given - HEADER - raw_len / 16 * 11
}

/// The three words of 64 scalars' codes.
pub(crate) fn words(codes: &[u8; 24]) -> [u64; 3] {
    let (words, _) = codes.as_chunks();
    std::array::from_fn(|bit| u64::from_le_bytes(words[bit]))
}

/// The inverse of [`words`].
pub(crate) fn codes(words: [u64; 3]) -> [u8; 24] {
    let mut codes = [0; 24];
    for (to, word) in codes.as_chunks_mut().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    codes
}
