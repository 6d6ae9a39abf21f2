//! Settings of `ripieno pace`: compute times of layers, bandwidth of the devices, I/O policy.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kv_schedule::{Config, Curve, CurveError, IoCosts, Setting, SlackTable, StepShape};
use nvme_driver::Nanos;
use nvme_emu::Bandwidth;
use ripieno_sim::{AT_ONCE, Gpu, Model};

use crate::layer_times;
use crate::problem::Problem;
use crate::size;

/// Layer time of Llama-3-8B on an H100, by its FLOPs.
const LAYER_TIME: &str = "30us,735us,473us";

/// Returns the time in which an H100 computes a prompt of `tokens` tokens, by the FLOPs of a dense
/// model of this name; `None` if there is no such model.
pub(crate) fn compute(model: &str, tokens: u32) -> Option<Duration> {
    let model = Model::ALL.iter().find(|known| known.name == model)?;
    Some(Gpu::h100().layer(model, StepShape::of([(tokens, 0)])) * model.layers)
}

/// I/O policies to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Schedule {
    Slack,
    Naive,
    Both,
}

/// Flags of `ripieno pace`.
#[derive(Debug, Clone, Args)]
pub(crate) struct TimingFlags {
    /// slack: by deadline, writes when idle; naive: in order of the calls
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = Schedule::Both,
        help_heading = "Pace")]
    schedule: Schedule,

    /// Speed-up of arrivals over the trace
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = factor,
        help_heading = "Pace")]
    speed: f64,

    /// Instead of a trace: prompts of which so many percent are stored [default: 50 to 100]
    #[arg(long, value_name = "PERCENT,...", num_args = 0..=1, value_delimiter = ',',
        value_parser = percent, help_heading = "Pace", hide_default_value = true,
        conflicts_with_all = ["trace", "slack", "speed", "schedule"],
        default_missing_value = "50,60,70,75,80,85,90,93.75,95,96.9,98.3,99,100")]
    pub(crate) hit_rates: Option<Vec<f64>>,

    /// Slack table to start with; what was learned is written back
    #[arg(long, value_name = "FILE", help_heading = "Pace")]
    pub(crate) slack: Option<PathBuf>,

    /// Maximum tokens per step; longer prompts are computed in chunks
    #[arg(long, value_name = "N", default_value_t = 8192, help_heading = "Pace",
        value_parser = size::count::<u32>(1..=1 << 24))]
    pub(crate) step_tokens: u32,

    /// Maximum number of concurrent requests
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Pace",
        value_parser = size::count::<u32>(1..=1 << 16))]
    pub(crate) batch: u32,

    /// Read and write bandwidth, latency, mixing factor [default: 25900MB,9800MB,80us,0.4]
    #[arg(long, value_name = "R,W,TIME,PART", value_parser = medium, help_heading = "Pace")]
    medium: Option<Medium>,

    /// Measured layer times: a slack table, or a file of layer times
    #[arg(long, value_name = "FILE", help_heading = "Pace",
        conflicts_with_all = ["layer_time", "decode_layer_time", "slack"])]
    layers: Option<PathBuf>,

    /// Layer time with prompts: fixed, per 1,000 tokens, per 10 million pairs
    #[arg(long, value_name = "TIMES", default_value = LAYER_TIME,
        value_parser = layer_time, help_heading = "Pace")]
    layer_time: LayerTime,

    /// Layer time of decode-only steps
    #[arg(long, value_name = "TIMES", default_value = "216us,0us,17500us",
        value_parser = layer_time, help_heading = "Pace")]
    decode_layer_time: LayerTime,
}

/// Compute time of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LayerTime {
    fixed: Duration,
    /// Time per 1,000 tokens.
    tokens: Duration,
    /// Time per 10 million token pairs.
    attended: Duration,
}

impl LayerTime {
    fn of(&self, step: StepShape) -> Duration {
        let tokens = self.tokens.mul_f64(f64::from(step.tokens) / 1e3);
        self.fixed + tokens + self.attended.mul_f64(step.attended as f64 / 1e7)
    }
}

