//! Required properties of the assembled kernels.
//!
//! Each check counts instructions and compares with the PTX: the assembler may copy an access, so
//! more are fine and fewer are not. If the PTX itself has too few, the access was removed from the
//! source, and the check fails, too.

use crate::ptx::compile::{Kernel, Resources};
use crate::ptx::sass::{Instruction, in_loop};

/// Limit at which four blocks of 128 threads still fit the 65,536 registers of an SM.
const REGISTERS_MAX: u64 = 128;
/// Instructions of the I/O kernel on the GPU that takes the most, by the pinned compiler. A change
/// that raises this or the next one gives the reason in its message.
const INSTRUCTIONS_MAX: u64 = 13672;
/// The same of gio_scatter_gather, the larger of the pool kernels.
const POOL_INSTRUCTIONS_MAX: u64 = 3976;
/// Limit at which four blocks of 256 threads of a pool kernel fit.
const POOL_REGISTERS_MAX: u64 = 64;
/// Limit of the hardware; a benchmark's kernels may use all of it.
const OTHER_REGISTERS_MAX: u64 = 255;
/// Loads that a thread of gio_scatter_gather issues before its first store.
const LOADS_UNDER_WAY: usize = 4;
/// Tail of the submission queue, head of the completion queue.
const DOORBELLS: u64 = 2;
/// Quarters of an SQE, each written by its own store.
const SQE_QUARTERS: u64 = 4;
/// CQE, clock, ring entry, event, stop word.
const POLLED: u64 = 5;
/// Offset of the half of a CQE that has the phase.
const CQE_PHASE_AT: u64 = 8;
/// Fences before a doorbell, after a CQE, before a signal and before a completion.
const SYSTEM_FENCES: u64 = 4;

/// SHFLs that add a stripe to a checksum: 7 for each of 4 words.
const SHUFFLES: usize = 28;
/// Stripes that a warp of the I/O kernel, or of gio_scatter_gather, adds while it loads the next.
const STRIPES_MEANWHILE: usize = 3;
const POOL_STRIPES_MEANWHILE: usize = 1;

/// A property of a kernel on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub name: &'static str,
    pub wanted: Wanted,
    pub found: u64,
    /// Reason for a failure despite the right number.
    pub wrong: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    AtLeast(u64),
    AtMost(u64),
}

impl Check {
    pub fn passed(&self) -> bool {
        self.wrong.is_none()
            && match self.wanted {
                Wanted::AtLeast(least) => self.found >= least,
                Wanted::AtMost(most) => self.found <= most,
            }
    }

    fn at_most(name: &'static str, most: u64, found: u64) -> Self {
        Self { name, wanted: Wanted::AtMost(most), found, wrong: None }
    }

    /// Creates a check for `least`, a count in the PTX, which must itself be at least `source`.
    fn at_least(name: &'static str, source: u64, least: u64, found: usize) -> Self {
        let wanted = Wanted::AtLeast(least.max(source));
        Self { name, wanted, found: found as u64, wrong: None }
    }
}

/// Returns the checks for every kernel: no per-thread data is in memory.
fn resources(kernel: &Kernel, registers_max: u64) -> Vec<Check> {
    let Resources { registers, stack_bytes, spill_bytes } = kernel.resources;
    let local = kernel.sass.iter().filter(|one| one.is("LDL", &[]) || one.is("STL", &[])).count();
    vec![
        Check::at_most("registers of a thread", registers_max, registers),
        Check::at_most("stack frame, bytes", 0, stack_bytes),
        Check::at_most("spilled, bytes", 0, spill_bytes),
        Check::at_most("local memory: LDL, STL", 0, local as u64),
    ]
}

/// Returns all checks of a benchmark's kernel.
pub fn other(_ptx: &str, kernel: &Kernel) -> Vec<Check> {
    resources(kernel, OTHER_REGISTERS_MAX)
}

