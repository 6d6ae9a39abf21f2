//! Limits the writing rate, so that drives reach their rated lifetime.

const DAY_NS: u128 = 86_400_000_000_000;

/// A daily limit on writes: for one drive write per day, the drives' capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteBudget {
    /// Bytes of files that may be written per day, over all ranks.
    pub bytes_per_day: u64,
    /// Bytes that may accumulate for a burst; available in full at the start.
    pub burst_bytes: u64,
}

/// A token bucket. Tokens are bytes times nanoseconds of a day, to avoid rounding.
#[derive(Debug)]
pub struct Bucket {
    budget: WriteBudget,
    file_bytes: u64,
    tokens: u128,
    /// The latest time passed to `advance`.
    now_ns: Option<u64>,
}

impl Bucket {
    pub fn new(budget: WriteBudget, file_bytes: u64) -> Self {
        let tokens = u128::from(budget.burst_bytes) * DAY_NS;
        Self { budget, file_bytes, tokens, now_ns: None }
    }

    /// Sets the time. The first call only starts the clock; it never runs backwards.
    pub fn advance(&mut self, now_ns: u64) {
        let before = self.now_ns.unwrap_or(now_ns);
        let passed = u128::from(now_ns.saturating_sub(before));
        let full = u128::from(self.budget.burst_bytes) * DAY_NS;
        self.tokens = full.min(self.tokens + passed * u128::from(self.budget.bytes_per_day));
        self.now_ns = Some(before.max(now_ns));
    }

    fn file_tokens(&self) -> u128 {
        u128::from(self.file_bytes.max(1)) * DAY_NS
    }

    /// Returns the number of files that may be written now.
    pub fn files(&self) -> u32 {
        u32::try_from(self.tokens / self.file_tokens()).unwrap_or(u32::MAX)
    }

    /// Takes the tokens of one file.
    pub fn take_file(&mut self) {
        self.tokens = self.tokens.saturating_sub(self.file_tokens());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_gives_a_days_bytes_however_often_it_is_asked() {
        let budget = WriteBudget { bytes_per_day: 1000, burst_bytes: 300 };
        let mut bucket = Bucket::new(budget, 10);
        assert_eq!(bucket.files(), 30);
        let mut written = 0;
        for step in 0..=1000u64 {
            bucket.advance(7 + step * (DAY_NS as u64 / 1000));
            while bucket.files() > 0 {
                bucket.take_file();
                written += 1;
            }
        }
        assert_eq!(written, 30 + 100);
        bucket.advance(0);
        assert_eq!(bucket.files(), 0, "time does not go back");
        bucket.advance(100 * DAY_NS as u64);
        assert_eq!(bucket.files(), 30, "no more is saved up than a burst");
    }
}
