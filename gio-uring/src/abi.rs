//! What host code and the I/O kernel write into each other's memory: the Rust half of
//! `kernels/include/gio/abi.h`, which documents it.
//!
//! bindgen makes it, with assertions of every size and offset; `cargo xtask abi` does so anew.
//! Every address is one that the kernel dereferences, unless its name ends in `_iova`.

#[allow(
    clippy::all,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    dead_code,
    missing_docs,
    non_camel_case_types,
    rustdoc::all,
    reason = "bindgen's words, and the header's"
)]
mod generated;

pub use generated::{
    GIO_DESC_PRP as DESC_PRP, GIO_DESC_SGL as DESC_SGL, GIO_FAULT_CID as FAULT_CID,
    GIO_FAULT_EVENT as FAULT_EVENT, GIO_FAULT_NONE as FAULT_NONE, GIO_FAULT_SQHD as FAULT_SQHD,
    GIO_FAULT_SQID as FAULT_SQID, GIO_FAULT_TIMEOUT as FAULT_TIMEOUT, GIO_FLAG_FUA as FLAG_FUA,
    GIO_IOCTX_MAX as IOCTX_MAX, GIO_KIND_AFFINE as KIND_AFFINE, GIO_KIND_EXPLICIT as KIND_EXPLICIT,
    GIO_OP_READ as OP_READ, GIO_OP_WRITE as OP_WRITE, GIO_STATUS_CANCELLED as STATUS_CANCELLED,
    GIO_STATUS_CHECKSUM as STATUS_CHECKSUM, GIO_STATUS_FAULT as STATUS_FAULT,
    GIO_STATUS_INVALID as STATUS_INVALID, GIO_STATUS_NVME as STATUS_NVME,
    GIO_STATUS_OK as STATUS_OK, GIO_STATUS_TIMEOUT as STATUS_TIMEOUT, gio_active as Active,
    gio_affine as Affine, gio_args as Args, gio_iocb as Iocb, gio_ioctx as IoCtx, gio_op as Op,
    gio_pool as Pool, gio_progress as OpProgress, gio_slot as Slot, gio_warp as Warp,
};

/// Operations that one warp may have in progress.
pub const WINDOW: usize = generated::GIO_WINDOW as usize;