/// Returns all checks of a kernel of `gio_pool`.
pub fn pool(ptx: &str, kernel: &Kernel) -> Vec<Check> {
    let sass = &kernel.sass;
    let count = |is: &dyn Fn(&Instruction) -> bool| sass.iter().filter(|one| is(one)).count();
    let mut checks = resources(kernel, POOL_REGISTERS_MAX);
    checks.push(Check::at_most("instructions", POOL_INSTRUCTIONS_MAX, sass.len() as u64));
    checks.push(Check::at_least(
        "16-byte loads: LD.128",
        1,
        asked_for(ptx, &["ld.global.v2.u64"]),
        count(&|one| one.is_load(&["128"])),
    ));
    checks.push(Check::at_least(
        "16-byte stores: ST.128",
        1,
        asked_for(ptx, &["st.global.v2.u64"]),
        count(&|one| one.is_store(&["128"])),
    ));
    checks.push(if kernel.name == "gio_pattern" {
        let asked = asked_for(ptx, &["red.min.relaxed.gpu"]);
        Check::at_least("first difference: RED.MIN", 1, asked, count(&|one| is_reduction(one)))
    } else {
        let most = wide_loads_together(sass);
        Check::at_least("... loads before a store", LOADS_UNDER_WAY as u64, 0, most)
    });
    if kernel.name == "gio_scatter_gather" {
        checks.push(checksums(sass, POOL_STRIPES_MEANWHILE));
    }
    checks
}

/// Returns the largest number of 16-byte loads without a store between them.
fn wide_loads_together(sass: &[Instruction]) -> usize {
    let (mut most, mut now) = (0, 0);
    for one in sass {
        if one.is_store(&[]) || ends_block(one) {
            now = 0;
        } else if one.is_load(&["128"]) {
            now += 1;
            most = most.max(now);
        }
    }
    most
}

/// Checks that a warp computes while it loads what comes next. One scoreboard counts all loads of
/// a loop, so a wait for the unit that is needed is also one for a load issued just before: four
/// units that move up in registers, one a turn, were four loads in the source, and one at a time.
fn checksums(sass: &[Instruction], stripes: usize) -> Check {
    let picks = |span: &[Instruction]| span.iter().filter(|one| one.is("SHFL", &[])).count();
    let loops = sass.iter().enumerate().filter_map(|(end, branch)| {
        let target = branch.target().filter(|target| *target <= branch.address)?;
        Some(sass.partition_point(|one| one.address < target)..end + 1)
    });
    let loops: Vec<_> = loops.collect();
    let meanwhile = (0..sass.len()).filter_map(|at| {
        let busy = sass[at].control.busy.filter(|_| sass[at].is_load(&["128", "STRONG", "SYS"]))?;
        let inner = loops.iter().filter(|span| span.contains(&at)).min_by_key(|span| span.len())?;
        // The first loads are in front of the loop. Objects that begin or end inside a unit are
        // rare, and loaded one by one.
        let is_outer =
            loops.iter().any(|span| span.len() < inner.len() && inner.contains(&span.start));
        if is_outer || picks(&sass[inner.clone()]) <= SHUFFLES {
            return None;
        }
        let order = (at + 1..inner.end).chain(inner.start..at);
        let before = order.take_while(|&next| sass[next].control.awaits >> busy & 1 == 0);
        Some(before.filter(|&next| sass[next].is("SHFL", &[])).count())
    });
    let least = meanwhile.min().unwrap_or(0);
    Check::at_least("... SHFLs during a load", (stripes * SHUFFLES) as u64, 0, least)
}

