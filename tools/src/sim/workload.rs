//! The simulated workload: a trace, or a named workload.

mod sessions;

use std::path::Path;
use std::time::Duration;

use clap::Args;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use ripieno_sim::{Counted, Request, abort};

use crate::contents::mix;
use crate::machine::check_memory;
use crate::problem::Problem;
use crate::size::{self, Size};
use crate::timing::percent;
use crate::trace::{self, Trace};

/// Maximum number of times that a trace's sessions are served: more are not like anyone's.
const COPIES_MAX: f64 = 1000.0;

/// Flags of the workload.
#[derive(Debug, Args)]
pub(crate) struct WorkloadFlags {
    /// Mean number of requests a second. A part of the sessions of a trace is taken for it, at
    /// random, or copies of them are added [default: a trace's own; 1 for documents, 4 for
    /// profiles]
    #[arg(long, value_name = "RATE", value_parser = requests_a_second, help_heading = "Workload")]
    rate: Option<f64>,

    /// Stretch the times of a trace to --rate, with all its sessions: as many of them come between
    /// two turns of one as at the trace's own rate, and hits are those
    #[arg(long, requires = "rate", help_heading = "Workload")]
    stretch: bool,

    /// Only the first COUNT requests [default: all of a trace; 4000 of a profile]
    #[arg(long, value_name = "COUNT", help_heading = "Workload",
        value_parser = size::count::<usize>(1..=10_000_000))]
    requests: Option<usize>,

    /// Seed of a random workload
    #[arg(long, value_name = "SEED", default_value_t = 1, help_heading = "Workload",
        value_parser = size::count::<u64>(0..=u64::MAX))]
    pub(super) seed: u64,

    /// Time at the beginning whose requests are served and not counted
    #[arg(long, value_name = "TIME", value_parser = seconds, help_heading = "Workload")]
    warm_up: Option<f64>,

    /// Time by which each arrival of a trace is moved, at random up to these; 0 for none
    /// [default: for a trace whose times are all multiples of a second or more, that multiple]
    #[arg(long, value_name = "TIME", value_parser = seconds_or_zero, help_heading = "Workload")]
    jitter: Option<f64>,

    /// Percentage of clients that disconnect, each at a random moment while its request waits or is
    /// served; --seed selects them and the moments
    #[arg(long, value_name = "PERCENT", value_parser = percent, help_heading = "Workload")]
    abort: Option<f64>,

    /// Time after the arrival of a request within which its client disconnects
    #[arg(long, value_name = "TIME", default_value_t = 10.0, value_parser = seconds,
        requires = "abort", help_heading = "Workload")]
    abort_within: f64,
}

/// Parses seconds that fit into virtual time.
pub(super) fn seconds(text: &str) -> Result<f64, String> {
    match size::duration(text)?.as_secs_f64() {
        0.0 => Err("expected above 0".to_owned()),
        seconds if seconds <= 1e9 => Ok(seconds),
        _ => Err("expected fewer".to_owned()),
    }
}

/// Parses a rate with which the largest number of requests fits into virtual time.
fn requests_a_second(text: &str) -> Result<f64, String> {
    let rate = above_zero(text)?;
    if rate >= 1e-6 { Ok(rate) } else { Err("expected 0.000001 or more".to_owned()) }
}

/// Parses seconds that fit into virtual time, or none.
pub(super) fn seconds_or_zero(text: &str) -> Result<f64, String> {
    if text == "0" { Ok(0.0) } else { seconds(text) }
}

/// Parses a number above zero.
pub(crate) fn above_zero(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "expected a number, such as 0.5".to_owned())?;
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err("expected above 0".to_owned()) }
}

/// Returns the names of built-in workloads.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    ripieno_sim::Workload::all().iter().map(|it| it.name.as_str())
}

/// Requests and their description.
#[derive(Debug)]
pub(crate) struct Workload {
    /// Requests in order of arrival, of which those after `--warm-up` count.
    pub(crate) counted: Counted,
    /// Origin of the requests, in words.
    pub(crate) setting: Vec<String>,
    /// True if another seed gives other requests.
    pub(crate) is_random: bool,
}

