//! The conformance suite against the software controller.

use std::sync::Arc;

use nvme_driver::Iova;
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, FaultAction, FaultPlan, FaultRule, FaultWhen, LbaRange, MemoryMedia,
    SglSupport, SimClock,
};
use nvme_spec::status::Status;
use ripieno_tests::{
    conformance::{Case, Difference, Found, assert_conforms, cases, run},
    target::{Namespace, Sgls, Target},
};

const SEED: u64 = 0xc0ff;
const BLOCKS: [(u32, u64); 2] = [(512, 64 << 10), (4096, 8 << 10)];

/// Returns a software controller as a target, with its facts and known differences.
fn target(name: &'static str, config: EmuConfig, differences: &[Difference]) -> (Target, Arc<Emu>) {
    let config = BLOCKS.iter().fold(config, |config, &(lba_bytes, lbas)| {
        let media = MemoryMedia::new(lbas * u64::from(lba_bytes)).unwrap();
        config.namespace(media, lba_bytes)
    });
    let facts = (config.mdts_bytes.unwrap(), config.mqes, config.io_queues_max, config.vectors);
    let (mdts_bytes, mqes, qid_max, vectors) = facts;
    let sgls = match config.sgl {
        SglSupport::None => Sgls::None,
        SglSupport::Byte => Sgls::Bytes,
        SglSupport::Dword => Sgls::Dwords,
    };
    let clock = SimClock::new(SEED);
    let emu = Emu::new(EmuDomain::new(name), config).unwrap();
    clock.drive(emu.clone());
    let namespaces = BLOCKS
        .iter()
        .zip(1..)
        .map(|(&(lba_bytes, lbas), nsid)| Namespace { nsid, lba_bytes, lbas })
        .collect();
    let target = Target {
        name,
        bus: emu.bus(),
        clock,
        namespaces,
        mdts_bytes,
        entries_max: mqes.into(),
        qid_max,
        vectors,
        event_requests: 4,
        sgls,
        unmapped: Iova(0x66_6666_6000),
        differences: differences.to_vec(),
    };
    (target, emu)
}

#[test]
fn a_modern_drive_conforms() {
    let (target, _emu) = target("software controller", EmuConfig::new("emu0"), &[]);
    assert_conforms(&target);
}

#[test]
fn a_drive_with_other_limits_conforms() {
    const DWORDS: &str = "SGLS says dword granularity";
    const DIFFERENCES: &[Difference] = &[
        Difference {
            case: "sgl: odd addresses and lengths",
            found: Found::Status(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID),
            why: DWORDS,
        },
        Difference {
            case: "sgl: a data block at an odd address",
            found: Found::Status(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID),
            why: DWORDS,
        },
        Difference {
            case: "sgl: a bit bucket swallows what is read",
            found: Found::Status(Status::SGL_DESCRIPTOR_TYPE_INVALID),
            why: "SGLS says no bit buckets",
        },
        Difference {
            case: "sgl: a bit bucket in a write counts nothing",
            found: Found::Status(Status::SGL_DESCRIPTOR_TYPE_INVALID),
            why: "SGLS says no bit buckets",
        },
    ];
    let config = EmuConfig {
        sgl: SglSupport::Dword,
        bit_bucket: false,
        dstrd: 3,
        mdts_bytes: Some(128 << 10),
        mqes: 512,
        io_queues_max: 48,
        vectors: 2,
        ..EmuConfig::new("emu1")
    };
    let (target, _emu) = target("software controller, dwords", config, DIFFERENCES);
    assert_conforms(&target);
}

#[test]
fn a_drive_without_sgls_and_with_scattered_queues_conforms() {
    let sgls = cases().into_iter().filter(|case| case.name.starts_with("sgl: "));
    let mut differences: Vec<_> = sgls
        .map(|case| {
            let found = Found::Status(Status::INVALID_FIELD);
            Difference { case: case.name, found, why: "SGLS says no SGLs" }
        })
        .collect();
    let why = "CAP.CQR is 0: PRP1 is a list, and whatever is in it is an address";
    differences.extend(
        ["create cq not contiguous", "create sq not contiguous", "queues in scattered pages"]
            .map(|case| Difference { case, found: Found::OK, why }),
    );
    let config = EmuConfig {
        sgl: SglSupport::None,
        bit_bucket: false,
        contiguous_queues: false,
        io_queues_max: 42,
        ..EmuConfig::new("emu3")
    };
    let (target, _emu) = target("software controller, PRPs", config, &differences);
    assert_conforms(&target);
}

/// The suite detects errors, and stale entries in the list of differences.
#[test]
fn a_wrong_status_and_a_stale_difference_are_found() {
    const STALE: &[Difference] = &[
        Difference { case: "no such case", found: Found::Silence, why: "none" },
        Difference {
            case: "flush one namespace",
            found: Found::Status(Status::INVALID_FIELD),
            why: "it once did",
        },
        Difference {
            case: "read one past the end",
            found: Found::Status(Status::LBA_OUT_OF_RANGE),
            why: "no difference",
        },
        Difference {
            case: "write one past the end",
            found: Found::Status(Status::INVALID_FIELD),
            why: "it did something else wrong",
        },
    ];
    let (target, emu) = target("software controller, broken", EmuConfig::new("emu2"), STALE);
    // All commands to the second namespace succeed, and do nothing.
    let when = FaultWhen { admin: Some(false), nsid: Some(2), ..FaultWhen::default() };
    let then = FaultAction::Status { code: Status::SUCCESS.0, dnr: false };
    // Writes past the end of the first namespace are fatal.
    let lbas = Some(LbaRange { first: BLOCKS[0].1, count: 1 });
    let past = FaultWhen { opcode: Some(1), nsid: Some(1), lbas, ..when.clone() };
    let rules = vec![FaultRule::new(when, then), FaultRule::new(past, FaultAction::FatalStatus)];
    emu.set_faults(FaultPlan { seed: SEED, rules, ..FaultPlan::default() });
    let only = |name: &&Case| {
        name.name.contains("past the end")
            || name.name.contains("second namespace")
            || name.name.starts_with("flush")
    };
    let cases: Vec<Case> = cases().iter().filter(only).copied().collect();
    let wrong = run(&target, &cases);
    let found = |case: &str, what: &str| {
        let right = |line: &&String| line.starts_with(case) && line.contains(what);
        assert_eq!(wrong.iter().filter(right).count(), 1, "{case}, {what}: {wrong:#?}");
    };
    found("no such case", "that is none");
    found("flush one namespace", "remove the difference");
    found("read one past the end", "a difference that is none");
    found("write one past the end", "or as known");
    found("write and read back, second namespace", "wrong data");
    found("write across the end of the second namespace", "found 00/00h");
    // Cases about the first namespace pass.
    assert!(!wrong.iter().any(|line| line.starts_with("flush all")), "{wrong:#?}");
}