/// Returns all checks of the I/O kernel.
pub fn io(ptx: &str, kernel: &Kernel) -> Vec<Check> {
    let sass = &kernel.sass;
    let count = |is: &dyn Fn(&Instruction) -> bool| sass.iter().filter(|one| is(one)).count();
    let asked = |prefixes: &[&str]| asked_for(ptx, prefixes);
    let system_fences = asked(&["fence.acq_rel.sys", "fence.release.sys", "st.release.sys"]);
    let device_fences = asked(&["atom.add.acq_rel.gpu", "st.release.gpu"]);
    let acquires = asked(&[
        "ld.acquire.sys",
        "fence.acq_rel.sys",
        "atom.add.acq_rel.gpu",
        "atom.cas.acquire.gpu",
    ]);
    let stores = asked(&["st.relaxed.sys", "st.release.sys"]);
    let mut checks = resources(kernel, REGISTERS_MAX);
    checks.push(Check::at_most("instructions", INSTRUCTIONS_MAX, sass.len() as u64));
    checks.extend([
        Check::at_least(
            "doorbells: ST.MMIO.SYS",
            DOORBELLS,
            asked(&["st.mmio.relaxed.sys"]),
            count(&|one| one.is_store(&["MMIO", "SYS"])),
        ),
        Check::at_least("... right behind MEMBAR.SYS", 1, 0, doorbells_behind_a_fence(sass)),
        Check::at_least(
            "16-byte stores: ST.128",
            SQE_QUARTERS + 1,
            asked(&["st.global.v2.u64"]),
            count(&|one| one.is_store(&["128"])),
        ),
        Check::at_least("... whole SQEs of four", 1, 0, whole_entries(sass)),
        polls(sass, asked(&["ld.relaxed.sys.global.u", "ld.acquire.sys"])),
        Check::at_least("... CQEs: 64 bits at +8", 1, 0, completion_polls(sass).count()),
        Check::at_least("... then MEMBAR.SYS", 1, 0, completions_before_a_fence(sass)),
        Check::at_least(
            "objects: LD.128.STRONG.SYS",
            1,
            asked(&["ld.relaxed.sys.global.v2.u64"]),
            count(&|one| one.is_load(&["128", "STRONG", "SYS"])),
        ),
        checksums(sass, STRIPES_MEANWHILE),
        Check::at_least(
            "shared words: ST.STRONG.SYS",
            1,
            stores,
            count(&|one| one.is_store(&["STRONG", "SYS"])),
        ),
        Check::at_least(
            "fences: MEMBAR.SYS",
            SYSTEM_FENCES,
            system_fences,
            count(&|one| one.is("MEMBAR", &["SYS"]) && !one.is("MEMBAR", &["SC"])),
        ),
        leaving(sass, asked(&["fence.sc.sys"])),
        Check::at_least(
            "last warp, relay: MEMBAR.GPU",
            1,
            device_fences,
            count(&|one| one.is("MEMBAR", &["GPU"])),
        ),
        Check::at_least(
            "acquire: CCTL.IVALL",
            1,
            acquires,
            count(&|one| one.is("CCTL", &["IVALL"])),
        ),
    ]);
    checks
}

/// Returns the number of PTX instructions with one of these prefixes.
fn asked_for(ptx: &str, prefixes: &[&str]) -> u64 {
    let statements = ptx.split([';', '{', '}', '\n']).map(str::trim);
    statements.filter(|one| prefixes.iter().any(|prefix| one.starts_with(prefix))).count() as u64
}

/// Checks the loads of words that others write (loads of objects are wider). A load outside a loop
/// was hoisted out of polling.
fn polls(sass: &[Instruction], asked: u64) -> Check {
    let loads: Vec<&Instruction> = sass
        .iter()
        .filter(|one| one.is_load(&["STRONG", "SYS"]) && !one.is_load(&["128"]))
        .collect();
    let mut check = Check::at_least("polls: LD.STRONG.SYS in a loop", POLLED, asked, loads.len());
    check.wrong = loads.iter().find(|load| !in_loop(sass, load.address)).map(|load| {
        format!("{} {} at {:#x} is in no loop", load.opcode, load.operands, load.address)
    });
    check
}

