//! Arguments of callers: plain data, with the attributes of the classes in `ripieno/__init__.py`.

#![allow(unsafe_code, reason = "describes memory that a Python object owns, by its address")]

use std::{ptr::NonNull, sync::Arc, time::Duration};

use nvme_driver::{DevicePtr, Nanos};
use objstore::{
    BlockId, BlockKey, DramMode, DramStats, KvShape, Overwrite, RankId, StoreEvent, StoreId,
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict},
};
use ripieno_stack::{
    CudaChoice, EngineMemory, Executor, GpuMemory, PoolLayout, PoolMemory, RankMedia, RawStream,
    Route,
};

use crate::error::{invalid, refused};

/// Bytes of a key.
const KEY_BYTES: usize = 32;

/// `ripieno.Shape`.
#[derive(FromPyObject)]
pub(crate) struct Shape {
    layers: u32,
    segments: u32,
    object_bytes: u32,
    block_tokens: u32,
}

impl Shape {
    pub(crate) fn check(&self) -> PyResult<KvShape> {
        let Self { layers, segments, object_bytes, block_tokens } = *self;
        let shape = KvShape { layers, segments, object_bytes, block_tokens };
        shape.validate().map_err(|error| invalid(format!("shape: {error}")))?;
        Ok(shape)
    }
}

/// `ripieno.Namespace`.
#[derive(FromPyObject)]
pub(crate) struct Namespace {
    weights: Vec<u8>,
    layout: String,
    dtype: String,
    block_tokens: u32,
    adapter: String,
    tenant_salt: Vec<u8>,
    label: String,
}

impl Namespace {
    pub(crate) fn check(self) -> PyResult<objstore::Namespace> {
        let Self { weights, layout, dtype, block_tokens, adapter, tenant_salt, label } = self;
        let weights = match weights.len() {
            0 => [0; 32],
            found => weights.try_into().map_err(|_| {
                invalid(format!("namespace.weights has {found} bytes; give a digest of 32"))
            })?,
        };
        Ok(objstore::Namespace {
            weights,
            layout,
            dtype,
            block_tokens,
            adapter,
            tenant_salt,
            label,
        })
    }
}

/// `ripieno.Pool`.
#[derive(FromPyObject)]
pub(crate) struct Pool {
    address: usize,
    length: usize,
    rows: Vec<u64>,
    block_stride: u64,
    blocks: u32,
    owner: Py<PyAny>,
    device: String,
}

impl Pool {
    pub(crate) fn memory(self) -> PyResult<PoolMemory> {
        let Self { address, length, rows, block_stride, blocks, owner, device } = self;
        let base = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address));
        let base = base.ok_or_else(|| invalid("pool.address is 0"))?;
        let layout = PoolLayout { rows, block_stride, blocks };
        if device != "cpu" {
            let ordinal = device.strip_prefix("cuda:").and_then(|number| number.parse().ok());
            let ordinal = ordinal.ok_or_else(|| {
                invalid(format!(
                    "pool.device is {device}; give cpu, or cuda:0 with the GPU's number"
                ))
            })?;
            let base = DevicePtr(address as u64);
            // SAFETY: the documentation of ripieno.Pool requires the memory to exist as long as its
            // owner does, in the GPU's primary context.
            let memory = unsafe { GpuMemory::new(base, length, ordinal, Arc::new(owner)) };
            return Ok(PoolMemory::Gpu { memory, layout });
        }
        // SAFETY: the documentation of ripieno.Pool requires the memory to exist as long as its
        // owner does. Python code has no Rust references into it.
        let memory = unsafe { EngineMemory::new(base, length, Arc::new(owner)) };
        Ok(PoolMemory::Engine { memory, layout })
    }
}

/// Returns the I/O kernel's executor: the one asked for, or the one that suits the pool.
pub(crate) fn executor(
    name: Option<&str>,
    io_sms: Option<u32>,
    pool: &PoolMemory,
) -> PyResult<Executor> {
    let on = match pool {
        PoolMemory::Gpu { memory, .. } => Some(memory.ordinal()),
        _ => None,
    };
    let gpu = match name {
        None => on,
        Some("host") => None,
        Some("cuda") => Some(on.unwrap_or(0)),
        Some(other) => return Err(invalid(format!("executor is {other}; give host or cuda"))),
    };
    match (gpu, io_sms) {
        (None, None) => Ok(Executor::Host),
        (None, Some(_)) => Err(invalid("io_sms was given, and only executor cuda has SMs")),
        (Some(ordinal), io_sms) => {
            let io_sms = io_sms.unwrap_or(CudaChoice::IO_SMS);
            Ok(Executor::Cuda(CudaChoice { io_sms, ..CudaChoice::new(ordinal) }))
        }
    }
}

/// Parses the `dram_mode` option, which selects the blocks kept in host memory.
pub(crate) fn dram_mode(name: &str) -> PyResult<DramMode> {
    name.parse().map_err(|why: String| invalid(format!("dram_mode: {why}")))
}

/// Parses the required data path, if any.
pub(crate) fn route(name: Option<&str>) -> PyResult<Option<Route>> {
    name.map(str::parse).transpose().map_err(|why: String| invalid(format!("require: {why}")))
}

/// Wraps the handle of a CUDA stream.
pub(crate) fn stream(handle: u64) -> RawStream {
    // SAFETY: the documentation of ripieno.Plane requires a stream of the pool's GPU that is not
    // destroyed before the plane is closed.
    unsafe { RawStream::new(handle) }
}

/// Media of the ranks' data: a number of files each, or the names of drives.
#[derive(FromPyObject)]
pub(crate) enum Devices {
    Files(u32),
    Drives(Vec<String>),
}

