//! The Rust half of `kernels/include/gio/abi.h`: what host code and the I/O kernel write into each
//! other's memory.
//!
//! Each struct exists exactly twice. The offsets written here are checked at compile time, and
//! [`layout_table`] lets a test compare them with the C++ compiler's. Fields are documented where
//! a reader of Rust needs them; the header has the algorithm's side. Every address is one that the
//! kernel dereferences, unless its name ends in `_iova`.

use crate::shared::Plain;

/// Version of this interface; equals `GIO_ABI_VERSION`.
pub const VERSION: u32 = 1;
/// Lanes of a warp.
pub const WARP: u32 = 32;
/// Explicit I/O contexts in one IOCB at the most (paper, section 3.2).
pub const IOCTX_MAX: u32 = 2048;
/// Operations that one warp may have in progress.
pub const WINDOW: usize = 8;

/// [`Iocb::opcode`]: NVMe Write.
pub const OP_WRITE: u32 = 1;
/// [`Iocb::opcode`]: NVMe Read.
pub const OP_READ: u32 = 2;
/// [`Iocb::flags`]: writes reach non-volatile media before they complete.
pub const FLAG_FUA: u32 = 1;
/// [`Iocb::kind`]: `ioctx` points to [`IoCtx`].
pub const KIND_EXPLICIT: u32 = 0;
/// [`Iocb::kind`]: `ioctx` points to [`Affine`].
pub const KIND_AFFINE: u32 = 1;

/// No error.
pub const STATUS_OK: u32 = 0;
/// The controller reported the status in the low bits.
pub const STATUS_NVME: u32 = 1 << 24;
/// No completion in time.
pub const STATUS_TIMEOUT: u32 = 2 << 24;
/// Never given to the device.
pub const STATUS_CANCELLED: u32 = 3 << 24;
/// The queue failed first.
pub const STATUS_FAULT: u32 = 4 << 24;
/// Block, file or range is wrong; never given to the device.
pub const STATUS_INVALID: u32 = 5 << 24;

/// [`Warp::fault`]: none.
pub const FAULT_NONE: u32 = 0;
/// [`Warp::fault`]: a completion for a CID that is not outstanding.
pub const FAULT_CID: u32 = 1;
/// [`Warp::fault`]: a completion whose SQ head is outside the queue.
pub const FAULT_SQHD: u32 = 2;
/// [`Warp::fault`]: a completion that names another queue.
pub const FAULT_SQID: u32 = 3;
/// [`Warp::fault`]: a command exceeded the timeout.
pub const FAULT_TIMEOUT: u32 = 4;

/// [`Warp::descriptor_mode`]: scatter gather lists.
pub const DESC_SGL: u32 = 0;
/// [`Warp::descriptor_mode`]: physical region pages.
pub const DESC_PRP: u32 = 1;

