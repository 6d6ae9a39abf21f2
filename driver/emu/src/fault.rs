//! Faults as data: the commands and registers to disturb, and in which way.
//!
//! A plan is an argument, not a second emulator: an empty plan is a good device, and the same plan
//! with the same seed and commands always gives the same faults.

use serde::{Deserialize, Serialize};

use crate::random::SplitMix64;

/// All faults of a device. None by default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultPlan {
    /// Seed of probabilities and random details.
    pub seed: u64,
    /// Command faults. The first rule that fires for a command applies.
    pub rules: Vec<FaultRule>,
    /// Register faults.
    pub registers: RegisterFaults,
    /// Overrides of the identify data.
    pub identify: IdentifyOverrides,
}

impl FaultPlan {
    /// Returns the first rule whose condition has a value without a meaning, such as `nth: 0`: its
    /// index, the value, and the remedy.
    pub(crate) fn invalid(&self) -> Option<(usize, String, &'static str)> {
        self.rules.iter().enumerate().find_map(|(index, rule)| {
            let (found, remedy) = rule.when.invalid()?;
            Some((index, found, remedy))
        })
    }
}

/// A condition, an action, and a limit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultRule {
    /// Commands that the rule applies to.
    #[serde(default)]
    pub when: FaultWhen,
    /// Effect on them.
    pub then: FaultAction,
    /// Largest number of times; unlimited if absent.
    #[serde(default)]
    pub limit: Option<u64>,
}

impl FaultRule {
    /// Creates a rule of `then` for every command that matches `when`.
    #[must_use]
    pub fn new(when: FaultWhen, then: FaultAction) -> Self {
        Self { when, then, limit: None }
    }

    /// Limits the rule to `limit` times.
    #[must_use]
    pub fn limit(self, limit: u64) -> Self {
        Self { limit: Some(limit), ..self }
    }
}

/// Condition on commands: all given fields must match. The default matches all commands.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultWhen {
    /// Admin commands only, or I/O commands only.
    pub admin: Option<bool>,
    /// The command's opcode.
    pub opcode: Option<u8>,
    /// The command's namespace.
    pub nsid: Option<u32>,
    /// The submission queue of the command.
    pub qid: Option<u16>,
    /// Reads, writes and similar commands that touch any block of this range.
    pub lbas: Option<LbaRange>,
    /// Only the n-th command that matches the fields above, counted from 1.
    pub nth: Option<u64>,
    /// Only every n-th command that matches the fields above.
    pub every: Option<u64>,
    /// Only with this probability (0 to 1), decided by the plan's seed.
    pub probability: Option<f64>,
}

/// `count` blocks from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LbaRange {
    /// First block.
    pub first: u64,
    /// Number of blocks.
    pub count: u64,
}

impl LbaRange {
    fn touches(self, lba: u64, lbas: u64) -> bool {
        lba < self.first.saturating_add(self.count) && self.first < lba.saturating_add(lbas)
    }
}

/// Effect on a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FaultAction {
    /// The command is not executed and completes with this status.
    Status {
        /// Status code in bits 7:0, its type in 10:8, Command Retry Delay in 12:11, as in a
        /// completion entry.
        code: u16,
        /// "Do not retry".
        dnr: bool,
    },
    /// The command is fetched and never completes.
    Drop,
    /// The command is delayed.
    Delay {
        /// Delay in nanoseconds.
        ns: u64,
    },
    /// The command completes twice.
    Duplicate,
    /// The completion carries a command identifier that was not submitted.
    WrongCid,
    /// The completion carries the old phase: the host cannot see it.
    WrongPhase,
    /// The completion carries a submission head outside the queue.
    WrongSqhd,
    /// The completion names another submission queue.
    WrongSqid,
    /// A write stores only a part, and reports success.
    TornWrite,
    /// A write goes to other blocks, and reports success.
    MisdirectedWrite {
        /// Distance in blocks.
        lba_delta: i64,
    },
    /// A read returns flipped bits and reports success.
    CorruptRead,
    /// The controller loses power before the command takes effect.
    PowerLoss,
    /// The device is removed before the command completes: registers read as all ones from then on.
    Gone,
    /// The controller fails: CSTS.CFS is set and nothing completes until a reset.
    FatalStatus,
    /// An uncorrectable PCIe error, from which the platform recovers with a reset of the link: for
    /// this long registers read as all ones. The platform reports the error a little after that has
    /// begun ([`nvme_driver::Bus::pcie_error`]). The function comes back disabled and without its
    /// BARs: only a reset of the function restores them.
    LinkLoss {
        /// Duration in nanoseconds.
        ns: u64,
    },
}

/// Register faults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegisterFaults {
    /// CSTS.RDY never becomes 1.
    pub stuck_rdy: bool,
    /// CSTS.RDY never goes back to 0.
    pub rdy_never_clears: bool,
    /// CSTS.PP is set, and no commands are processed.
    pub paused: bool,
    /// Function Level Reset is unsupported.
    pub no_function_reset: bool,
    /// CSTS.RDY follows CC.EN only after this many nanoseconds.
    pub slow_rdy_ns: Option<u64>,
}

/// False identify data and logs. They do not change the behavior of the device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IdentifyOverrides {
    /// Maximum data transfer size, as a power of two.
    pub mdts: Option<u8>,
    /// SGL support, the raw field.
    pub sgls: Option<u32>,
    /// LBA size of every namespace, as a power of two.
    pub lbads: Option<u8>,
    /// Size of every namespace in blocks.
    pub nsze: Option<u64>,
    /// Submission queue entry sizes, the raw field.
    pub sqes: Option<u8>,
    /// State in the Sanitize Status log, the raw field, of a drive that has sanitize operations.
    pub sanitize: Option<u16>,
    /// Set for a drive with autonomous power state transitions, whose default is on.
    pub apst: bool,
    /// Bytes patched into any identify structure, last.
    pub patches: Vec<IdentifyPatch>,
}

