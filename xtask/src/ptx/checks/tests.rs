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

/// Numbers the lines of a listing, and appends the loop of a checksum: a load, `meanwhile` SHFLs,
/// the first wait for it, and more of them.
fn listing(lines: &[String], meanwhile: usize) -> String {
    let line = |i: usize, text: &str| format!("/*{:04x}*/ {text} ;\n", i * 16);
    let upper = |bits: u64| format!("/* 0x{bits:016x} */\n");
    let (start, shuffle) = (lines.len(), "SHFL.IDX PT, R9, R8, R7, 0x1f");
    let mut all: String = lines.iter().enumerate().map(|(i, text)| line(i, text)).collect();
    all += &line(start, "LDG.E.128.STRONG.SYS R8, desc[UR6][R2.64]");
    all += &upper(5 << 46);
    let used = start + 1 + meanwhile;
    all.extend((start + 1..used).map(|i| line(i, shuffle)));
    all += &line(used, "LOP3.LUT R8, R8, R9, RZ, 0x3c, !PT");
    all += &upper(1 << 57 | 7 << 46);
    all.extend((used + 1..used + 30).map(|i| line(i, shuffle)));
    all + &line(used + 30, &format!("BRA {:#x}", start * 16))
}

/// Returns the names of the checks that fail after `change` was made to a passing kernel.
fn failures(change: impl Fn(&mut Vec<String>, &mut Resources)) -> Vec<&'static str> {
    let mut lines: Vec<String> = SASS.iter().map(ToString::to_string).collect();
    let mut resources = Resources { registers: 120, stack_bytes: 0, spill_bytes: 0 };
    change(&mut lines, &mut resources);
    let name = "gio_kernel".to_owned();
    let sass = parse(&listing(&lines, STRIPES_MEANWHILE * SHUFFLES));
    let checks = io(PTX, &Kernel { name, resources, sass });
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
        *resources = Resources { registers: 129, stack_bytes: 8, spill_bytes: 4 };
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
    assert_eq!(replaced("MEMBAR.ALL.GPU", "NOP"), ["last warp, relay: MEMBAR.GPU"]);
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
fn a_load_that_is_waited_for_at_once_is_seen() {
    for (meanwhile, stripes, passes) in [(28, 1, true), (27, 1, false), (83, 3, false)] {
        let found = checksums(&parse(&listing(&[], meanwhile)), stripes);
        assert_eq!((found.found, found.passed()), (meanwhile as u64, passes));
    }
    assert_eq!(checksums(&[], 1).found, 0);
}

#[test]
fn what_the_source_no_longer_asks_for_fails() {
    let empty = io("", &Kernel::default());
    let failed = empty.iter().filter(|check| !check.passed()).count();
    assert_eq!(failed, empty.len() - 5, "all but the five upper limits: {empty:#?}");
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
    let lines: Vec<String> = POOL_SASS.iter().map(ToString::to_string).collect();
    let listing = listing(&lines, POOL_STRIPES_MEANWHILE * SHUFFLES);
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
