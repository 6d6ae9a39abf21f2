// Made by `cargo xtask abi`: do not edit.
// c51b3429504fc8731004c45f8ea95e47 kernels/include/gio/abi.h
pub const GIO_WARP: u32 = 32;
pub const GIO_IOCTX_MAX: u32 = 2048;
pub const GIO_WINDOW: u32 = 8;
pub const GIO_PLACEMENTS: u32 = 8;
pub const GIO_OP_WRITE: u32 = 1;
pub const GIO_OP_READ: u32 = 2;
pub const GIO_FLAG_FUA: u32 = 1;
pub const GIO_KIND_EXPLICIT: u32 = 0;
pub const GIO_KIND_AFFINE: u32 = 1;
pub const GIO_STATUS_OK: u32 = 0;
pub const GIO_STATUS_NVME: u32 = 16777216;
pub const GIO_STATUS_TIMEOUT: u32 = 33554432;
pub const GIO_STATUS_CANCELLED: u32 = 50331648;
pub const GIO_STATUS_FAULT: u32 = 67108864;
pub const GIO_STATUS_INVALID: u32 = 83886080;
pub const GIO_STATUS_CHECKSUM: u32 = 100663296;
pub const GIO_FAULT_NONE: u32 = 0;
pub const GIO_FAULT_CID: u32 = 1;
pub const GIO_FAULT_SQHD: u32 = 2;
pub const GIO_FAULT_SQID: u32 = 3;
pub const GIO_FAULT_TIMEOUT: u32 = 4;
pub const GIO_FAULT_EVENT: u32 = 5;
pub const GIO_STOP_SEEN: u32 = 1;
pub const GIO_STOP_DRAINED: u32 = 2;
pub const GIO_DESC_SGL: u32 = 0;
pub const GIO_DESC_PRP: u32 = 1;
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_ioctx {
    pub iova: u64,
    pub lba: u64,
    pub bytes: u32,
    pub device: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_ioctx"][::std::mem::size_of::<gio_ioctx>() - 24usize];
    ["Alignment of gio_ioctx"][::std::mem::align_of::<gio_ioctx>() - 8usize];
    ["Offset of field: gio_ioctx::iova"][::std::mem::offset_of!(gio_ioctx, iova) - 0usize];
    ["Offset of field: gio_ioctx::lba"][::std::mem::offset_of!(gio_ioctx, lba) - 8usize];
    ["Offset of field: gio_ioctx::bytes"][::std::mem::offset_of!(gio_ioctx, bytes) - 16usize];
    ["Offset of field: gio_ioctx::device"][::std::mem::offset_of!(gio_ioctx, device) - 20usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_affine {
    pub block: u32,
    pub file: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_affine"][::std::mem::size_of::<gio_affine>() - 8usize];
    ["Alignment of gio_affine"][::std::mem::align_of::<gio_affine>() - 4usize];
    ["Offset of field: gio_affine::block"][::std::mem::offset_of!(gio_affine, block) - 0usize];
    ["Offset of field: gio_affine::file"][::std::mem::offset_of!(gio_affine, file) - 4usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_pool {
    pub row_iova: u64,
    pub data_lba: u64,
    pub block_stride: u64,
    pub blocks: u32,
    pub files: u32,
    pub rows: u32,
    pub devices: u32,
    pub group: u32,
    pub object_bytes: u32,
    pub slot_bytes: u32,
    pub run_bytes: u32,
    pub pad_read_iova: u64,
    pub pad_write_iova: u64,
    pub row_base: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_pool"][::std::mem::size_of::<gio_pool>() - 80usize];
    ["Alignment of gio_pool"][::std::mem::align_of::<gio_pool>() - 8usize];
    ["Offset of field: gio_pool::row_iova"][::std::mem::offset_of!(gio_pool, row_iova) - 0usize];
    ["Offset of field: gio_pool::data_lba"][::std::mem::offset_of!(gio_pool, data_lba) - 8usize];
    ["Offset of field: gio_pool::block_stride"]
        [::std::mem::offset_of!(gio_pool, block_stride) - 16usize];
    ["Offset of field: gio_pool::blocks"][::std::mem::offset_of!(gio_pool, blocks) - 24usize];
    ["Offset of field: gio_pool::files"][::std::mem::offset_of!(gio_pool, files) - 28usize];
    ["Offset of field: gio_pool::rows"][::std::mem::offset_of!(gio_pool, rows) - 32usize];
    ["Offset of field: gio_pool::devices"][::std::mem::offset_of!(gio_pool, devices) - 36usize];
    ["Offset of field: gio_pool::group"][::std::mem::offset_of!(gio_pool, group) - 40usize];
    ["Offset of field: gio_pool::object_bytes"]
        [::std::mem::offset_of!(gio_pool, object_bytes) - 44usize];
    ["Offset of field: gio_pool::slot_bytes"]
        [::std::mem::offset_of!(gio_pool, slot_bytes) - 48usize];
    ["Offset of field: gio_pool::run_bytes"][::std::mem::offset_of!(gio_pool, run_bytes) - 52usize];
    ["Offset of field: gio_pool::pad_read_iova"]
        [::std::mem::offset_of!(gio_pool, pad_read_iova) - 56usize];
    ["Offset of field: gio_pool::pad_write_iova"]
        [::std::mem::offset_of!(gio_pool, pad_write_iova) - 64usize];
    ["Offset of field: gio_pool::row_base"][::std::mem::offset_of!(gio_pool, row_base) - 72usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_iocb {
    pub opcode: u32,
    pub flags: u32,
    pub kind: u32,
    pub count: u32,
    pub ioctx: u64,
    pub starts: u64,
    pub status: u64,
    pub pool: u64,
    pub row_first: u32,
    pub row_count: u32,
    pub bytes_max: u32,
    pub devices: u32,
    pub wait: u64,
    pub signal: u64,
    pub wait_value: u32,
    pub signal_value: u32,
    pub errors: u32,
    pub placement: u32,
    pub error: u64,
    pub objects: u64,
    pub checksums: u64,
    pub reserved: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_iocb"][::std::mem::size_of::<gio_iocb>() - 128usize];
    ["Alignment of gio_iocb"][::std::mem::align_of::<gio_iocb>() - 8usize];
    ["Offset of field: gio_iocb::opcode"][::std::mem::offset_of!(gio_iocb, opcode) - 0usize];
    ["Offset of field: gio_iocb::flags"][::std::mem::offset_of!(gio_iocb, flags) - 4usize];
    ["Offset of field: gio_iocb::kind"][::std::mem::offset_of!(gio_iocb, kind) - 8usize];
    ["Offset of field: gio_iocb::count"][::std::mem::offset_of!(gio_iocb, count) - 12usize];
    ["Offset of field: gio_iocb::ioctx"][::std::mem::offset_of!(gio_iocb, ioctx) - 16usize];
    ["Offset of field: gio_iocb::starts"][::std::mem::offset_of!(gio_iocb, starts) - 24usize];
    ["Offset of field: gio_iocb::status"][::std::mem::offset_of!(gio_iocb, status) - 32usize];
    ["Offset of field: gio_iocb::pool"][::std::mem::offset_of!(gio_iocb, pool) - 40usize];
    ["Offset of field: gio_iocb::row_first"][::std::mem::offset_of!(gio_iocb, row_first) - 48usize];
    ["Offset of field: gio_iocb::row_count"][::std::mem::offset_of!(gio_iocb, row_count) - 52usize];
    ["Offset of field: gio_iocb::bytes_max"][::std::mem::offset_of!(gio_iocb, bytes_max) - 56usize];
    ["Offset of field: gio_iocb::devices"][::std::mem::offset_of!(gio_iocb, devices) - 60usize];
    ["Offset of field: gio_iocb::wait"][::std::mem::offset_of!(gio_iocb, wait) - 64usize];
    ["Offset of field: gio_iocb::signal"][::std::mem::offset_of!(gio_iocb, signal) - 72usize];
    ["Offset of field: gio_iocb::wait_value"]
        [::std::mem::offset_of!(gio_iocb, wait_value) - 80usize];
    ["Offset of field: gio_iocb::signal_value"]
        [::std::mem::offset_of!(gio_iocb, signal_value) - 84usize];
    ["Offset of field: gio_iocb::errors"][::std::mem::offset_of!(gio_iocb, errors) - 88usize];
    ["Offset of field: gio_iocb::placement"][::std::mem::offset_of!(gio_iocb, placement) - 92usize];
    ["Offset of field: gio_iocb::error"][::std::mem::offset_of!(gio_iocb, error) - 96usize];
    ["Offset of field: gio_iocb::objects"][::std::mem::offset_of!(gio_iocb, objects) - 104usize];
    ["Offset of field: gio_iocb::checksums"]
        [::std::mem::offset_of!(gio_iocb, checksums) - 112usize];
    ["Offset of field: gio_iocb::reserved"][::std::mem::offset_of!(gio_iocb, reserved) - 120usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_progress {
    pub warps_left: u32,
    pub errors: u32,
    pub error: u64,
    pub objects: u64,
    pub reserved: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_progress"][::std::mem::size_of::<gio_progress>() - 32usize];
    ["Alignment of gio_progress"][::std::mem::align_of::<gio_progress>() - 8usize];
    ["Offset of field: gio_progress::warps_left"]
        [::std::mem::offset_of!(gio_progress, warps_left) - 0usize];
    ["Offset of field: gio_progress::errors"]
        [::std::mem::offset_of!(gio_progress, errors) - 4usize];
    ["Offset of field: gio_progress::error"][::std::mem::offset_of!(gio_progress, error) - 8usize];
    ["Offset of field: gio_progress::objects"]
        [::std::mem::offset_of!(gio_progress, objects) - 16usize];
    ["Offset of field: gio_progress::reserved"]
        [::std::mem::offset_of!(gio_progress, reserved) - 24usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_slot {
    pub generation: u16,
    pub state: u16,
    pub active: u8,
    pub count: u8,
    pub row: u16,
    pub first: u32,
    pub bytes: u32,
    pub since_ns: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_slot"][::std::mem::size_of::<gio_slot>() - 24usize];
    ["Alignment of gio_slot"][::std::mem::align_of::<gio_slot>() - 8usize];
    ["Offset of field: gio_slot::generation"]
        [::std::mem::offset_of!(gio_slot, generation) - 0usize];
    ["Offset of field: gio_slot::state"][::std::mem::offset_of!(gio_slot, state) - 2usize];
    ["Offset of field: gio_slot::active"][::std::mem::offset_of!(gio_slot, active) - 4usize];
    ["Offset of field: gio_slot::count"][::std::mem::offset_of!(gio_slot, count) - 5usize];
    ["Offset of field: gio_slot::row"][::std::mem::offset_of!(gio_slot, row) - 6usize];
    ["Offset of field: gio_slot::first"][::std::mem::offset_of!(gio_slot, first) - 8usize];
    ["Offset of field: gio_slot::bytes"][::std::mem::offset_of!(gio_slot, bytes) - 12usize];
    ["Offset of field: gio_slot::since_ns"][::std::mem::offset_of!(gio_slot, since_ns) - 16usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_active {
    pub iocb: u32,
    pub outstanding: u32,
    pub state: u32,
    pub errors: u32,
    pub error: u64,
    pub objects: u64,
    pub status: u64,
    pub opcode: u32,
    pub splits: u32,
    pub checksums: u64,
    pub ioctx: u64,
    pub row_base: u64,
    pub block_stride: u64,
    pub object_bytes: u32,
    pub count: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_active"][::std::mem::size_of::<gio_active>() - 88usize];
    ["Alignment of gio_active"][::std::mem::align_of::<gio_active>() - 8usize];
    ["Offset of field: gio_active::iocb"][::std::mem::offset_of!(gio_active, iocb) - 0usize];
    ["Offset of field: gio_active::outstanding"]
        [::std::mem::offset_of!(gio_active, outstanding) - 4usize];
    ["Offset of field: gio_active::state"][::std::mem::offset_of!(gio_active, state) - 8usize];
    ["Offset of field: gio_active::errors"][::std::mem::offset_of!(gio_active, errors) - 12usize];
    ["Offset of field: gio_active::error"][::std::mem::offset_of!(gio_active, error) - 16usize];
    ["Offset of field: gio_active::objects"][::std::mem::offset_of!(gio_active, objects) - 24usize];
    ["Offset of field: gio_active::status"][::std::mem::offset_of!(gio_active, status) - 32usize];
    ["Offset of field: gio_active::opcode"][::std::mem::offset_of!(gio_active, opcode) - 40usize];
    ["Offset of field: gio_active::splits"][::std::mem::offset_of!(gio_active, splits) - 44usize];
    ["Offset of field: gio_active::checksums"]
        [::std::mem::offset_of!(gio_active, checksums) - 48usize];
    ["Offset of field: gio_active::ioctx"][::std::mem::offset_of!(gio_active, ioctx) - 56usize];
    ["Offset of field: gio_active::row_base"]
        [::std::mem::offset_of!(gio_active, row_base) - 64usize];
    ["Offset of field: gio_active::block_stride"]
        [::std::mem::offset_of!(gio_active, block_stride) - 72usize];
    ["Offset of field: gio_active::object_bytes"]
        [::std::mem::offset_of!(gio_active, object_bytes) - 80usize];
    ["Offset of field: gio_active::count"][::std::mem::offset_of!(gio_active, count) - 84usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_op {
    pub iocb: gio_iocb,
    pub pool: gio_pool,
    pub lbas: u64,
    pub data_lba: u64,
    pub row_iova: u64,
    pub pad_iova: u64,
    pub pad_type: u32,
    pub affine: u32,
    pub invalid: u32,
    pub rows: u32,
    pub row: u32,
    pub row_class: u32,
    pub begin: u32,
    pub end: u32,
    pub split_bytes: u32,
    pub splits: u32,
    pub merge: u32,
    pub boundary_lbas: u32,
    pub slot_lbas: u32,
    pub group_slots: u32,
    pub prp: u32,
    pub page_bytes: u32,
    pub lba_shift: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_op"][::std::mem::size_of::<gio_op>() - 312usize];
    ["Alignment of gio_op"][::std::mem::align_of::<gio_op>() - 8usize];
    ["Offset of field: gio_op::iocb"][::std::mem::offset_of!(gio_op, iocb) - 0usize];
    ["Offset of field: gio_op::pool"][::std::mem::offset_of!(gio_op, pool) - 128usize];
    ["Offset of field: gio_op::lbas"][::std::mem::offset_of!(gio_op, lbas) - 208usize];
    ["Offset of field: gio_op::data_lba"][::std::mem::offset_of!(gio_op, data_lba) - 216usize];
    ["Offset of field: gio_op::row_iova"][::std::mem::offset_of!(gio_op, row_iova) - 224usize];
    ["Offset of field: gio_op::pad_iova"][::std::mem::offset_of!(gio_op, pad_iova) - 232usize];
    ["Offset of field: gio_op::pad_type"][::std::mem::offset_of!(gio_op, pad_type) - 240usize];
    ["Offset of field: gio_op::affine"][::std::mem::offset_of!(gio_op, affine) - 244usize];
    ["Offset of field: gio_op::invalid"][::std::mem::offset_of!(gio_op, invalid) - 248usize];
    ["Offset of field: gio_op::rows"][::std::mem::offset_of!(gio_op, rows) - 252usize];
    ["Offset of field: gio_op::row"][::std::mem::offset_of!(gio_op, row) - 256usize];
    ["Offset of field: gio_op::row_class"][::std::mem::offset_of!(gio_op, row_class) - 260usize];
    ["Offset of field: gio_op::begin"][::std::mem::offset_of!(gio_op, begin) - 264usize];
    ["Offset of field: gio_op::end"][::std::mem::offset_of!(gio_op, end) - 268usize];
    ["Offset of field: gio_op::split_bytes"]
        [::std::mem::offset_of!(gio_op, split_bytes) - 272usize];
    ["Offset of field: gio_op::splits"][::std::mem::offset_of!(gio_op, splits) - 276usize];
    ["Offset of field: gio_op::merge"][::std::mem::offset_of!(gio_op, merge) - 280usize];
    ["Offset of field: gio_op::boundary_lbas"]
        [::std::mem::offset_of!(gio_op, boundary_lbas) - 284usize];
    ["Offset of field: gio_op::slot_lbas"][::std::mem::offset_of!(gio_op, slot_lbas) - 288usize];
    ["Offset of field: gio_op::group_slots"]
        [::std::mem::offset_of!(gio_op, group_slots) - 292usize];
    ["Offset of field: gio_op::prp"][::std::mem::offset_of!(gio_op, prp) - 296usize];
    ["Offset of field: gio_op::page_bytes"][::std::mem::offset_of!(gio_op, page_bytes) - 300usize];
    ["Offset of field: gio_op::lba_shift"][::std::mem::offset_of!(gio_op, lba_shift) - 304usize];
    ["Offset of field: gio_op::reserved"][::std::mem::offset_of!(gio_op, reserved) - 308usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_warp {
    pub sq: u64,
    pub cq: u64,
    pub sq_doorbell: u64,
    pub cq_doorbell: u64,
    pub descriptors: u64,
    pub descriptors_iova: u64,
    pub slots: u64,
    pub free_slots: u64,
    pub descriptor_bytes: u32,
    pub depth_log2: u32,
    pub nsid: u32,
    pub lba_shift: u32,
    pub lbas: u64,
    pub transfer_bytes_max: u32,
    pub descriptor_mode: u32,
    pub page_bytes: u32,
    pub bit_bucket: u32,
    pub qid: u32,
    pub device: u32,
    pub part: u32,
    pub parts: u32,
    pub boundary_lbas: u32,
    pub placements: u32,
    pub sq_tail: u32,
    pub cq_head: u32,
    pub ring_head: u32,
    pub free_count: u32,
    pub outstanding: u32,
    pub cursor_active: u32,
    pub cursor_row: u32,
    pub cursor_at: u32,
    pub fault: u32,
    pub quarantined: u32,
    pub swept_ns: u64,
    pub idle_ns: u64,
    pub commands: u64,
    pub objects: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub sq_doorbells: u64,
    pub cq_doorbells: u64,
    pub errors: u64,
    pub late: u64,
    pub active: [gio_active; 8usize],
    pub op: gio_op,
    pub placement_ids: [u16; 8usize],
    pub waiting_ns: u64,
    pub waited_ns: u64,
    pub window: u32,
    pub checked: u32,
    pub reserved: [u64; 5usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_warp"][::std::mem::size_of::<gio_warp>() - 1344usize];
    ["Alignment of gio_warp"][::std::mem::align_of::<gio_warp>() - 8usize];
    ["Offset of field: gio_warp::sq"][::std::mem::offset_of!(gio_warp, sq) - 0usize];
    ["Offset of field: gio_warp::cq"][::std::mem::offset_of!(gio_warp, cq) - 8usize];
    ["Offset of field: gio_warp::sq_doorbell"]
        [::std::mem::offset_of!(gio_warp, sq_doorbell) - 16usize];
    ["Offset of field: gio_warp::cq_doorbell"]
        [::std::mem::offset_of!(gio_warp, cq_doorbell) - 24usize];
    ["Offset of field: gio_warp::descriptors"]
        [::std::mem::offset_of!(gio_warp, descriptors) - 32usize];
    ["Offset of field: gio_warp::descriptors_iova"]
        [::std::mem::offset_of!(gio_warp, descriptors_iova) - 40usize];
    ["Offset of field: gio_warp::slots"][::std::mem::offset_of!(gio_warp, slots) - 48usize];
    ["Offset of field: gio_warp::free_slots"]
        [::std::mem::offset_of!(gio_warp, free_slots) - 56usize];
    ["Offset of field: gio_warp::descriptor_bytes"]
        [::std::mem::offset_of!(gio_warp, descriptor_bytes) - 64usize];
    ["Offset of field: gio_warp::depth_log2"]
        [::std::mem::offset_of!(gio_warp, depth_log2) - 68usize];
    ["Offset of field: gio_warp::nsid"][::std::mem::offset_of!(gio_warp, nsid) - 72usize];
    ["Offset of field: gio_warp::lba_shift"][::std::mem::offset_of!(gio_warp, lba_shift) - 76usize];
    ["Offset of field: gio_warp::lbas"][::std::mem::offset_of!(gio_warp, lbas) - 80usize];
    ["Offset of field: gio_warp::transfer_bytes_max"]
        [::std::mem::offset_of!(gio_warp, transfer_bytes_max) - 88usize];
    ["Offset of field: gio_warp::descriptor_mode"]
        [::std::mem::offset_of!(gio_warp, descriptor_mode) - 92usize];
    ["Offset of field: gio_warp::page_bytes"]
        [::std::mem::offset_of!(gio_warp, page_bytes) - 96usize];
    ["Offset of field: gio_warp::bit_bucket"]
        [::std::mem::offset_of!(gio_warp, bit_bucket) - 100usize];
    ["Offset of field: gio_warp::qid"][::std::mem::offset_of!(gio_warp, qid) - 104usize];
    ["Offset of field: gio_warp::device"][::std::mem::offset_of!(gio_warp, device) - 108usize];
    ["Offset of field: gio_warp::part"][::std::mem::offset_of!(gio_warp, part) - 112usize];
    ["Offset of field: gio_warp::parts"][::std::mem::offset_of!(gio_warp, parts) - 116usize];
    ["Offset of field: gio_warp::boundary_lbas"]
        [::std::mem::offset_of!(gio_warp, boundary_lbas) - 120usize];
    ["Offset of field: gio_warp::placements"]
        [::std::mem::offset_of!(gio_warp, placements) - 124usize];
    ["Offset of field: gio_warp::sq_tail"][::std::mem::offset_of!(gio_warp, sq_tail) - 128usize];
    ["Offset of field: gio_warp::cq_head"][::std::mem::offset_of!(gio_warp, cq_head) - 132usize];
    ["Offset of field: gio_warp::ring_head"]
        [::std::mem::offset_of!(gio_warp, ring_head) - 136usize];
    ["Offset of field: gio_warp::free_count"]
        [::std::mem::offset_of!(gio_warp, free_count) - 140usize];
    ["Offset of field: gio_warp::outstanding"]
        [::std::mem::offset_of!(gio_warp, outstanding) - 144usize];
    ["Offset of field: gio_warp::cursor_active"]
        [::std::mem::offset_of!(gio_warp, cursor_active) - 148usize];
    ["Offset of field: gio_warp::cursor_row"]
        [::std::mem::offset_of!(gio_warp, cursor_row) - 152usize];
    ["Offset of field: gio_warp::cursor_at"]
        [::std::mem::offset_of!(gio_warp, cursor_at) - 156usize];
    ["Offset of field: gio_warp::fault"][::std::mem::offset_of!(gio_warp, fault) - 160usize];
    ["Offset of field: gio_warp::quarantined"]
        [::std::mem::offset_of!(gio_warp, quarantined) - 164usize];
    ["Offset of field: gio_warp::swept_ns"][::std::mem::offset_of!(gio_warp, swept_ns) - 168usize];
    ["Offset of field: gio_warp::idle_ns"][::std::mem::offset_of!(gio_warp, idle_ns) - 176usize];
    ["Offset of field: gio_warp::commands"][::std::mem::offset_of!(gio_warp, commands) - 184usize];
    ["Offset of field: gio_warp::objects"][::std::mem::offset_of!(gio_warp, objects) - 192usize];
    ["Offset of field: gio_warp::bytes_read"]
        [::std::mem::offset_of!(gio_warp, bytes_read) - 200usize];
    ["Offset of field: gio_warp::bytes_written"]
        [::std::mem::offset_of!(gio_warp, bytes_written) - 208usize];
    ["Offset of field: gio_warp::sq_doorbells"]
        [::std::mem::offset_of!(gio_warp, sq_doorbells) - 216usize];
    ["Offset of field: gio_warp::cq_doorbells"]
        [::std::mem::offset_of!(gio_warp, cq_doorbells) - 224usize];
    ["Offset of field: gio_warp::errors"][::std::mem::offset_of!(gio_warp, errors) - 232usize];
    ["Offset of field: gio_warp::late"][::std::mem::offset_of!(gio_warp, late) - 240usize];
    ["Offset of field: gio_warp::active"][::std::mem::offset_of!(gio_warp, active) - 248usize];
    ["Offset of field: gio_warp::op"][::std::mem::offset_of!(gio_warp, op) - 952usize];
    ["Offset of field: gio_warp::placement_ids"]
        [::std::mem::offset_of!(gio_warp, placement_ids) - 1264usize];
    ["Offset of field: gio_warp::waiting_ns"]
        [::std::mem::offset_of!(gio_warp, waiting_ns) - 1280usize];
    ["Offset of field: gio_warp::waited_ns"]
        [::std::mem::offset_of!(gio_warp, waited_ns) - 1288usize];
    ["Offset of field: gio_warp::window"][::std::mem::offset_of!(gio_warp, window) - 1296usize];
    ["Offset of field: gio_warp::checked"][::std::mem::offset_of!(gio_warp, checked) - 1300usize];
    ["Offset of field: gio_warp::reserved"][::std::mem::offset_of!(gio_warp, reserved) - 1304usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_relay {
    pub lock: u32,
    pub head: u32,
    pub reached: u32,
    pub wait_value: u32,
    pub wait: u64,
    pub stop: u64,
    pub left: u64,
    pub closed: u32,
    pub failed: u32,
    pub reserved: [u32; 20usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_relay"][::std::mem::size_of::<gio_relay>() - 128usize];
    ["Alignment of gio_relay"][::std::mem::align_of::<gio_relay>() - 8usize];
    ["Offset of field: gio_relay::lock"][::std::mem::offset_of!(gio_relay, lock) - 0usize];
    ["Offset of field: gio_relay::head"][::std::mem::offset_of!(gio_relay, head) - 4usize];
    ["Offset of field: gio_relay::reached"][::std::mem::offset_of!(gio_relay, reached) - 8usize];
    ["Offset of field: gio_relay::wait_value"]
        [::std::mem::offset_of!(gio_relay, wait_value) - 12usize];
    ["Offset of field: gio_relay::wait"][::std::mem::offset_of!(gio_relay, wait) - 16usize];
    ["Offset of field: gio_relay::stop"][::std::mem::offset_of!(gio_relay, stop) - 24usize];
    ["Offset of field: gio_relay::left"][::std::mem::offset_of!(gio_relay, left) - 32usize];
    ["Offset of field: gio_relay::closed"][::std::mem::offset_of!(gio_relay, closed) - 40usize];
    ["Offset of field: gio_relay::failed"][::std::mem::offset_of!(gio_relay, failed) - 44usize];
    ["Offset of field: gio_relay::reserved"][::std::mem::offset_of!(gio_relay, reserved) - 48usize];
};
#[repr(C)]
#[derive(
    Debug,
    Default,
    Copy,
    Clone,
    PartialEq,
    Eq,
    zerocopy :: FromBytes,
    zerocopy :: IntoBytes,
    zerocopy :: Immutable,
)]
pub struct gio_args {
    pub warps: u64,
    pub iocbs: u64,
    pub progress: u64,
    pub sq_ring: u64,
    pub cq_ring: u64,
    pub cq_tail: u64,
    pub stop: u64,
    pub relay: u64,
    pub exited: u64,
    pub clock: u64,
    pub timeout_ns: u64,
    pub event_timeout_ns: u64,
    pub linger_ns: u64,
    pub launch: u64,
    pub warp_count: u32,
    pub ring_mask: u32,
    pub rounds: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of gio_args"][::std::mem::size_of::<gio_args>() - 128usize];
    ["Alignment of gio_args"][::std::mem::align_of::<gio_args>() - 8usize];
    ["Offset of field: gio_args::warps"][::std::mem::offset_of!(gio_args, warps) - 0usize];
    ["Offset of field: gio_args::iocbs"][::std::mem::offset_of!(gio_args, iocbs) - 8usize];
    ["Offset of field: gio_args::progress"][::std::mem::offset_of!(gio_args, progress) - 16usize];
    ["Offset of field: gio_args::sq_ring"][::std::mem::offset_of!(gio_args, sq_ring) - 24usize];
    ["Offset of field: gio_args::cq_ring"][::std::mem::offset_of!(gio_args, cq_ring) - 32usize];
    ["Offset of field: gio_args::cq_tail"][::std::mem::offset_of!(gio_args, cq_tail) - 40usize];
    ["Offset of field: gio_args::stop"][::std::mem::offset_of!(gio_args, stop) - 48usize];
    ["Offset of field: gio_args::relay"][::std::mem::offset_of!(gio_args, relay) - 56usize];
    ["Offset of field: gio_args::exited"][::std::mem::offset_of!(gio_args, exited) - 64usize];
    ["Offset of field: gio_args::clock"][::std::mem::offset_of!(gio_args, clock) - 72usize];
    ["Offset of field: gio_args::timeout_ns"]
        [::std::mem::offset_of!(gio_args, timeout_ns) - 80usize];
    ["Offset of field: gio_args::event_timeout_ns"]
        [::std::mem::offset_of!(gio_args, event_timeout_ns) - 88usize];
    ["Offset of field: gio_args::linger_ns"][::std::mem::offset_of!(gio_args, linger_ns) - 96usize];
    ["Offset of field: gio_args::launch"][::std::mem::offset_of!(gio_args, launch) - 104usize];
    ["Offset of field: gio_args::warp_count"]
        [::std::mem::offset_of!(gio_args, warp_count) - 112usize];
    ["Offset of field: gio_args::ring_mask"]
        [::std::mem::offset_of!(gio_args, ring_mask) - 116usize];
    ["Offset of field: gio_args::rounds"][::std::mem::offset_of!(gio_args, rounds) - 120usize];
    ["Offset of field: gio_args::reserved"][::std::mem::offset_of!(gio_args, reserved) - 124usize];
};
