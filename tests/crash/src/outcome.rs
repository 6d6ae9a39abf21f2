//! Results of histories.

use serde::{Deserialize, Serialize};

use crate::{
    machine::Faults,
    model::{Held, Name, Wrong},
};

/// Maximum number of failures to describe.
const SHOWN_MAX: usize = 20;

/// Results of histories.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub seeds: u64,
    /// Number of power cuts.
    pub crashes: u64,
    /// Number of processes killed while their devices kept their power.
    pub kills: u64,
    /// Number of stores closed and reopened.
    pub closes: u64,
    /// Number of formats, repairs and the like, complete or interrupted.
    pub offline: u64,
    /// Number of actors' steps.
    pub steps: u64,
    /// Number of those made while another actor waited for a commit.
    pub meanwhile: u64,
    pub faults: Faults,
    pub wrong_bytes: u64,
    pub lost_commits: u64,
    /// Lost commits acknowledged after a device failure, and commits and changes acknowledged by a
    /// store that has become read-only.
    pub false_acks: u64,
    pub came_back: u64,
    /// Wrong quotas, weights and epochs, and unexplained errors.
    pub wrong_state: u64,
    pub did_not_open: u64,
    /// Number of blocks whose bytes were compared.
    pub checked: u64,
    pub failures: Vec<String>,
}

impl Outcome {
    /// Returns true if there were no errors.
    pub fn is_clean(&self) -> bool {
        self.failed() == 0
    }

    /// Returns the number of errors.
    pub fn failed(&self) -> u64 {
        let Self { wrong_bytes, lost_commits, false_acks, came_back, .. } = self;
        let found = wrong_bytes + lost_commits + false_acks + came_back;
        found + self.wrong_state + self.did_not_open
    }

    /// Returns the worst kind of error.
    pub fn caught_by(&self) -> Option<&'static str> {
        Some(match self {
            Self { wrong_bytes: 1.., .. } => "wrong bytes",
            Self { false_acks: 1.., .. } => "a false acknowledgement",
            Self { lost_commits: 1.., .. } => "a lost commit",
            Self { came_back: 1.., .. } => "what was gone came back",
            Self { wrong_state: 1.., .. } => "a wrong state",
            Self { did_not_open: 1.., .. } => "a store that did not open",
            _ => return None,
        })
    }

    pub fn merge(&mut self, other: Self) {
        self.seeds += other.seeds;
        self.crashes += other.crashes;
        self.kills += other.kills;
        self.closes += other.closes;
        self.offline += other.offline;
        self.steps += other.steps;
        self.meanwhile += other.meanwhile;
        self.faults.merge(other.faults);
        self.wrong_bytes += other.wrong_bytes;
        self.lost_commits += other.lost_commits;
        self.false_acks += other.false_acks;
        self.came_back += other.came_back;
        self.wrong_state += other.wrong_state;
        self.did_not_open += other.did_not_open;
        self.checked += other.checked;
        self.failures.extend(other.failures);
        self.failures.truncate(SHOWN_MAX);
    }

    /// Returns a kind of fault or operation that never happened, and so was not tested.
    pub fn never(&self) -> Option<&'static str> {
        let Faults { failed_reads, failed_writes, failed_flushes, blackouts, memory, torn, .. } =
            self.faults;
        let all = [
            (failed_reads, "a read that fails"),
            (failed_writes, "a write that fails"),
            (failed_flushes, "a flush that fails"),
            (blackouts, "a device that loses its power alone"),
            (memory, "a bit that flips in memory"),
            (torn, "a torn block"),
            (self.crashes, "a power cut"),
            (self.kills, "a process that is killed"),
            (self.closes, "a store that is closed"),
            (self.offline, "a format or repair"),
            (self.meanwhile, "something that is done during a commit"),
            (self.checked, "a block that is compared"),
        ];
        all.iter().find(|(count, _)| *count == 0).map(|(_, what)| *what)
    }

    pub fn describe(&mut self, seed: u64, what: String) {
        // The first failures of a seed are the most useful.
        let seed = format!("seed {seed}: ");
        let shown = self.failures.iter().filter(|shown| shown.starts_with(&seed)).count();
        if self.failures.len() < SHOWN_MAX && shown < 3 {
            self.failures.push(seed + &what);
        }
    }

    /// Counts an error in the data found under a key.
    pub fn note(&mut self, seed: u64, name: &Name, wrong: Wrong, held: Held) {
        *match wrong {
            Wrong::Lost | Wrong::Stale => &mut self.lost_commits,
            Wrong::FalselyAcknowledged => &mut self.false_acks,
            Wrong::CameBack => &mut self.came_back,
        } += 1;
        self.describe(seed, format!("{}/{}: {wrong:?}, {held:?}", name.0, name.1));
    }

    /// Counts data that belongs to no version.
    pub fn note_bytes(&mut self, seed: u64, name: &Name) {
        self.wrong_bytes += 1;
        self.describe(seed, format!("{}/{}: wrong bytes", name.0, name.1));
    }

    /// Counts another error.
    pub fn note_state(&mut self, seed: u64, what: String) {
        self.wrong_state += 1;
        self.describe(seed, what);
    }
}