impl Devices {
    pub(crate) fn media(self, capacity: Option<u64>, overwrite: &str) -> PyResult<RankMedia> {
        let overwrite = match overwrite {
            "nothing" => Overwrite::Nothing,
            "store" => Overwrite::Store,
            "anything" => Overwrite::Anything,
            other => {
                let why = format!("overwrite is {other}; give nothing, store or anything");
                return Err(invalid(why));
            }
        };
        match self {
            Self::Files(count) => {
                let bytes =
                    capacity.ok_or_else(|| invalid("capacity: files need a size in bytes"))?;
                Ok(RankMedia::Files { bytes, count, lba_bytes: 4096 })
            }
            Self::Drives(names) => {
                let address = |name: String| {
                    let address = name.strip_prefix("vfio:").and_then(|text| text.parse().ok());
                    address.ok_or_else(|| {
                        invalid(format!("devices: {name} is no drive; give vfio:0000:65:00.0"))
                    })
                };
                let addresses = names.into_iter().map(address).collect::<PyResult<_>>()?;
                Ok(RankMedia::Drives { addresses, bytes: capacity, overwrite })
            }
        }
    }
}

/// Parses keys: a sequence of 32 bytes each, or all of them concatenated.
pub(crate) fn keys(given: &Bound<'_, PyAny>) -> PyResult<Vec<BlockKey>> {
    let key = |bytes: &[u8]| match bytes.try_into() {
        Ok(key) => Ok(BlockKey(key)),
        Err(_) => Err(invalid(format!(
            "a key of {} bytes was given; keys are digests of {KEY_BYTES} bytes",
            bytes.len()
        ))),
    };
    if let Ok(all) = given.cast::<PyBytes>() {
        return all.as_bytes().chunks(KEY_BYTES).map(key).collect();
    }
    let mut keys = Vec::with_capacity(given.len().unwrap_or(0));
    for item in given.try_iter()? {
        keys.push(key(item?.cast::<PyBytes>()?.as_bytes())?);
    }
    Ok(keys)
}

pub(crate) fn blocks(given: Vec<u32>) -> Vec<BlockId> {
    given.into_iter().map(BlockId).collect()
}

/// Parses checksums: 4 bytes each, little-endian.
pub(crate) fn words(bytes: &[u8]) -> PyResult<Vec<u32>> {
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(invalid(format!("{} bytes are no checksums of 4 bytes each", bytes.len())));
    }
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

pub(crate) fn word_bytes<'py>(py: Python<'py>, words: &[u32]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    PyBytes::new(py, &bytes)
}

/// Returns a rank's identity, which opens its plane, as plain data that can be sent in any way.
pub(crate) fn rank_dict(py: Python<'_>, id: RankId) -> PyResult<Bound<'_, PyDict>> {
    let RankId { store, rank, ranks, files } = id;
    let dict = PyDict::new(py);
    dict.set_item("store", u128::from_be_bytes(store.0).to_string())?;
    dict.set_item("rank", rank)?;
    dict.set_item("ranks", ranks)?;
    dict.set_item("files", files)?;
    Ok(dict)
}

/// A dict returned by [`rank_dict`].
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Rank {
    store: String,
    rank: u32,
    ranks: u32,
    files: u32,
}

impl Rank {
    pub(crate) fn check(self) -> PyResult<RankId> {
        let Self { store, rank, ranks, files } = self;
        let number: u128 = store.parse().map_err(|_| invalid("rank.store is no store's number"))?;
        Ok(RankId { store: StoreId(number.to_be_bytes()), rank, ranks, files })
    }
}

/// Converts device events into Python values.
pub(crate) fn events(events: &[StoreEvent]) -> Vec<(u32, &'static str)> {
    events.iter().map(|StoreEvent { device, event }| (device.0, event.name())).collect()
}

/// Adds the counters of the host memory tier to `dict`.
pub(crate) fn dram_items(dict: &Bound<'_, PyDict>, dram: &DramStats) -> PyResult<()> {
    dict.set_item("dram_hits", dram.hits)?;
    dict.set_item("dram_misses", dram.misses)?;
    dict.set_item("dram_retrieved_bytes", dram.retrieved_bytes)?;
    dict.set_item("dram_blocks", dram.blocks)?;
    dict.set_item("dram_evictions", dram.evictions)?;
    dict.set_item("dram_prefetched_bytes", dram.prefetched_bytes)?;
    dict.set_item("dram_wasted_bytes", dram.wasted_bytes)
}

/// Parses a time in seconds.
pub(crate) fn seconds(name: &str, given: f64) -> PyResult<Nanos> {
    let time = Duration::try_from_secs_f64(given).ok();
    let nanos = time.and_then(|time| u64::try_from(time.as_nanos()).ok());
    nanos.map(Nanos).ok_or_else(|| invalid(format!("{name} is {given}; give seconds from 0 on")))
}

/// Returns random bytes from the operating system.
pub(crate) fn random() -> PyResult<[u8; 16]> {
    let mut bytes = [0; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => Ok(bytes),
        other => Err(crate::error::DeviceError::new_err(format!("no random numbers: {other:?}"))),
    }
}

/// Takes a lock even if a panic poisoned it.
pub(crate) fn unpoisoned<T>(lock: Result<T, std::sync::PoisonError<T>>) -> T {
    lock.unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Applies [`refused`] to results.
pub(crate) trait OrRaise<T> {
    /// Converts the error into its exception.
    fn or_raise(self) -> PyResult<T>;
}

impl<T, E: Into<ripieno_stack::StackError>> OrRaise<T> for Result<T, E> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(refused)
    }
}
