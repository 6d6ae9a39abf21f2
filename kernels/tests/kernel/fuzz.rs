//! IOCBs of any content: the kernel refuses them or carries them out, and completes each once.
//!
//! The controllers of [`crate::device`] assert that every command stays inside its namespace, its
//! transfer limit and the memory of the operation. Addresses in an IOCB are the store's own and
//! stay right; all other fields, and the lists that the addresses point to, come from the fuzzer.

use bolero::{TypeGenerator, check};
use gio_uring::abi::{self, Affine, IoCtx, Iocb};

use crate::{
    device::Mischief,
    rig::{Config, Rig, Shape},
};

/// Entries of an operation.
const LIST_MAX: usize = 40;
/// Blocks and files of the pool, and LBAs of a device; entries may name more.
const BLOCKS: u32 = 16;
const FILES: u32 = 64;
const LBAS: u64 = 256;

/// A number that is in range more often than not.
#[derive(Debug, Clone, Copy, TypeGenerator)]
struct Number {
    value: u32,
    is_any: bool,
    is_large: bool,
}

impl Number {
    fn below(self, limit: u32) -> u32 {
        if self.is_any && self.is_large { self.value } else { self.value % limit }
    }
}

#[derive(Debug, TypeGenerator)]
enum List {
    Affine { entries: Vec<(Number, Number)>, rows: (Number, Number) },
    Explicit { entries: Vec<(Number, Number, bool)>, bytes_max: Number },
}

/// Fields of an IOCB that are replaced after it was built.
#[derive(Debug, TypeGenerator)]
struct Fields {
    opcode: Option<u32>,
    flags: Option<u32>,
    kind: Option<u32>,
    devices: Option<u8>,
    placement: Option<u8>,
}

#[derive(Debug, TypeGenerator)]
struct Operation {
    is_write: bool,
    list: List,
    fields: Option<Fields>,
}

#[derive(Debug, TypeGenerator)]
struct Input {
    seed: u8,
    has_two_devices: bool,
    has_two_queues: bool,
    has_sgl: bool,
    is_shallow: bool,
    transfer_log2: u8,
    object_sectors: u8,
    operations: Vec<Operation>,
    statuses: Vec<Option<u16>>,
}

fn config(input: &Input) -> Config {
    Config {
        devices: 1 + u32::from(input.has_two_devices),
        parts: 1 + u32::from(input.has_two_queues),
        depth_log2: if input.is_shallow { 4 } else { 6 },
        sgl: input.has_sgl,
        lba_shift: 9,
        lbas: LBAS,
        transfer_bytes_max: 4096 << (input.transfer_log2 % 4),
        ..Config::default()
    }
}

/// The IOCB of `operation`, with lists in memory that no other operation uses.
fn iocb(rig: &mut Rig, operation: &Operation, kv: &crate::rig::Kv) -> Iocb {
    let op = if operation.is_write { abi::OP_WRITE } else { abi::OP_READ };
    let mut iocb = match &operation.list {
        List::Affine { entries, rows } => {
            let entry = |(block, file): &(Number, Number)| Affine {
                block: block.below(BLOCKS),
                file: file.below(FILES),
            };
            let mut map: Vec<Affine> = entries.iter().take(LIST_MAX).map(entry).collect();
            let first = rows.0.below(kv.shape.rows);
            let mut iocb = rig.affine(kv, op, &mut map, [first, first]);
            iocb.row_count = rows.1.below(kv.shape.rows + 1);
            iocb
        }
        List::Explicit { entries, bytes_max } => {
            let area = rig.memory.take_data(LIST_MAX as u64 * 4096, 4096);
            let devices = rig.config.devices;
            let mut list = Vec::new();
            for (index, (lba, sectors, second)) in entries.iter().take(LIST_MAX).enumerate() {
                list.push(IoCtx {
                    iova: rig.memory.iova(area.at(index as u64 * 4096)),
                    lba: u64::from(lba.below(LBAS as u32)),
                    // Up to its part of the area; any other length is refused by its remainder.
                    bytes: match sectors.below(9) {
                        sectors @ 0..=8 => sectors * 512,
                        odd => odd | 1,
                    },
                    device: u32::from(*second) % devices,
                });
            }
            let mut iocb = rig.explicit(op, &mut list);
            if bytes_max.is_any {
                iocb.bytes_max = bytes_max.value;
            }
            iocb
        }
    };
    if let Some(fields) = &operation.fields {
        iocb.opcode = fields.opcode.unwrap_or(iocb.opcode);
        iocb.flags = fields.flags.unwrap_or(iocb.flags);
        // An affine list in memory for explicit ones is too short, and the other way round the
        // pool's address is missing: only kinds that do not exist.
        iocb.kind = fields.kind.map_or(iocb.kind, |kind| kind | 1 << 31);
        iocb.devices = fields.devices.map_or(iocb.devices, |devices| u32::from(devices) % 3);
        iocb.placement = fields.placement.map_or(iocb.placement, u32::from);
    }
    iocb
}

#[test]
fn iocbs() {
    check!(name = "iocbs").with_type::<Input>().with_iterations(30).for_each(|input| {
        let mut rig = Rig::new(config(input), u64::from(input.seed));
        let object = 512 * (1 + u32::from(input.object_sectors % 16));
        let kv = rig.kv(Shape {
            blocks: BLOCKS,
            files: FILES,
            rows: 2,
            group: 32,
            object_bytes: object,
            slot_bytes: object,
            run_bytes: 4096,
            gap: 0,
        });
        for device in &mut rig.devices {
            for queue in &mut device.queues {
                let status = |status: &Option<u16>| status.map(|bits| Mischief::Status(bits | 1));
                queue.mischief.extend(input.statuses.iter().take(64).map(status));
            }
        }
        for operation in input.operations.iter().take(6) {
            let iocb = iocb(&mut rig, operation, &kv);
            rig.issue(iocb);
            let done = rig.finish(1).remove(0);
            let failed = done.statuses.iter().filter(|status| **status != 0).count();
            assert!(failed == 0 || done.iocb.errors > 0, "a status that no error counts");
            assert!(
                done.iocb.error != 0 || done.iocb.errors == 0,
                "errors without one that says where"
            );
        }
        rig.assert_at_rest();
    });
}
