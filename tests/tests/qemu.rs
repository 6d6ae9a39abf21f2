//! The conformance suite against QEMU's NVMe controller, an independent model.
//!
//! Needs `qemu-system-x86_64`, but no privileges. Without it the test fails, unless
//! `RIPIENO_SKIP_QEMU=1` is set: then it is reported as ignored.

use std::{process::ExitCode, sync::Arc};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use nvme_driver::{Bus, ControllerOptions, DescriptorPreference, Iova};
use nvme_spec::status::Status;
use objstore::{BlockId, KvShape, Layer, Order, StoreOptions};
use ripieno_testkit::keys;
use ripieno_tests::{
    conformance::{Difference, Found, assert_conforms},
    qtest::{self, Qemu, QemuNamespace},
    store::{Plan, Rig},
    target::{Namespace, Sgls, Target},
};

const MIB: u64 = 1 << 20;
const NAMESPACES: [QemuNamespace; 2] = [
    QemuNamespace { lba_bytes: 512, bytes: 32 * MIB },
    QemuNamespace { lba_bytes: 4096, bytes: 32 * MIB },
];

const NO_MEMORY: &str = "what is not memory reads as zero and swallows writes, as on a real PC";
const DWORDS: &str = "a controller is not required to check bits 1:0 of a PRP entry";
const CQ_INVALID: &str = "it has one status for all completion queues that are not there";

const fn differs(case: &'static str, status: Status, why: &'static str) -> Difference {
    Difference { case, found: Found::Status(status), why }
}

const fn accepts(case: &'static str, why: &'static str) -> Difference {
    differs(case, Status::SUCCESS, why)
}

/// Known differences of QEMU 7.2.
const DIFFERENCES: &[Difference] = &[
    differs("create sq on cq 0", Status::COMPLETION_QUEUE_INVALID, CQ_INVALID),
    differs(
        "create sq on a cq above the number of queues",
        Status::COMPLETION_QUEUE_INVALID,
        CQ_INVALID,
    ),
    differs("delete cq 0", Status::COMPLETION_QUEUE_INVALID, CQ_INVALID),
    differs("delete cq that is not there", Status::COMPLETION_QUEUE_INVALID, CQ_INVALID),
    differs("delete cq above the number of queues", Status::COMPLETION_QUEUE_INVALID, CQ_INVALID),
    accepts("identify to an odd address", DWORDS),
    accepts("prp: odd first entry", DWORDS),
    accepts("prp: list at an odd address", "it reads entries from wherever the pointer leads"),
    accepts("identify to unmapped memory", NO_MEMORY),
    accepts("prp: unmapped first page", NO_MEMORY),
    accepts("sgl: unmapped data", NO_MEMORY),
    differs(
        "log page that does not exist",
        Status::INVALID_FIELD,
        "it takes the page for one field of many",
    ),
    Difference {
        case: "abort of an event request",
        found: Found::Silence,
        why: "Abort is a best effort, and this is beyond its",
    },
    Difference {
        case: "event that came before its request",
        found: Found::Silence,
        why: "it forgets doorbell errors while no event request waits",
    },
    differs(
        "read of all namespaces",
        Status::INVALID_FIELD,
        "it takes FFFFFFFFh for a valid identifier of a namespace that is not attached",
    ),
    accepts("deallocate past the end", "it skips ranges that it cannot deallocate"),
    differs(
        "sgl: a chain of many segments",
        Status::INVALID_SGL_SEGMENT_DESCRIPTOR,
        "a bug: it looks at a segment pointer again after the next segment was read over it",
    ),
    differs(
        "sgl: segments of a page",
        Status::INVALID_SGL_SEGMENT_DESCRIPTOR,
        "the same bug: three segments or more, of one length",
    ),
    accepts("sgl: too long", "it stops at the end of the data and does not look on"),
    accepts("sgl: a segment that leads nowhere", "it stops at the end of the data"),
    accepts("sgl: reserved subtype", "it does not look at subtypes"),
    differs(
        "sgl: keyed descriptor",
        Status::INVALID_SGL_SEGMENT_DESCRIPTOR,
        "what is no data block has to be a segment, it thinks",
    ),
    differs(
        "sgl: reserved descriptor",
        Status::INVALID_SGL_SEGMENT_DESCRIPTOR,
        "what is no data block has to be a segment, it thinks",
    ),
    differs(
        "sgl: a bit bucket swallows what is read",
        Status::SGL_DESCRIPTOR_TYPE_INVALID,
        "SGLS says no bit buckets",
    ),
    differs(
        "sgl: a bit bucket in a write counts nothing",
        Status::SGL_DESCRIPTOR_TYPE_INVALID,
        "SGLS says no bit buckets",
    ),
    accepts("a CID that is in use", "it does not compare CIDs"),
];

