//! What became of some histories.

use serde::{Deserialize, Serialize};

use crate::{
    machine::Faults,
    model::{Held, Name, Wrong},
};

/// Failures that are described.
const SHOWN_MAX: usize = 20;

/// What became of some histories.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub seeds: u64,
    /// Power cuts.
    pub crashes: u64,
    /// Processes that were killed while their devices kept their power.
    pub kills: u64,
    /// Stores that were closed, and opened again.
    pub closes: u64,
    /// Formattings, repairs and the like that were cut short or not.
    pub offline: u64,
    /// Things that actors did.
    pub steps: u64,
    /// Of these, while another one waited for a commit.
    pub meanwhile: u64,
    pub faults: Faults,
    pub wrong_bytes: u64,
    pub lost_commits: u64,
    /// Lost commits that were acknowledged after a device had failed, and commits and changes that
    /// a store acknowledged which takes none any more.
    pub false_acks: u64,
    pub came_back: u64,
    /// Pins, quotas, weights and epochs that are not what they were, and errors without a reason.
    pub wrong_state: u64,
    pub did_not_open: u64,
    /// Blocks whose bytes were compared.
    pub checked: u64,
    pub failures: Vec<String>,
}

impl Outcome {
    /// Returns whether nothing was wrong.
    pub fn is_clean(&self) -> bool {
        self.failed() == 0
    }

    /// How much was wrong.
    pub fn failed(&self) -> u64 {
        let Self { wrong_bytes, lost_commits, false_acks, came_back, .. } = self;
        let found = wrong_bytes + lost_commits + false_acks + came_back;
        found + self.wrong_state + self.did_not_open
    }

    /// What was wrong first.
    #[cfg(feature = "planted-bugs")]
    pub fn caught_by(&self) -> &'static str {
        match self {
            Self { wrong_bytes: 1.., .. } => "wrong bytes",
            Self { false_acks: 1.., .. } => "a false acknowledgement",
            Self { lost_commits: 1.., .. } => "a lost commit",
            Self { came_back: 1.., .. } => "what was gone came back",
            Self { wrong_state: 1.., .. } => "a wrong state",
            _ => "a store that did not open",
        }
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

    /// A kind of fault, or of thing that is done, that never came: nothing is known of it.
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
        // The first ones of a seed say most.
        let seed = format!("seed {seed}: ");
        let shown = self.failures.iter().filter(|shown| shown.starts_with(&seed)).count();
        if self.failures.len() < SHOWN_MAX && shown < 3 {
            self.failures.push(seed + &what);
        }
    }

    /// Notes what is wrong with what was found under a key.
    pub fn note(&mut self, seed: u64, name: &Name, wrong: Wrong, held: Held) {
        *match wrong {
            Wrong::Lost | Wrong::Stale => &mut self.lost_commits,
            Wrong::FalselyAcknowledged => &mut self.false_acks,
            Wrong::CameBack => &mut self.came_back,
        } += 1;
        self.describe(seed, format!("{}/{}: {wrong:?}, {held:?}", name.0, name.1));
    }

    /// Notes that bytes are those of no version.
    pub fn note_bytes(&mut self, seed: u64, name: &Name) {
        self.wrong_bytes += 1;
        self.describe(seed, format!("{}/{}: wrong bytes", name.0, name.1));
    }

    /// Notes something else that is wrong.
    pub fn note_state(&mut self, seed: u64, what: String) {
        self.wrong_state += 1;
        self.describe(seed, what);
    }
}
