//! Required properties of the assembled kernels.
//!
//! Each check counts instructions and compares with the PTX: the assembler may copy an access, so
//! more are fine and fewer are not. If the PTX itself has too few, the access was removed from the
//! source, and the check fails, too.

use crate::ptx::compile::{Kernel, Resources};
use crate::ptx::sass::{Instruction, in_loop};

/// Limit at which three blocks of 128 threads still fit the 65,536 registers of an SM.
const REGISTERS_MAX: u64 = 168;
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

/// Returns all checks of the I/O kernel.
pub fn io(ptx: &str, kernel: &Kernel) -> Vec<Check> {
    let sass = &kernel.sass;
    let count = |is: &dyn Fn(&Instruction) -> bool| sass.iter().filter(|one| is(one)).count();
    let asked = |prefixes: &[&str]| asked_for(ptx, prefixes);
    let system_fences = asked(&["fence.acq_rel.sys", "fence.release.sys", "st.release.sys"]);
    let device_fences = asked(&["atom.add.acq_rel.gpu"]);
    let acquires = asked(&["ld.acquire.sys", "fence.acq_rel.sys", "atom.add.acq_rel.gpu"]);
    let stores = asked(&["st.relaxed.sys", "st.release.sys"]);
    let mut checks = resources(kernel, REGISTERS_MAX);
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
            "last warp: MEMBAR.GPU",
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
/// `left` and its last check of the ring (gio_over). A weaker fence would let both sides miss the
/// other's write, and a second one on the submission path would slow down every batch.
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
mod tests {
    use super::*;
    use crate::ptx::sass::parse;

    const PTX: &str = "\
    ld.relaxed.sys.global.u64 %rd1, [%rd2];
    ld.relaxed.sys.global.u64 %rd1, [%rd2];
    ld.relaxed.sys.global.u64 %rd1, [%rd2];
    ld.relaxed.sys.global.u32 %r1, [%rd2];
    ld.acquire.sys.global.u32 %r1, [%rd2];
    ld.acquire.sys.global.u64 %r1, [%rd2];
    ld.relaxed.sys.global.v2.u64 {%rd1, %rd2}, [%rd3];
    fence.acq_rel.sys;
    st.relaxed.sys.global.u32 [%rd1], %r1;
    st.release.sys.global.u32 [%rd1], %r1;
    st.release.sys.global.u64 [%rd1], %rd2;
    atom.add.acq_rel.gpu.global.u32 %r1, [%rd1], %r2;
    st.global.v2.u64 [%rd1], {%rd2, %rd3};
    st.global.v2.u64 [%rd1], {%rd2, %rd3};
    st.global.v2.u64 [%rd1], {%rd2, %rd3};
    st.global.v2.u64 [%rd1], {%rd2, %rd3};
    st.global.v2.u64 [%rd1], {%rd2, %rd3};
    @%p1 bra $L; fence.release.sys;
    fence.sc.sys;
    st.mmio.relaxed.sys.global.u32 [%rd1], %r1;
    st.mmio.relaxed.sys.global.u32 [%rd1], %r1;";

    const SASS: &[&str] = &[
        "LDG.E.64.STRONG.SYS R64, desc[UR6][R64.64+0x8]",
        "MEMBAR.ALL.SYS",
        "CCTL.IVALL",
        "LDG.E.64.STRONG.SYS R70, desc[UR6][R40.64]",
        "CCTL.IVALL",
        "@!P1 LDG.E.STRONG.SYS R17, desc[UR6][R40.64]",
        "CCTL.IVALL",
        "LDG.E.STRONG.SYS R18, desc[UR6][R42.64]",
        "LDG.E.64.STRONG.SYS R72, desc[UR6][R44.64]",
        "STG.E.STRONG.SYS desc[UR6][R84.64+0x88], R72",
        "MEMBAR.ALL.SYS",
        "@P2 STG.E.STRONG.SYS desc[UR6][R54.64], R67",
        "MEMBAR.ALL.SYS",
        "STG.E.64.STRONG.SYS desc[UR6][R52.64], R50",
        "@!P1 STG.E.MMIO.SYS [R40], R53",
        "MEMBAR.ALL.GPU",
        "ATOMG.E.ADD.STRONG.GPU PT, R59, desc[UR6][R52.64+0x58], R59",
        "CCTL.IVALL",
        "STG.E.128 desc[UR6][R54.64], R40",
        "STG.E.128 desc[UR6][R134.64], R48",
        "STG.E.128 desc[UR6][R134.64+0x20], R44",
        "STG.E.128 desc[UR6][R134.64+0x10], R40",
        "STG.E.128 desc[UR6][R134.64+0x30], R52",
        "MEMBAR.ALL.SYS",
        "LDG.E.64 R40, desc[UR6][R84.64+0x10]",
        "STG.E.MMIO.SYS [R40], R76",
        "LDG.E.128.STRONG.SYS R88, desc[UR6][R44.64]",
        "MEMBAR.SC.SYS",
        "@P3 BRA 0x1f0",
        "LDG.E.64.STRONG.SYS R74, desc[UR6][R46.64]",
        "@P0 BRA 0x0",
    ];

    /// Returns the names of the checks that fail after `change` was made to a passing kernel.
    fn failures(change: impl Fn(&mut Vec<String>, &mut Resources)) -> Vec<&'static str> {
        let mut lines: Vec<String> = SASS.iter().map(ToString::to_string).collect();
        let mut resources = Resources { registers: 160, stack_bytes: 0, spill_bytes: 0 };
        change(&mut lines, &mut resources);
        let lines = lines.iter().enumerate();
        let listing: String =
            lines.map(|(i, line)| format!("/*{:04x}*/ {line} ;\n", i * 16)).collect();
        let name = "gio_kernel".to_owned();
        let checks = io(PTX, &Kernel { name, resources, sass: parse(&listing) });
        checks.iter().filter(|check| !check.passed()).map(|check| check.name).collect()
    }

    fn replaced(from: &'static str, to: &'static str) -> Vec<&'static str> {
        failures(|lines, _| {
            let line = lines.iter_mut().rfind(|line| line.contains(from)).unwrap();
            *line = line.replace(from, to);
        })
    }

    #[test]
    fn what_is_right_passes() {
        assert_eq!(failures(|_, _| {}), [""; 0]);
    }

    #[test]
    fn what_a_thread_takes_is_limited() {
        let more = failures(|_, resources| {
            *resources = Resources { registers: 169, stack_bytes: 8, spill_bytes: 4 };
        });
        assert_eq!(more, ["registers of a thread", "stack frame, bytes", "spilled, bytes"]);
        assert_eq!(replaced("LDG.E.64 R40", "LDL R40"), ["local memory: LDL, STL"]);
    }

    #[test]
    fn an_access_that_became_another_is_seen() {
        let doorbell = ["doorbells: ST.MMIO.SYS", "... right behind MEMBAR.SYS"];
        assert_eq!(replaced("STG.E.MMIO.SYS [R40], R76", "STG.E [R40], R76"), doorbell);
        let narrow = ["16-byte stores: ST.128", "... whole SQEs of four"];
        assert_eq!(replaced("STG.E.128", "STG.E.64"), narrow);
        assert_eq!(replaced("+0x30", "+0x40"), ["... whole SQEs of four"]);
        let polls = ["polls: LD.STRONG.SYS in a loop"];
        assert_eq!(replaced("LDG.E.64.STRONG.SYS R72", "LDG.E.64 R72"), polls);
        let halves = "LDG.E.64.STRONG.SYS R88";
        let objects = ["objects: LD.128.STRONG.SYS"];
        assert_eq!(replaced("LDG.E.128.STRONG.SYS R88", halves), objects);
        assert_eq!(replaced("+0x8]", "]"), ["... CQEs: 64 bits at +8", "... then MEMBAR.SYS"]);
        assert_eq!(replaced("STG.E.STRONG.SYS", "STG.E"), ["shared words: ST.STRONG.SYS"]);
        assert_eq!(replaced("MEMBAR.ALL.GPU", "NOP"), ["last warp: MEMBAR.GPU"]);
        assert_eq!(replaced("CCTL.IVALL", "NOP"), ["acquire: CCTL.IVALL"]);
    }

    #[test]
    fn the_fence_must_be_of_the_system_and_right_in_front_of_the_doorbell() {
        let weak = ["... right behind MEMBAR.SYS", "fences: MEMBAR.SYS"];
        assert_eq!(replaced("MEMBAR.ALL.SYS", "MEMBAR.ALL.GPU"), weak);
        // A store between the two, and a branch between the two.
        let moved = ["... right behind MEMBAR.SYS"];
        assert_eq!(replaced("LDG.E.64 R40, desc[UR6][R84.64+0x10]", "STG.E [R2], R3"), moved);
        assert_eq!(replaced("LDG.E.64 R40, desc[UR6][R84.64+0x10]", "BSYNC B1"), moved);
        assert_eq!(failures(|lines, _| lines.push("@P1 BRA 0x190".into())), moved);
    }

    #[test]
    fn nothing_is_written_between_a_completion_and_its_fence() {
        let late = failures(|lines, _| lines.insert(1, "STG.E [R2], R3".into()));
        assert_eq!(late, ["... then MEMBAR.SYS"]);
    }

    #[test]
    fn a_kernel_that_leaves_looks_once_more_behind_the_strongest_fence() {
        let leaving = ["leaving: MEMBAR.SC.SYS, LD"];
        // The form of fence.acq_rel.sys.
        assert_eq!(replaced("MEMBAR.SC.SYS", "MEMBAR.ALL.SYS"), leaving);
        assert_eq!(replaced("MEMBAR.SC.SYS", "MEMBAR.SC.GPU")[0], leaving[0]);
        assert_eq!(replaced("@P3 BRA 0x1f0", "STG.E [R2], R3"), leaving);
        let twice = failures(|lines, _| lines.insert(0, "MEMBAR.SC.SYS".into()));
        assert_eq!(twice, leaving);
    }

    #[test]
    fn a_poll_that_left_its_loop_is_seen() {
        assert_eq!(replaced("BRA 0x0", "BRA 0x10"), ["polls: LD.STRONG.SYS in a loop"]);
    }

    #[test]
    fn what_the_source_no_longer_asks_for_fails() {
        let empty = io("", &Kernel::default());
        let failed = empty.iter().filter(|check| !check.passed()).count();
        assert_eq!(failed, empty.len() - 4, "all but the four upper limits: {empty:#?}");
    }

    const POOL_PTX: &str = "\
    ld.global.v2.u64 {%rd1, %rd2}, [%rd3];
    st.global.v2.u64 [%rd1], {%rd2, %rd3};
    red.min.relaxed.gpu.global.u64 [%rd1], %rd2;";

    const POOL_SASS: &[&str] = &[
        "LDG.E.128 R8, desc[UR6][R2.64]",
        "LDG.E.128 R12, desc[UR6][R2.64+0x200]",
        "LDG.E.128 R16, desc[UR6][R2.64+0x400]",
        "LDG.E.128 R20, desc[UR6][R2.64+0x600]",
        "STG.E.128 desc[UR6][R4.64], R8",
        "LDG.E.128 R8, desc[UR6][R2.64]",
        "REDG.E.MIN.64.STRONG.GPU desc[UR6][R4.64], R2",
    ];

    /// Returns the names of the failed checks of a pool kernel after replacing `from` by `to`.
    fn pool_failures(name: &str, from: &str, to: &str) -> Vec<&'static str> {
        let lines = POOL_SASS.iter().enumerate();
        let listing: String =
            lines.map(|(i, line)| format!("/*{:04x}*/ {line} ;\n", i * 16)).collect();
        let sass = parse(&listing.replacen(from, to, 1));
        let kernel = Kernel { name: name.to_owned(), resources: Resources::default(), sass };
        let checks = pool(POOL_PTX, &kernel);
        checks.iter().filter(|check| !check.passed()).map(|check| check.name).collect()
    }

    #[test]
    fn the_pools_kernels_are_wide() {
        for name in ["gio_scatter_gather", "gio_pattern"] {
            assert_eq!(pool_failures(name, "", ""), [""; 0]);
            let narrow = pool_failures(name, "STG.E.128", "STG.E.64");
            assert_eq!(narrow, ["16-byte stores: ST.128"]);
            assert_eq!(
                pool_failures(name, "REDG", "LDL"),
                match name {
                    "gio_scatter_gather" => vec!["local memory: LDL, STL"],
                    _ => vec!["local memory: LDL, STL", "first difference: RED.MIN"],
                }
            );
        }
        let early = pool_failures("gio_scatter_gather", "LDG.E.128 R20", "STG.E.128 R20");
        assert_eq!(early, ["... loads before a store"]);
    }
}