/// Checks the only sequentially consistent fence: a kernel that exits has it between its store of
/// `exited` and its last check of the ring (gio_decides). A weaker fence would let both sides
/// miss the other's write, and a second one on the submission path would slow down every batch.
fn leaving(sass: &[Instruction], asked: u64) -> Check {
    let fence = |one: &Instruction| one.is("MEMBAR", &["SC", "SYS"]);
    let fences = (0..sass.len()).filter(|&at| fence(&sass[at])).count();
    let looks = |&at: &usize| {
        let writes = |one: &Instruction| {
            one.is_store(&[]) || one.is("ATOMG", &[]) || one.is("RED", &[]) || one.is("EXIT", &[])
        };
        let look = |one: &Instruction| one.is_load(&["64", "STRONG", "SYS"]);
        let next = sass[at..].iter().find(|one| look(one) || writes(one));
        fence(&sass[at]) && next.is_some_and(look)
    };
    let found = (0..sass.len()).filter(looks).count();
    let mut check = Check::at_least("leaving: MEMBAR.SC.SYS, LD", 1, asked, found);
    check.wrong = (fences > 1).then(|| format!("{fences} of these fences, and one is needed"));
    check
}

/// Returns the polls of CQEs: the only 64-bit loads at a nonzero offset of their structure.
fn completion_polls(sass: &[Instruction]) -> impl Iterator<Item = usize> {
    (0..sass.len()).filter(|&at| {
        let offset = sass[at].address_operand().map(|(_, offset)| offset);
        sass[at].is_load(&["64", "STRONG", "SYS"]) && offset == Some(CQE_PHASE_AT)
    })
}

/// Returns the polls of a CQE that a system fence follows before any write.
fn completions_before_a_fence(sass: &[Instruction]) -> usize {
    let writes =
        |one: &&Instruction| one.is_store(&[]) || one.is("ATOMG", &[]) || one.is("RED", &[]);
    let fenced = |&at: &usize| {
        let next = sass[at..].iter().find(|one| one.is("MEMBAR", &[]) || writes(one));
        next.is_some_and(|one| one.is("MEMBAR", &["SYS"]))
    };
    completion_polls(sass).filter(fenced).count()
}

/// Returns the doorbells directly after a system fence, without a store or branch target between.
fn doorbells_behind_a_fence(sass: &[Instruction]) -> usize {
    let fenced = |at: usize| {
        let before = sass[..at].iter().rev();
        let fence = before
            .take_while(|one| !one.is_store(&[]) && !ends_block(one))
            .find(|one| one.is("MEMBAR", &["SYS"]));
        let inside = |target: u64| {
            fence.is_some_and(|fence| target > fence.address && target <= sass[at].address)
        };
        fence.is_some() && !sass.iter().any(|one| one.target().is_some_and(inside))
    };
    (0..sass.len()).filter(|&at| sass[at].is_store(&["MMIO", "SYS"]) && fenced(at)).count()
}

/// Returns true for a minimum without a result; newer GPUs name it differently.
fn is_reduction(one: &Instruction) -> bool {
    one.is("RED", &["MIN"]) || one.is("REDG", &["MIN"])
}

fn ends_block(one: &Instruction) -> bool {
    ["BRA", "EXIT", "CALL", "RET", "BSYNC"].iter().any(|name| one.is(name, &[]))
}

/// Returns the groups of four adjacent 16-byte stores.
fn whole_entries(sass: &[Instruction]) -> usize {
    let wide: Vec<(&str, u64)> = sass
        .iter()
        .filter(|one| one.is_store(&["128"]))
        .filter_map(Instruction::address_operand)
        .collect();
    let has = |base, offset| wide.contains(&(base, offset));
    wide.iter()
        .filter(|&&(base, offset)| (1..SQE_QUARTERS).all(|i| has(base, offset + 16 * i)))
        .count()
}

#[cfg(test)]
mod tests;