/// Bytes patched into an identify structure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdentifyPatch {
    /// Structure (0: namespace, 1: controller, ...).
    pub cns: u8,
    /// Offset in its 4096 bytes.
    pub offset: u16,
    /// Bytes to write; those past the end are cut off.
    pub bytes: Vec<u8>,
}

impl IdentifyOverrides {
    /// Applies the patches of structure `cns` to its `page`.
    pub fn patch(&self, cns: u8, page: &mut [u8]) {
        for patch in self.patches.iter().filter(|patch| patch.cns == cns) {
            let offset = usize::from(patch.offset).min(page.len());
            let len = patch.bytes.len().min(page.len() - offset);
            page[offset..offset + len].copy_from_slice(&patch.bytes[..len]);
        }
    }
}

/// Properties of a command that rules match on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandView {
    /// Set for commands from the admin queue.
    pub admin: bool,
    /// The opcode.
    pub opcode: u8,
    /// The namespace.
    pub nsid: u32,
    /// The submission queue.
    pub qid: u16,
    /// First block and number of blocks, if the command has a range.
    pub lbas: Option<(u64, u64)>,
}

/// A rule that fired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultHit {
    /// The action to take.
    pub action: FaultAction,
    /// Index of the rule in the plan.
    pub rule: usize,
    /// 64 bits from the seed for details of the action (position of a tear, bits to flip).
    pub roll: u64,
}

/// Matches commands against a plan. Reproducible: its state depends only on the plan, its seed and
/// the commands so far.
#[derive(Debug, Clone)]
pub struct FaultEngine {
    plan: FaultPlan,
    states: Vec<RuleState>,
    rolls: SplitMix64,
}

#[derive(Debug, Clone)]
struct RuleState {
    fitting: u64,
    fired: u64,
    /// One generator per rule, so that adding a rule does not change the others' results.
    rng: SplitMix64,
}

impl FaultEngine {
    /// Starts `plan` from the beginning.
    ///
    /// # Panics
    /// Panics if a condition of `plan` has a value without a meaning.
    #[must_use]
    pub fn new(plan: FaultPlan) -> Self {
        if let Some((rule, found, remedy)) = plan.invalid() {
            panic!("fault rule {rule} (counted from 0) has {found}; {remedy}");
        }
        let state = |(index, _)| RuleState {
            fitting: 0,
            fired: 0,
            rng: SplitMix64::new(plan.seed, 1 + index as u64),
        };
        let states = plan.rules.iter().enumerate().map(state).collect();
        let rolls = SplitMix64::new(plan.seed, 0);
        Self { plan, states, rolls }
    }

    /// Returns the plan.
    #[must_use]
    pub fn plan(&self) -> &FaultPlan {
        &self.plan
    }

    /// Returns the fault for `command`, if any. Must be called once per command, in fetch order.
    #[inline]
    pub fn decide(&mut self, command: &CommandView) -> Option<FaultHit> {
        if self.plan.rules.is_empty() {
            return None;
        }
        self.search(command)
    }

    fn search(&mut self, command: &CommandView) -> Option<FaultHit> {
        let mut hit = None;
        for (index, (rule, state)) in self.plan.rules.iter().zip(&mut self.states).enumerate() {
            // Later rules count and roll too, so that their results are independent of this one.
            if state.fires(rule, command) && hit.is_none() {
                state.fired += 1;
                hit = Some((index, rule.then));
            }
        }
        let (rule, action) = hit?;
        Some(FaultHit { action, rule, roll: self.rolls.next() })
    }
}

impl RuleState {
    fn fires(&mut self, rule: &FaultRule, command: &CommandView) -> bool {
        let when = &rule.when;
        if !when.fits(command) {
            return false;
        }
        self.fitting += 1;
        let drawn = when.probability.is_none_or(|probability| self.rng.unit() < probability);
        drawn
            && when.nth.is_none_or(|nth| self.fitting == nth)
            && when.every.is_none_or(|every| self.fitting.is_multiple_of(every))
            && rule.limit.is_none_or(|limit| self.fired < limit)
    }
}

impl FaultWhen {
    /// Returns the first value without a meaning, and the remedy.
    fn invalid(&self) -> Option<(String, &'static str)> {
        let &Self { lbas, nth, every, probability, .. } = self;
        if let Some(LbaRange { first, count: 0 }) = lbas {
            return Some((format!("a range of no blocks at {first}"), "use a count of at least 1"));
        }
        if nth == Some(0) {
            return Some(("nth 0".into(), "use 1 for the first command"));
        }
        if every == Some(0) {
            return Some(("every 0".into(), "use 1 for every command"));
        }
        let probability = probability.filter(|chance| !(0.0..=1.0).contains(chance))?;
        Some((format!("probability {probability}"), "use a number from 0 to 1"))
    }

    /// Checks all conditions that depend on the command alone.
    fn fits(&self, command: &CommandView) -> bool {
        let touches = |range: LbaRange| {
            command.lbas.is_some_and(|(first, count)| range.touches(first, count))
        };
        self.admin.is_none_or(|admin| admin == command.admin)
            && self.opcode.is_none_or(|opcode| opcode == command.opcode)
            && self.nsid.is_none_or(|nsid| nsid == command.nsid)
            && self.qid.is_none_or(|qid| qid == command.qid)
            && self.lbas.is_none_or(touches)
    }
}

#[cfg(test)]
mod tests;