/// Runs a test on QEMU's controller, unless it is to be skipped.
fn with_qemu(test: impl FnOnce(&Qemu)) -> Result<Completion, Failed> {
    if std::env::var_os("RIPIENO_SKIP_QEMU").is_some_and(|value| value == "1") {
        return Ok(Completion::ignored_with("RIPIENO_SKIP_QEMU=1"));
    }
    let program = qtest::find().expect(
        "not run: no qemu-system-x86_64. hint: `cargo xtask test` gets it; or name the program in \
         RIPIENO_QEMU, or set RIPIENO_SKIP_QEMU=1 to have this test reported as ignored",
    );
    test(&Qemu::start(&program, &NAMESPACES).expect("QEMU starts"));
    Ok(Completion::Completed)
}

fn conforms(qemu: &Qemu) {
    let namespace = |(index, of): (usize, &QemuNamespace)| Namespace {
        nsid: index as u32 + 1,
        lba_bytes: of.lba_bytes,
        lbas: of.bytes / u64::from(of.lba_bytes),
    };
    assert_conforms(&Target {
        name: "QEMU",
        bus: qemu.bus(),
        clock: qemu.clock(),
        namespaces: NAMESPACES.iter().enumerate().map(namespace).collect(),
        mdts_bytes: 512 << 10,
        entries_max: 2048,
        qid_max: 64,
        vectors: 65,
        event_requests: 4,
        sgls: Sgls::Bytes,
        // Above its RAM, below its devices.
        unmapped: Iova(0x4000_0000),
        differences: DIFFERENCES.to_vec(),
    });
}

/// Tests store, ring and I/O kernel on a third party's controller.
fn store(qemu: &Qemu) {
    const COUNT: u32 = 24;
    // The second object size is padded to blocks, with bit buckets or their replacement.
    let cases = [
        (DescriptorPreference::Sgl, 8192),
        (DescriptorPreference::Sgl, 4608 - 128),
        (DescriptorPreference::Prp, 8192),
    ];
    for (descriptors, object_bytes) in cases {
        let shape = KvShape { layers: 3, segments: 2, object_bytes, block_tokens: 16 };
        let plan = Plan {
            shape,
            blocks: 2 * COUNT,
            format: ripieno_testkit::format(shape),
            driver: ControllerOptions { descriptors, ..Default::default() },
            store: StoreOptions { queues: 2, depth: 32, ..Default::default() },
        };
        let bus: Arc<dyn Bus> = qemu.bus();
        let mut rig = Rig::open(&[bus], qemu.clock(), &plan).expect("a store on QEMU");
        let (keys, version) = (keys(0..COUNT), u64::from(object_bytes));
        let first: Vec<BlockId> = (0..COUNT).map(BlockId).collect();
        // Scattered, and not in the order of the files.
        let second: Vec<BlockId> = (0..COUNT).map(|n| BlockId(COUNT + n * 5 % COUNT)).collect();
        for (block, key) in first.iter().zip(&keys) {
            rig.kv.fill(*block, *key, version);
        }
        let writing = rig.store.allocate(&keys, &first).unwrap();
        for layer in (0..plan.shape.layers).map(Layer) {
            let ticket = rig.store.start(&writing, layer, Order::Unordered).unwrap();
            rig.store.wait(ticket).unwrap();
        }
        assert_eq!(rig.store.commit(writing).unwrap().accepted, keys.len());
        second.iter().for_each(|block| rig.kv.wipe(*block));
        let prefix = rig.store.lookup(&keys).unwrap();
        assert_eq!(prefix.len(), keys.len());
        let transfer = rig.store.retrieve(&prefix, &second).unwrap();
        for layer in (0..plan.shape.layers).map(Layer) {
            let ticket = rig.store.start(&transfer, layer, Order::Unordered).unwrap();
            rig.store.wait(ticket).unwrap();
            for (block, key) in second.iter().zip(&keys) {
                let right = rig.kv.holds(*block, layer, *key, version);
                assert!(right, "{descriptors:?}, {object_bytes} bytes, layer {layer}, {block}");
            }
        }
        drop((prefix, transfer));
        rig.store.close().unwrap();
    }
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    let test = |name, test: fn(&Qemu)| Trial::ignorable_test(name, move || with_qemu(test));
    let tests = [
        test("qemus_controller_conforms", conforms),
        test("a_store_works_on_qemus_controller", store),
    ];
    libtest_mimic::run(&arguments, tests.into()).exit_code()
}