/// Performance of all devices together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Medium {
    pub(crate) read: f64,
    pub(crate) write: f64,
    pub(crate) latency: Duration,
    pub(crate) mixed: f64,
}

/// Two of the Tutti paper's drives (figures 6 and 9).
const PAPER: Medium =
    Medium { read: 25.9e9, write: 9.8e9, latency: Duration::from_micros(80), mixed: 0.4 };

impl Medium {
    /// Returns the asked medium; by default the paper's, for objects that are `scale` times smaller
    /// than the real model's.
    pub(crate) fn or_scaled(asked: Option<Self>, scale: u32) -> Self {
        let scale = f64::from(scale);
        asked.unwrap_or(Self { read: PAPER.read / scale, write: PAPER.write / scale, ..PAPER })
    }

    /// Returns each device's share for `count` devices, for data from the byte `from` on.
    pub(crate) fn each(&self, count: u32, from: u64) -> Bandwidth {
        let Self { read, write, latency, mixed } = *self;
        let count = f64::from(count);
        let latency = Nanos(latency.as_nanos() as u64);
        Bandwidth { read: read / count, write: write / count, latency, mixed, from }
    }

    /// Returns the cost of batches.
    pub(crate) fn costs(&self) -> Result<IoCosts, CurveError> {
        let curve = |bandwidth| Curve::line(self.latency, bandwidth);
        Ok(IoCosts { read: curve(self.read)?, write: curve(self.write)?, mixed: self.mixed })
    }
}

/// Validated settings of `ripieno pace`.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    pub(crate) flags: TimingFlags,
    /// Measured layer times of an engine.
    layers: Option<SlackTable>,
    pub(crate) medium: Medium,
}

impl Timing {
    /// Scales the default medium for objects that are `scale` times smaller than the real model's.
    pub(crate) fn new(flags: TimingFlags, scale: u32) -> Result<Self, Problem> {
        let layers = flags.layers.as_deref().map(engine_layers).transpose()?;
        Ok(Self { medium: Medium::or_scaled(flags.medium, scale), flags, layers })
    }

    /// Returns, for each run, true if the scheduler decides.
    pub(crate) fn runs(&self) -> &'static [bool] {
        match self.flags.schedule {
            Schedule::Slack => &[true],
            Schedule::Naive => &[false],
            Schedule::Both => &[true, false],
        }
    }

    /// Returns the scheduler's configuration; without slack awareness it has no limits. A new read
    /// waits for at most 2 ms of writes, one batch, or two of 16 ms together, and 16 ms of reads:
    /// enough reads that latencies of layers overlap, or cost less than a hundredth.
    pub(crate) fn config(&self, reads_first: bool) -> Config {
        if !reads_first {
            return AT_ONCE;
        }
        Config {
            read_depth_bytes: (self.medium.read * 16e-3) as u64,
            write_depth_bytes: (self.medium.write * 2e-3) as u64,
            backlog_bytes: (self.medium.write * 0.5) as u64,
            ..Config::default()
        }
    }

    /// Returns the compute time of a layer in a step, from `--layers` or else the flags.
    pub(crate) fn layer(&self, step: StepShape) -> Duration {
        if let Some(layer) = self.layers.as_ref().and_then(|layers| layers.layer(step)) {
            return layer;
        }
        let TimingFlags { layer_time, decode_layer_time, .. } = &self.flags;
        (if step.is_prefill { layer_time } else { decode_layer_time }).of(step)
    }

    /// Returns the arrival time of a request, scaled by `--speed`.
    pub(crate) fn arrival(&self, recorded: Duration) -> Duration {
        recorded.div_f64(self.flags.speed)
    }
}

/// GPU name of `ripieno pace` in slack tables.
pub(crate) const GPU: &str = "none";
/// Engine name in slack tables.
pub(crate) const ENGINE: &str = "ripieno replay";

