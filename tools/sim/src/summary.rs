//! Performance and cost of a run in a few numbers.

use std::{collections::HashSet, time::Duration};

use serde::Serialize;

use crate::{
    engine::{Report, Request, Served, Setup},
    policy::{Path, Policy, Tier},
    storage::Storage,
};

/// Distribution of times in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Times {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Times {
    /// Returns the distribution; zeros if empty.
    fn of(mut times: Vec<f64>) -> Self {
        if times.is_empty() {
            return Self::default();
        }
        times.sort_unstable_by(f64::total_cmp);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let [p50, p95, p99] = [50, 95, 99].map(|part| percentile(&times, part));
        Self { mean, p50, p95, p99 }
    }
}

/// Returns a fraction; zero if the whole is zero, as when all requests were aborted.
fn part(of: f64, whole: f64) -> f64 {
    if whole > 0.0 { of / whole } else { 0.0 }
}

/// Returns the smallest of sorted numbers that is at least as large as `percent` percent of them.
/// Panics if there is none.
pub fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

/// Returns the upper median; `None` without numbers.
pub fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

/// Requests of a run, and which of them count.
#[derive(Debug, Clone)]
pub struct Counted {
    /// Requests in order of arrival.
    pub requests: Vec<Request>,
    /// Time before which arriving requests are served and not counted.
    pub warm_up: Duration,
    /// By request: true if earlier ones have at least half of its prompt's blocks.
    is_again: Vec<bool>,
}

impl Counted {
    /// Counts the requests that arrive after `warm_up`.
    pub fn new(requests: Vec<Request>, warm_up: Duration) -> Self {
        let mut seen = HashSet::new();
        let is_again = |request: &Request| {
            let known = request.blocks.iter().filter(|block| seen.contains(*block)).count();
            seen.extend(request.blocks.iter().copied());
            known > 0 && known * 2 >= request.blocks.len()
        };
        let is_again = requests.iter().map(is_again).collect();
        Self { requests, warm_up, is_again }
    }
}

/// Performance over the requests that count and were not aborted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Time to the first token.
    pub ttft: Times,
    /// Time to the first token of requests with half of their prompt in earlier ones.
    pub ttft_again: Times,
    /// Mean time between two tokens of each request.
    pub itl: Times,
    /// Fraction of the arriving requests by which the queue grew from the second fifth of them to
    /// the last one; 0 if it did not. A stable queue has about 0.
    pub queue_growth: f64,
    /// Longest time for which the queue for the first token did not empty, as a fraction of that of
    /// all arrivals; 0 if requests did not wait in it.
    pub backlog: f64,
    /// Fraction of the prompt tokens found in the GPU's memory.
    pub hbm_hits: f64,
    /// Fraction loaded from host memory.
    pub host_hits: f64,
    /// Fraction loaded from drives.
    pub drive_hits: f64,
    /// Fraction fetched from other engines of a cluster.
    pub peer_hits: f64,
    /// Fraction that was not computed: the sum of these.
    pub hits: f64,
    /// Fraction of the time of all steps that the GPU waited for loads.
    pub bubble: f64,
    /// Requests a second, from the first arrival to the last end.
    pub requests_per_second: f64,
    /// Tokens a second, including prompts and output.
    pub tokens_per_second: f64,
}

impl Summary {
    /// Growth of the queue from which on more arrives than is served: a queue that does not grow
    /// varies by less.
    pub const SATURATED: f64 = 0.03;
    /// Backlog from which on more arrives than is served, for a while at least.
    pub const BACKLOG: f64 = 0.25;