impl Workload {
    /// Returns the workload of this name, or reads the trace in a file of this name.
    pub(crate) fn read(
        name: &str,
        flags: &WorkloadFlags,
        seed: u64,
        block_tokens: u32,
    ) -> Result<Self, Problem> {
        let (mut requests, mut setting, mut is_random);
        if let Some(known) = ripieno_sim::Workload::named(name) {
            let (count, rate) = (flags.requests.unwrap_or(4000), flags.rate.unwrap_or(known.rate));
            requests = known.requests(count, rate, block_tokens, seed);
            (setting, is_random) = (vec![format!("{name}: {}", known.text)], true);
        } else {
            (requests, setting, is_random) =
                from_trace(Path::new(name), flags, seed, block_tokens)?;
        }
        requests.truncate(flags.requests.unwrap_or(usize::MAX));
        setting.push(measured(&requests));
        if let Some(percent) = flags.abort {
            let within = Duration::from_secs_f64(flags.abort_within);
            abort(&mut requests, percent / 100.0, within, seed);
            is_random = true;
            setting.push(format!(
                "{percent} % of the clients go away, each at a moment of its own within {} s after \
                 its request came; TTFT, latency, hits, throughput and cost are those of the \
                 others",
                flags.abort_within
            ));
        }
        let warm_up = Duration::from_secs_f64(flags.warm_up.unwrap_or(0.0));
        let last = requests.last().map_or(Duration::ZERO, |last| last.arrival).as_secs_f64();
        if last < warm_up.as_secs_f64() {
            let warm_up = warm_up.as_secs_f64();
            let what = format!("--warm-up {warm_up}: the last request comes after {last:.0} s");
            return Err(Problem::new(what, "leave requests to count"));
        }
        Ok(Self { counted: Counted::new(requests, warm_up), setting, is_random })
    }
}

/// Describes the number of requests, their rate and their lengths.
fn measured(requests: &[Request]) -> String {
    let count = requests.len() as f64;
    let mean =
        |of: fn(&Request) -> u32| requests.iter().map(|it| f64::from(of(it))).sum::<f64>() / count;
    format!(
        "{} requests, {}; {:.0} tokens of prompt and {:.0} of output in the mean",
        requests.len(),
        match rate(requests) {
            None => "all at once".to_owned(),
            Some(rate) if requests.iter().any(|it| it.after.is_some()) => {
                format!("at most {rate:.2} a second")
            }
            Some(rate) => format!("{rate:.2} a second"),
        },
        mean(|it| it.input),
        mean(|it| it.output)
    )
}

/// Returns the requests a second, by the intervals between them; `None` if all arrive together.
fn rate(requests: &[Request]) -> Option<f64> {
    let span = requests.last()?.arrival - requests.first()?.arrival;
    (!span.is_zero()).then(|| (requests.len() - 1) as f64 / span.as_secs_f64())
}

/// Returns the interval of which all times are multiples, to 5 ms: Mooncake's are off by up to 3.
/// Zero if it is less than a second, or with fewer than 10 requests.
fn rounding(requests: &[trace::Request]) -> Duration {
    let greatest = |one: u128, other: u128| {
        let (mut one, mut other) = (one, other);
        while other > 0 {
            (one, other) = (other, one % other);
        }
        one
    };
    let tens = requests.iter().map(|it| (it.arrival.as_millis() + 5) / 10).fold(0, greatest);
    let common = Duration::from_millis(u64::try_from(tens * 10).unwrap_or(u64::MAX));
    let is_rounded = common >= Duration::from_secs(1) && requests.len() >= 10;
    if is_rounded { common } else { Duration::ZERO }
}

/// Returns the requests of a trace, their description, and whether they are random.
fn from_trace(
    path: &Path,
    flags: &WorkloadFlags,
    seed: u64,
    block_tokens: u32,
) -> Result<(Vec<Request>, Vec<String>, bool), Problem> {
    let Trace { requests: mut read, notes, has_starts } = trace::read(path, flags.requests)?;
    let blocks: u64 = read.iter().map(|it| it.input_tokens / u64::from(block_tokens)).sum();
    let names = blocks * size_of::<u64>() as u64;
    let what = || format!("{}: its blocks take {} of memory", path.display(), Size(names));
    check_memory(names, what, "simulate fewer requests (--requests)")?;
    if let Some(number) = read.iter().position(|request| request.input_tokens == 0) {
        let what = format!("{}: request {}", path.display(), number + 1);
        let what = format!("{what}: its prompt has no tokens");
        return Err(Problem::new(what, "a request has one token of prompt at least"));
    }
    let mut setting = vec![format!("the trace {}", path.display())];
    setting.extend(notes);
    let rounded = rounding(&read);
    let most = flags.jitter.map_or(rounded, Duration::from_secs_f64);
    if most > Duration::ZERO {
        jitter(&mut read, most, seed);
        let given = if flags.jitter.is_some() { "--jitter" } else { "its times are rounded" };
        setting.push(format!(
            "each request comes up to {} s of the trace later, at random ({given})",
            most.as_secs_f64()
        ));
    }
    let begins = flags.rate.filter(|_| !has_starts);
    if let Some(rate) = begins {
        begin(&mut read, rate, seed);
        setting
            .push(format!("sessions begin at random (Poisson), {rate} requests a second (--rate)"));
    }
    let mut requests: Vec<Request> = read.iter().map(|it| served(it, block_tokens)).collect();
    drop(read);
    let wanted = flags.rate.filter(|_| has_starts);
    if let Some(wanted) = wanted {
        setting.push(scale(&mut requests, wanted, flags.stretch, seed)?);
    }
    let is_random = most > Duration::ZERO || begins.is_some() || wanted.is_some() && !flags.stretch;
    Ok((requests, setting, is_random))
}

