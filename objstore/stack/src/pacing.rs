//! Pacing of a plane by a thread of its own.

use std::time::Duration;

use kv_schedule::{Config, Curve, IoCosts, Scheduler, Setting, SlackTable};
use kv_tier::LookaheadConfig;
use objstore::{Plane, Watch};

use crate::error::StackError;

/// Pause between decisions: less than the bytes in flight take on a fast drive.
const PAUSE: Duration = Duration::from_micros(500);
/// Time without work after which the thread looks if it should end.
const IDLE: Duration = Duration::from_millis(50);

/// Paces a plane, which the caller advances: reads start by deadline, writes while nothing reads,
/// and reading ahead while nothing else moves. Assumes slow drives at first: then writes start one
/// at a time, and are measured.
///
/// # Errors
/// Same as [`Plane::pace`].
pub fn pace(plane: &Plane) -> Result<(), StackError> {
    let line = |bandwidth| Curve::line(Duration::from_micros(80), bandwidth);
    let curve = |bandwidth| line(bandwidth).expect("a bandwidth above zero");
    let costs = IoCosts { read: curve(2e9), write: curve(1e9), mixed: 0.4 };
    let [model, gpu, engine] = [const { String::new() }; 3];
    let table = SlackTable::new(Setting { model, gpu, engine, drives: Vec::new() }, costs);
    let config = Config { backlog_bytes: u64::MAX, ..Config::default() };
    Ok(plane.pace(Scheduler::new(config, table), LookaheadConfig::default())?)
}

/// Starts the thread that paces a plane. It ends when the plane is closed.
pub(crate) fn spawn(plane: &Plane) -> Result<Watch, StackError> {
    pace(plane)?;
    let plane = plane.clone();
    let look = move || match plane.has_work(IDLE).ok()? {
        true => plane.advance().ok().map(|_| PAUSE),
        false => Some(Duration::ZERO),
    };
    Watch::spawn("ripieno pacer", look).map_err(|error| StackError::of_threads(&error))
}