    /// Summarises the run of `policy` over `workload`.
    pub fn of(policy: &Policy, workload: &Counted, report: &Report) -> Self {
        let Report { served, took, compute, bubble, .. } = report;
        let Counted { requests, warm_up, is_again } = workload;
        let all = requests.iter().zip(served).zip(is_again);
        let counts = |was: &Served| was.arrival >= *warm_up && !was.is_aborted;
        let mut counted: Vec<_> = all.filter(|((_, was), _)| counts(was)).collect();
        counted.sort_by_key(|((_, was), _)| was.arrival);
        let both: Vec<(&Request, &Served)> = counted.iter().map(|(both, _)| *both).collect();
        let again = counted.iter().filter(|(_, is_again)| **is_again);
        let itl = both.iter().filter(|(request, _)| request.output > 1);
        let itl = itl.map(|(it, was)| was.decode.as_secs_f64() / f64::from(it.output - 1));
        let sum = |of: &dyn Fn(&Request, &Served) -> u32| {
            both.iter().map(|(request, was)| f64::from(of(request, was))).sum::<f64>()
        };
        let (input, output) = (sum(&|it, _| it.input), sum(&|it, _| it.output));
        let [hbm, peer] = [sum(&|_, was| was.hbm_tokens), sum(&|_, was| was.peer_tokens)];
        let loaded = sum(&|_, was| was.loaded_tokens) - peer;
        let is_host = policy.tier.is_some_and(|tier| tier.path == Path::Host);
        let host = if is_host { loaded } else { sum(&|_, was| was.host_tokens) };
        let hits = [hbm, host, loaded - host, peer].map(|tokens| part(tokens, input));
        let took = took.saturating_sub(*warm_up).as_secs_f64();
        Self {
            ttft: Times::of(both.iter().map(|(_, was)| was.ttft.as_secs_f64()).collect()),
            ttft_again: Times::of(again.map(|((_, was), _)| was.ttft.as_secs_f64()).collect()),
            itl: Times::of(itl.collect()),
            queue_growth: queue_growth(&both),
            backlog: backlog(&both),
            hbm_hits: hits[0],
            host_hits: hits[1],
            drive_hits: hits[2],
            peer_hits: hits[3],
            hits: hits.iter().sum(),
            bubble: part(bubble.as_secs_f64(), (*compute + *bubble).as_secs_f64()),
            requests_per_second: part(both.len() as f64, took),
            tokens_per_second: part(input + output, took),
        }
    }
}

/// Returns the growth of the queue for the first token, by arriving requests: between the second
/// fifth of `served` and the last one.
fn queue_growth(served: &[(&Request, &Served)]) -> f64 {
    let count = served.len();
    if count < 10 {
        return 0.0;
    }
    let mut firsts: Vec<Duration> = served.iter().map(|(_, was)| was.arrival + was.ttft).collect();
    firsts.sort_unstable();
    let waiting = |at: usize| {
        let arrival = served[at].1.arrival;
        (at + 1 - firsts.partition_point(|first| *first <= arrival)) as f64
    };
    let mean = |from: usize, to: usize| (from..to).map(waiting).sum::<f64>() / (to - from) as f64;
    let (early, late) = (mean(count / 5, count * 2 / 5), mean(count * 4 / 5, count));
    // A few requests are chance, and not growth.
    let grown = late - early;
    if grown < 4.0 { 0.0 } else { grown / (count as f64 * 0.6) }
}

/// Requests in the queue wait if half of them get their first token so many times later than those
/// that came to an empty one.
const WAIT: f64 = 5.0;

/// Returns [`Summary::backlog`] of `served`, in order of arrival.
fn backlog(served: &[(&Request, &Served)]) -> f64 {
    let [Some((_, first)), Some((_, last))] = [served.first(), served.last()] else { return 0.0 };
    // A request that comes when all others have their first token begins another time.
    let (mut times, mut until) = (Vec::<(usize, Duration)>::new(), Duration::ZERO);
    for (at, (_, was)) in served.iter().enumerate() {
        if was.arrival >= until {
            times.push((at, until));
        }
        until = until.max(was.arrival + was.ttft);
    }
    let ttft = |at: usize| served[at].1.ttft.as_secs_f64();
    let alone = median(times.iter().map(|(at, _)| ttft(*at)).collect()).unwrap_or(0.0);
    let grows = queue_growth(served) > Summary::SATURATED;
    let ends = times.iter().copied().skip(1).chain([(served.len(), until)]);
    let lasts = |((from, _), (to, until)): ((usize, Duration), (usize, Duration))| {
        let waits = median((from..to).map(ttft).collect()).is_some_and(|it| it > WAIT * alone);
        let lasts = until.min(last.arrival).saturating_sub(served[from].1.arrival);
        if waits || grows { lasts.as_secs_f64() } else { 0.0 }
    };
    let longest = times.iter().copied().zip(ends).map(lasts).fold(0.0, f64::max);
    // A few requests are chance.
    if served.len() < 10 {
        0.0
    } else {
        part(longest, (last.arrival - first.arrival).as_secs_f64())
    }
}

/// Prices in dollars an hour.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Prices {
    /// Price of a GPU.
    pub gpu: f64,
    /// Price of 10^9 bytes of host memory.
    pub dram_gb: f64,
    /// Price of 10^9 bytes of drives.
    pub drive_gb: f64,
}

