//! Pacing of a plane by a thread of its own.

use std::time::Duration;

use kv_schedule::{Config, Curve, IoCosts, Scheduler, Setting, SlackTable};
use kv_tier::LookaheadConfig;
use objstore::Plane;

use crate::{error::StackError, watch::Watch};

/// Pause between decisions: less than the bytes in flight take on a fast drive.
const PAUSE: Duration = Duration::from_micros(500);
/// Time without work after which the thread looks if it should end.
const IDLE: Duration = Duration::from_millis(50);

/// When layers start, if not in the order of the calls: reads by deadline, writes while nothing
/// reads, and reading ahead while nothing else moves.
#[derive(Debug, Clone)]
pub struct Pacing {
    /// Limits of the scheduler.
    pub config: Config,
    /// Assumed cost of I/O, which is corrected by measurement.
    pub costs: IoCosts,
    /// Distance and batches of reading ahead.
    pub ahead: LookaheadConfig,
}

impl Default for Pacing {
    /// Assumes slow drives at first: then writes start one at a time, and are measured.
    fn default() -> Self {
        let line = |bandwidth| Curve::line(Duration::from_micros(80), bandwidth);
        let curve = |bandwidth| line(bandwidth).expect("a bandwidth above zero");
        Self {
            config: Config { backlog_bytes: u64::MAX, ..Config::default() },
            costs: IoCosts { read: curve(2e9), write: curve(1e9), mixed: 0.4 },
            ahead: LookaheadConfig::default(),
        }
    }
}

impl Pacing {
    /// Paces a plane, which the caller advances.
    ///
    /// # Errors
    /// Same as [`Plane::pace`].
    pub fn pace(&self, plane: &Plane) -> Result<(), StackError> {
        let Self { config, costs, ahead } = self.clone();
        let [model, gpu, engine] = [const { String::new() }; 3];
        let setting = Setting { model, gpu, engine, drives: Vec::new() };
        Ok(plane.pace(Scheduler::new(config, SlackTable::new(setting, costs)), ahead)?)
    }

    /// Starts the thread that paces a plane. It ends when the plane is closed.
    pub(crate) fn spawn(&self, plane: &Plane) -> Result<Watch, StackError> {
        self.pace(plane)?;
        let plane = plane.clone();
        let look = move || match plane.has_work(IDLE).ok()? {
            true => plane.advance().ok().map(|_| PAUSE),
            false => Some(Duration::ZERO),
        };
        Watch::spawn("ripieno pacer", look)
    }
}