/// Returns the setting that a table of this command applies to.
pub(crate) fn setting(model: &str, drives: Vec<String>) -> Setting {
    let (gpu, engine) = (GPU.to_owned(), ENGINE.to_owned());
    Setting { model: model.to_owned(), gpu, engine, drives }
}

/// Reads `--layers`: a table with both kinds of steps.
pub(crate) fn engine_layers(path: &std::path::Path) -> Result<SlackTable, Problem> {
    let table = layer_times::table("--layers", path)?;
    for (step, input) in [("prompts", 2), ("generation only", 1)] {
        if table.layer(StepShape::of([(input, 1)])).is_none() {
            let what = format!("--layers {}: it has no steps with {step}", path.display());
            return Err(Problem::new(what, "measure prompts and decoding on the same engine"));
        }
    }
    Ok(table)
}

/// Parses a time with a unit: without one, microseconds may be meant.
fn time(text: &str) -> Result<Duration, String> {
    let found = size::duration(text)?;
    match text.trim_end().ends_with(|c: char| c.is_ascii_digit()) {
        true => Err(format!("{text:?} has no unit; write it as 30us, 1.5ms or 2s")),
        false => Ok(found),
    }
}

fn layer_time(text: &str) -> Result<LayerTime, String> {
    let times = text.split(',').map(time).collect::<Result<Vec<_>, _>>()?;
    let [fixed, tokens, attended] = times[..] else {
        return Err("expected three times, such as 30us,735us,473us".to_owned());
    };
    if fixed.is_zero() && tokens.is_zero() {
        return Err("a layer takes some time".to_owned());
    }
    Ok(LayerTime { fixed, tokens, attended })
}

pub(crate) fn medium(text: &str) -> Result<Medium, String> {
    let parts: Vec<&str> = text.split(',').collect();
    let [read, write, latency, mixed] = parts[..] else {
        return Err("expected four values, such as 25900MB,9800MB,80us,0.4".to_owned());
    };
    let (read, write) = (size::parse(read)? as f64, size::parse(write)? as f64);
    if read == 0.0 || write == 0.0 {
        return Err("devices move more than 0 bytes a second".to_owned());
    }
    let part = mixed.trim().parse().ok().filter(|part| (0.01..=2.0).contains(part));
    let mixed = part.ok_or_else(|| format!("{mixed:?}: expected a number from 0.01 to 2"))?;
    Ok(Medium { read, write, latency: time(latency)?, mixed })
}

/// Parses a percentage.
pub(crate) fn percent(text: &str) -> Result<f64, String> {
    let found = text.trim().parse().ok().filter(|percent| (1.0..=100.0).contains(percent));
    found.ok_or_else(|| format!("{text:?}: expected a number from 1 to 100"))
}

fn factor(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|factor| (1e-6..=1e6).contains(factor));
    found.ok_or_else(|| format!("{text:?}: expected a number from 0.000001 to 1000000"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_media_are_read() {
        assert_eq!(time("30us"), Ok(Duration::from_micros(30)));
        assert_eq!(time("1.5ms"), Ok(Duration::from_micros(1500)));
        assert_eq!(time("2s"), Ok(Duration::from_secs(2)));
        for text in ["", "30", "us", "-1ms", "30us,", "nans"] {
            assert!(time(text).is_err(), "{text}");
        }
        let of = layer_time("30us,700us,400us").unwrap().of(StepShape::of([(1000, 9500)]));
        assert_eq!(of.as_micros(), 1130);
        assert!(layer_time("1us,1us").is_err() && layer_time("0us,0us,1us").is_err());
        let found = medium("2GB,500MB,80us,0.4").unwrap();
        assert_eq!((found.read, found.write, found.mixed), (2e9, 5e8, 0.4));
        for text in ["2GB,500MB,80us", "0,1,1us,1", "1,1,1us,0", "x,1,1us,1", "1,1,1,1"] {
            assert!(medium(text).is_err(), "{text}");
        }
    }
}