/// Makes `wanted` requests of a trace come in a second, and says how.
fn scale(
    requests: &mut Vec<Request>,
    wanted: f64,
    stretch: bool,
    seed: u64,
) -> Result<String, Problem> {
    let wrong = |what: &str, hint: &str| Problem::new(format!("--rate {wanted}: {what}"), hint);
    let Some(recorded) = rate(requests) else {
        return Err(wrong("all requests of the trace come at once", "leave --rate out"));
    };
    let factor = wanted / recorded;
    if stretch {
        let times = recorded / wanted;
        let stretch = |time: Duration| Duration::from_secs_f64(time.as_secs_f64() * times);
        for request in requests {
            request.arrival = stretch(request.arrival);
            request.after = request.after.map(|(of, thinks)| (of, stretch(thinks)));
        }
        return Ok(format!(
            "times between requests are {times:.3} times those of the trace, which has \
             {recorded:.2} requests a second (--rate {wanted} --stretch)"
        ));
    }
    let hint = "give a smaller --rate, or --stretch";
    if factor > COPIES_MAX {
        let what =
            format!("{factor:.0} times as many as come in the trace ({recorded:.2e} a second)");
        return Err(wrong(&what, hint));
    }
    let bytes = |it: &Request| size_of::<Request>() + it.blocks.len() * size_of::<u64>();
    let bytes = requests.iter().map(bytes).sum::<usize>() as f64 * factor;
    let what = || format!("--rate {wanted}: the requests take {}", Size(bytes as u64));
    check_memory(bytes as u64, what, hint)?;
    let all = requests.len();
    let sessions = sessions::scale(requests, factor, seed);
    if requests.is_empty() {
        return Err(wrong(&format!("none of {all} requests is left"), "give more, or --stretch"));
    }
    Ok(format!(
        "{factor:.3} of the trace's {sessions} sessions, at random, at their own times; the trace \
         has {recorded:.2} requests a second (--rate {wanted})"
    ))
}

/// Spreads the arrivals of a trace whose times are rounded down: each by a random part of `most`.
/// Sorts the requests again.
fn jitter(requests: &mut [trace::Request], most: Duration, seed: u64) {
    let mut chance = StdRng::seed_from_u64(seed);
    for at in 0..requests.len() {
        let before = requests[at].after.map_or(Duration::ZERO, |(of, _)| requests[of].arrival);
        let later = most.mul_f64(chance.random_range(0.0..1.0));
        requests[at].arrival = before.max(requests[at].arrival + later);
    }
    trace::sort(requests);
}

/// Lets sessions begin at random times, so that `rate` requests come in a second in the mean.
fn begin(requests: &mut [trace::Request], rate: f64, seed: u64) {
    let mut chance = StdRng::seed_from_u64(seed);
    let sessions = requests.iter().filter(|it| it.after.is_none()).count();
    let every = requests.len() as f64 / sessions as f64 / rate;
    let mut begins = 0.0;
    for at in 0..requests.len() {
        requests[at].arrival = match requests[at].after {
            Some((of, thinks)) => requests[of].arrival + thinks,
            None => {
                begins -= chance.random_range(f64::MIN_POSITIVE..1.0).ln() * every;
                Duration::from_secs_f64(begins)
            }
        };
    }
    trace::sort(requests);
}

/// Returns the request as the engine takes it. Full blocks of its prompt have names, which are
/// equal only if all blocks before are equal, too.
fn served(request: &trace::Request, block_tokens: u32) -> Request {
    let [input, output] = [request.input_tokens, request.output_tokens]
        .map(|tokens| u32::try_from(tokens).expect("the reader has a limit"));
    let full = input / block_tokens;
    let (mut before, mut blocks) = (0, Vec::with_capacity(full as usize));
    request.cut(block_tokens, full.into(), |ids, part| {
        before = ids.iter().fold(before, |before, id| mix(before ^ mix(*id)));
        blocks.push(mix(before.wrapping_add(part.into())));
    });
    let trace::Request { arrival, after, .. } = *request;
    Request { arrival, input, output, blocks, leaves: None, after }
}

#[cfg(test)]
mod tests;
