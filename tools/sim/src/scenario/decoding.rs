//! TierKV's simulation: decoding for more requests than fit into the GPU's memory.

use crate::{
    paging::{Decode, Decoded},
    parallel::each,
    parameters::Parameters,
    shown::Results,
    summary::median,
};

impl Decode {
    /// Returns the medians over the paper's five seeds, and what they say of the link.
    pub(super) fn run(&self, _: &Parameters) -> Results {
        let all: Vec<Decoded> = each(&[42, 43, 44, 45, 46], |seed| self.seeded(*seed));
        let middle =
            |name| median(all.iter().map(|it| it[name]).collect()).expect("there are five");
        let mut found: Decoded = all[0].keys().map(|name| (*name, middle(*name))).collect();
        let (blocks, link) = (found["blocks"], self.lower.link);
        let bytes = self.lower.block_bytes as f64;
        let alone = bytes / link.bandwidth;
        found.extend([
            ("blocks of a request", blocks / self.exchanged),
            ("computes", self.iteration().as_secs_f64() * 1e3),
            ("reads", blocks * bytes / link.bandwidth * 1e3),
            ("efficiency", alone / (alone + link.lane().set_up.as_secs_f64())),
        ]);
        found.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

#[cfg(test)]
mod tests;