/// Declares the structs, proves size, offsets and the absence of padding, and collects the table.
macro_rules! interface {
    ($($(#[$meta:meta])* $name:ident $c:literal $size:literal {
        $($(#[$field_meta:meta])* $offset:literal $field:ident: $ty:ty,)*
    })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
            pub struct $name {
                $($(#[$field_meta])* pub $field: $ty,)*
            }

            const _: () = {
                assert!(size_of::<$name>() == $size, "size differs from abi.h");
                assert!(0 $(+ size_of::<$ty>())* == $size, "the compiler inserted padding");
                $(assert!(
                    std::mem::offset_of!($name, $field) == $offset,
                    "offset differs from abi.h"
                );)*
            };

            impl Plain for $name {}
        )*

        /// Every struct (`gio_iocb`: its size, offset 0) and every field (`gio_iocb.opcode`) of the
        /// interface as `(name, size, offset)`, in the order of the header.
        #[must_use]
        pub fn layout_table() -> Vec<(&'static str, usize, usize)> {
            vec![$(
                ($c, size_of::<$name>(), 0),
                $((
                    concat!($c, ".", stringify!($field)),
                    size_of::<$ty>(),
                    std::mem::offset_of!($name, $field),
                ),)*
            )*]
        }
    };
}

interface! {
    /// An explicit I/O context: one run of bytes on one device.
    IoCtx "gio_ioctx" 24 {
        /// First byte for the controller.
        0 iova: u64,
        /// First LBA on the device.
        8 lba: u64,
        /// Length in bytes, a multiple of the LBA size.
        16 bytes: u32,
        /// Index of the device.
        20 device: u32,
    }

    /// An affine I/O context: the kernel computes IOVA and LBA from the pool.
    Affine "gio_affine" 8 {
        /// KV block in the registered pool.
        0 block: u32,
        /// GPU file in the store.
        4 file: u32,
    }

    /// A registered KV pool and the layout of its files.
    Pool "gio_pool" 72 {
        /// `u64[rows]`: IOVA of block 0's object of each row.
        0 row_iova: u64,
        /// `u64[devices]`: first LBA of the data region.
        8 data_lba: u64,
        /// Bytes from one block's object to the next one's.
        16 block_stride: u64,
        /// KV blocks registered.
        24 blocks: u32,
        /// GPU files in the store.
        28 files: u32,
        /// Layers times segments.
        32 rows: u32,
        /// Number of devices N.
        36 devices: u32,
        /// Files of a group, a multiple of N.
        40 group: u32,
        /// Bytes of one object in memory.
        44 object_bytes: u32,
        /// Bytes of one object on the device.
        48 slot_bytes: u32,
        /// Commands are merged up to this many bytes.
        52 run_bytes: u32,
        /// Padding of reads goes here where the controller has no bit bucket.
        56 pad_read_iova: u64,
        /// Padding of writes comes from here (zeroes).
        64 pad_write_iova: u64,
    }

    /// One operation. The caller fills it; results belong to the kernel until the completion.
    Iocb "gio_iocb" 128 {
        /// [`OP_READ`] or [`OP_WRITE`].
        0 opcode: u32,
        /// [`FLAG_FUA`].
        4 flags: u32,
        /// [`KIND_EXPLICIT`] or [`KIND_AFFINE`].
        8 kind: u32,
        /// Number of I/O contexts.
        12 count: u32,
        /// The I/O contexts, grouped by device class.
        16 ioctx: u64,
        /// `u32[devices + 1]`: class c is contexts `[starts[c], starts[c + 1])`.
        24 starts: u64,
        /// `u32[count]`: written only for what failed.
        32 status: u64,
        /// [`Pool`], affine only.
        40 pool: u64,
        /// First row, affine only.
        48 row_first: u32,
        /// Rows, affine only.
        52 row_count: u32,
        /// The longest context, explicit only.
        56 bytes_max: u32,
        /// Entries of `starts`, less one.
        60 devices: u32,
        /// `u32`: start only when `*wait - wait_value >= 0` (signed); 0 = at once.
        64 wait: u64,
        /// `u32`: `*signal = signal_value` when everything completed; 0 = none.
        72 signal: u64,
        /// What `wait` must reach.
        80 wait_value: u32,
        /// What `signal` becomes.
        84 signal_value: u32,
        /// Warps that have not finished their part.
        88 warps_left: u32,
        /// Commands and contexts that failed.
        92 errors: u32,
        /// One of the failures: `status << 32 | index of its context`.
        96 error: u64,
        /// Rows of contexts done without error.
        104 objects: u64,
        /// Zero.
        112 reserved: [u64; 2],
    }

    /// One command slot of a queue: what its CID stands for.
    Slot "gio_slot" 24 {
        /// Of the CID: `cid = generation << depth_log2 | slot`.
        0 generation: u16,
        /// 0 free, 1 outstanding, 2 timed out.
        2 state: u16,
        /// Index into [`Warp::active`].
        4 active: u16,
        /// Contexts merged into the command.
        6 count: u16,
        /// Index of the first context.
        8 first: u32,
        /// Length in bytes.
        12 bytes: u32,
        /// When it was submitted.
        16 since_ns: u64,
    }

    /// An operation in progress on one warp.
    Active "gio_active" 32 {
        /// The IOCB's index.
        0 iocb: u32,
        /// Its commands on this queue.
        4 outstanding: u32,
        /// 0 unused, 1 generating, 2 all generated.
        8 state: u32,
        /// Failures so far.
        12 errors: u32,
        /// One of them.
        16 error: u64,
        /// Objects done so far.
        24 objects: u64,
    }

    /// One warp and the queue pair it owns. The host writes the fields up to `parts` before the
    /// start; from `sq_tail` on they are the warp's, and the host may read fault and counters.
    Warp "gio_warp" 512 {
        /// Submission queue.
        0 sq: u64,
        /// Completion queue.
        8 cq: u64,
        /// Submission tail doorbell.
        16 sq_doorbell: u64,
        /// Completion head doorbell.
        24 cq_doorbell: u64,
        /// Descriptor areas, one a slot.
        32 descriptors: u64,
        /// The same for the controller.
        40 descriptors_iova: u64,
        /// `Slot[depth]`.
        48 slots: u64,
        /// `u16[depth]`: stack of free slots.
        56 free_slots: u64,
        /// Bytes of one descriptor area.
        64 descriptor_bytes: u32,
        /// log2 of the queue depth.
        68 depth_log2: u32,
        /// Namespace.
        72 nsid: u32,
        /// log2 of the LBA size.
        76 lba_shift: u32,
        /// Size of the namespace.
        80 lbas: u64,
        /// Longest transfer of one command.
        88 transfer_bytes_max: u32,
        /// [`DESC_SGL`] or [`DESC_PRP`].
        92 descriptor_mode: u32,
        /// Memory page size, PRP only.
        96 page_bytes: u32,
        /// Nonzero: padding of reads may be discarded, SGL only.
        100 bit_bucket: u32,
        /// Queue identifier.
        104 qid: u32,
        /// Which device of the store.
        108 device: u32,
        /// This warp's part of the device's run.
        112 part: u32,
        /// Parts of the device.
        116 parts: u32,
        /// Next submission queue entry.
        120 sq_tail: u32,
        /// Completion queue head, free running.
        124 cq_head: u32,
        /// Next submission ring entry, free running.
        128 ring_head: u32,
        /// Entries of the free stack.
        132 free_count: u32,
        /// Commands outstanding.
        136 outstanding: u32,
        /// Which active operation is generating.
        140 cursor_active: u32,
        /// Its row.
        144 cursor_row: u32,
        /// Its next piece.
        148 cursor_at: u32,
        /// `FAULT_*`.
        152 fault: u32,
        /// Slots in state 2.
        156 quarantined: u32,
        /// When the slots were last looked through for timeouts.
        160 swept_ns: u64,
        /// Commands submitted.
        168 commands: u64,
        /// Objects done.
        176 objects: u64,
        /// Bytes read.
        184 bytes_read: u64,
        /// Bytes written.
        192 bytes_written: u64,
        /// Submission doorbells rung.
        200 sq_doorbells: u64,
        /// Completion doorbells rung.
        208 cq_doorbells: u64,
        /// Failures.
        216 errors: u64,
        /// Completions that came after their timeout.
        224 late: u64,
        /// Operations in progress.
        232 active: [Active; WINDOW],
        /// Zero; fills the last cache line.
        488 reserved: [u64; 3],
    }

    /// What a kernel launch, or a host thread's turn, is given.
    Args "gio_args" 88 {
        /// `Warp[warp_count]`.
        0 warps: u64,
        /// `Iocb[]`.
        8 iocbs: u64,
        /// `u64[ring_mask + 1]`: `(position + 1) << 32 | iocb`.
        16 sq_ring: u64,
        /// `u64[ring_mask + 1]`: the same form.
        24 cq_ring: u64,
        /// `u32`: next position of the completion ring.
        32 cq_tail: u64,
        /// `u32`: nonzero = submit nothing more, end when nothing is outstanding.
        40 stop: u64,
        /// `u64`: virtual time in nanoseconds; 0 = the processor's own clock.
        48 clock: u64,
        /// Of a command.
        56 timeout_ns: u64,
        /// Number of warps.
        64 warp_count: u32,
        /// Ring entries, less one.
        68 ring_mask: u32,
        /// Launch-per-batch: end once the ring head reaches this and all is done.
        72 until: u32,
        /// 1: `until` is ignored.
        76 resident: u32,
        /// Host: give the thread back after this many rounds.
        80 rounds: u32,
        /// Zero.
        84 reserved: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header is the other half: each constant and each field must occur in it by name.
    #[test]
    fn the_header_names_the_same_things() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/include/gio/abi.h");
        let header = std::fs::read_to_string(path).expect("abi.h lies beside this crate");
        for (name, value) in [
            ("GIO_ABI_VERSION", VERSION),
            ("GIO_WARP", WARP),
            ("GIO_IOCTX_MAX", IOCTX_MAX),
            ("GIO_OP_WRITE", OP_WRITE),
            ("GIO_OP_READ", OP_READ),
            ("GIO_FLAG_FUA", FLAG_FUA),
            ("GIO_KIND_EXPLICIT", KIND_EXPLICIT),
            ("GIO_KIND_AFFINE", KIND_AFFINE),
            ("GIO_STATUS_OK", STATUS_OK),
            ("GIO_FAULT_NONE", FAULT_NONE),
            ("GIO_FAULT_CID", FAULT_CID),
            ("GIO_FAULT_SQHD", FAULT_SQHD),
            ("GIO_FAULT_SQID", FAULT_SQID),
            ("GIO_FAULT_TIMEOUT", FAULT_TIMEOUT),
            ("GIO_DESC_SGL", DESC_SGL),
            ("GIO_DESC_PRP", DESC_PRP),
        ] {
            assert!(header.contains(&format!("#define {name} {value}u")), "{name} = {value}");
        }
        for (name, kind) in
            [("NVME", STATUS_NVME), ("TIMEOUT", STATUS_TIMEOUT), ("CANCELLED", STATUS_CANCELLED)]
        {
            let line = format!("#define GIO_STATUS_{name} ({}u << 24)", kind >> 24);
            assert!(header.contains(&line), "{line}");
        }
        for (name, kind) in [("FAULT", STATUS_FAULT), ("INVALID", STATUS_INVALID)] {
            let line = format!("#define GIO_STATUS_{name} ({}u << 24)", kind >> 24);
            assert!(header.contains(&line), "{line}");
        }
        assert!(header.contains(&format!("#define GIO_WINDOW {WINDOW}u")));

        let mut body = "";
        for (name, ..) in layout_table() {
            let Some((_, field)) = name.split_once('.') else {
                let start = header.find(&format!("typedef struct {name} {{")).expect(name);
                let end = header[start..].find(&format!("}} {name};")).expect(name);
                body = &header[start..start + end];
                continue;
            };
            let declared = [format!(" {field};"), format!(" {field}[")];
            assert!(declared.iter().any(|text| body.contains(text)), "{name}");
        }
    }

    #[test]
    fn the_table_has_every_struct_once() {
        let table = layout_table();
        let structs: Vec<_> = table.iter().filter(|row| !row.0.contains('.')).collect();
        assert_eq!(structs.len(), 8);
        assert!(table.contains(&("gio_warp.active", 256, 232)));
        let names: std::collections::HashSet<_> = table.iter().map(|row| row.0).collect();
        assert_eq!(names.len(), table.len());
    }
}