impl Prices {
    /// Returns dollars an hour of the GPUs, and of the whole capacity of a policy's tiers.
    pub fn hour(&self, setup: &Setup<'_>, policy: &Policy) -> f64 {
        let Storage { host_bytes, drive_bytes, .. } = setup.storage;
        let is_host = |tier: Tier| tier.path == Path::Host;
        let dram = policy.host.is_some() || policy.tier.is_some_and(is_host);
        let drives = policy.tier.is_some_and(|tier| !is_host(tier));
        let price = |is_used: bool, bytes: u64, gb: f64| {
            if is_used { bytes as f64 / 1e9 * gb } else { 0.0 }
        };
        self.gpu * f64::from(setup.gpu.count)
            + price(dram, host_bytes, self.dram_gb)
            + price(drives, drive_bytes, self.drive_gb)
    }

    /// Returns dollars per million tokens at this throughput.
    pub fn million(hour: f64, tokens_per_second: f64) -> f64 {
        hour / (tokens_per_second * 3600.0) * 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let times = Times::of((1..=200).rev().map(f64::from).collect());
        assert_eq!(times, Times { mean: 100.5, p50: 100.0, p95: 190.0, p99: 198.0 });
        assert_eq!(Times::of(vec![7.0]), Times { mean: 7.0, p50: 7.0, p95: 7.0, p99: 7.0 });
        assert_eq!(Times::of(Vec::new()), Times::default());
    }

    #[test]
    fn a_queue_grows_by_what_is_not_served() {
        // One arrives a second, and one is served in `each` seconds.
        let growth = |each: f64| {
            let request = |at: u64| Request {
                arrival: Duration::from_secs(at),
                input: 100,
                output: 1,
                blocks: Vec::new(),
                leaves: None,
                after: None,
            };
            let requests: Vec<Request> = (0..1000).map(request).collect();
            let end = |at: u64| Duration::from_secs_f64((at + 1) as f64 * each);
            let served = |at: u64| Served {
                arrival: Duration::from_secs(at),
                ttft: end(at).max(Duration::from_secs(at + 1)) - Duration::from_secs(at),
                ..Served::default()
            };
            let served: Vec<Served> = (0..1000).map(served).collect();
            queue_growth(&requests.iter().zip(&served).collect::<Vec<_>>())
        };
        assert_eq!([0.5, 1.0].map(growth), [0.0; 2]);
        for (each, left) in [(1.25, 0.2), (2.0, 0.5)] {
            assert!((growth(each) - left).abs() < 0.01, "{each}: {}", growth(each));
        }
    }

    #[test]
    fn a_queue_that_empties_is_no_backlog() {
        // Requests come at these times, and each takes a second of a machine that serves in turn.
        let of = |times: &[u64]| {
            let request = Request {
                arrival: Duration::ZERO,
                input: 100,
                output: 1,
                blocks: Vec::new(),
                leaves: None,
                after: None,
            };
            let mut free = Duration::ZERO;
            let served: Vec<Served> = times
                .iter()
                .map(|at| {
                    let arrival = Duration::from_secs(*at);
                    free = free.max(arrival) + Duration::from_secs(1);
                    Served { arrival, ttft: free - arrival, ..Served::default() }
                })
                .collect();
            backlog(&served.iter().map(|was| (&request, was)).collect::<Vec<_>>())
        };
        let calm: Vec<u64> = (0..100).map(|at| at * 2).collect();
        assert_eq!(of(&calm), 0.0);
        // Waves of 100 s every 900 s; arrivals end with the last one.
        let waves: Vec<u64> = (0..500).map(|at| at / 100 * 900).collect();
        assert!((0.02..0.04).contains(&of(&waves)), "{}", of(&waves));
        // Two come a second, where one is served.
        let many: Vec<u64> = (0..400).map(|at| at / 2).collect();
        assert!(of(&many) > 0.9, "{}", of(&many));
        // From the middle on.
        let later: Vec<u64> = calm.iter().copied().chain(many.iter().map(|at| at + 200)).collect();
        assert!((0.4..0.6).contains(&of(&later)), "{}", of(&later));
    }

    #[test]
    fn what_was_there_before_is_told_from_what_is_new() {
        let request = |blocks: &[u64]| Request {
            arrival: Duration::ZERO,
            input: 64 * blocks.len() as u32 + 1,
            output: 1,
            blocks: blocks.to_vec(),
            leaves: None,
            after: None,
        };
        let requests = [&[1, 2][..], &[1, 3], &[1, 4, 5], &[1, 4, 5, 6], &[]].map(request);
        let counted = Counted::new(requests.to_vec(), Duration::ZERO);
        assert_eq!(counted.is_again, [false, true, false, true, false]);
    }
}
