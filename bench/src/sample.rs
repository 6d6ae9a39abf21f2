//! Clocks and statistics: medians of interleaved rounds.

use std::time::{Duration, Instant};

use rustix::time::ClockId;

/// Measurements of one side.
#[derive(Debug, Default, Clone)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Adds a measurement.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Returns the ratios to another side, by round.
    pub fn ratios(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }

    /// Returns the median; 0 without measurements.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Returns the `q` quantile of the measurements.
    pub fn quantile(&self, q: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        sorted.get((last as f64 * q).round() as usize).copied().unwrap_or(0.0)
    }
}

/// Two sides of a comparison.
#[derive(Debug, Default, Clone)]
pub struct Sides {
    pub ours: Samples,
    pub theirs: Samples,
}

impl Sides {
    /// Measures both sides in each round, by its number; round 0 is a warm-up.
    pub fn measure<E>(
        rounds: u32,
        mut both: impl FnMut(u32) -> Result<(f64, f64), E>,
    ) -> Result<Self, E> {
        let mut sides = Self::default();
        for round in 0..=rounds {
            sides.push(round, both(round)?);
        }
        Ok(sides)
    }

    /// Adds the measurements of a round; round 0 is a warm-up.
    pub fn push(&mut self, round: u32, (ours, theirs): (f64, f64)) {
        if round > 0 {
            self.ours.push(ours);
            self.theirs.push(theirs);
        }
    }
}

/// Returns the result of `work` and its duration.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

/// Returns the bandwidth in GiB/s.
pub fn gib_s(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64() / f64::from(1 << 30)
}

/// Returns the CPU time of the calling thread so far.
pub fn thread_cpu() -> Duration {
    cpu_time(ClockId::ThreadCPUTime)
}

/// Returns the CPU time of all threads of this process so far.
pub fn process_cpu() -> Duration {
    cpu_time(ClockId::ProcessCPUTime)
}

fn cpu_time(clock: ClockId) -> Duration {
    let now = rustix::time::clock_gettime(clock);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Unit of [`ticks`].
pub const TICK: &str = if cfg!(target_arch = "x86_64") { "TSC cycles" } else { "ns" };

/// Returns a time stamp for very short spans: the time stamp counter, which runs at the processor's
/// base frequency; nanoseconds on other architectures.
#[allow(unsafe_code, reason = "reads the time stamp counter")]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and it has no side effects.
    return unsafe { core::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    return {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    };
}

#[cfg(test)]
mod tests;
