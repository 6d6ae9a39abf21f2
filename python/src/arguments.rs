//! Arguments of callers: plain data, with the attributes of the classes in `ripieno/__init__.py`.

#![allow(unsafe_code, reason = "describes memory that a Python object owns, by its address")]

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    ptr::NonNull,
    sync::Arc,
    time::Duration,
};

use nvme_driver::{DevicePtr, Nanos};
use objstore::{BlockId, BlockKey, KvShape, Layer, PinAnswer, RankId, StoreEvent, StoreId};
use pyo3::{
    prelude::*,
    types::{PyBool, PyBytes, PyDict, PyList, PyTuple},
};
use ripieno_serve::{Client, ServeError, protocol::Member};
use ripieno_stack::{
    DeviceChoice, EngineMemory, GpuMemory, OPTIONS, PoolLayout, PoolMemory, RankMedia, RawStream,
    SampleValue, Size, StackConfig, unknown_option,
};
use serde::Serialize;

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
    file: Option<i32>,
}

impl Pool {
    pub(crate) fn memory(self) -> PyResult<PoolMemory> {
        let Self { address, length, rows, block_stride, blocks, owner, device, file: _ } = self;
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

impl Pool {
    /// Returns the memory as a server shares it.
    pub(crate) fn shared(self) -> PyResult<SharedPool> {
        if self.device != "cpu" {
            return match self.memory()? {
                PoolMemory::Gpu { memory, layout } => Ok(SharedPool::Gpu(layout, memory)),
                _ => Err(invalid("pool.device: a server shares memory of the host or of a GPU")),
            };
        }
        let Self { rows, block_stride, blocks, file, .. } = self;
        let none = || invalid("pool.file is None; a server needs memory of a SharedMemory");
        let file = file.filter(|file| *file >= 0).ok_or_else(none)?;
        // SAFETY: the descriptor is open during this call: `ripieno.Pool` requires it.
        let file = unsafe { BorrowedFd::borrow_raw(file) }.try_clone_to_owned();
        let file = file.map_err(|error| invalid(format!("pool.file: {error}")))?;
        Ok(SharedPool::Host(PoolLayout { rows, block_stride, blocks }, file))
    }
}

/// Memory that a server shares.
pub(crate) enum SharedPool {
    Host(PoolLayout, OwnedFd),
    Gpu(PoolLayout, GpuMemory),
}

impl SharedPool {
    /// Connects to a server.
    pub(crate) fn join(
        self,
        socket: PathBuf,
        shape: KvShape,
        member: Option<Member>,
    ) -> Result<Client, ServeError> {
        let client = match self {
            Self::Host(layout, file) => Client::join(socket, shape, member, Some((layout, file)))?,
            Self::Gpu(layout, memory) => Client::join_gpu(socket, shape, member, layout, memory)?,
        };
        client.check_pages()?;
        Ok(client)
    }
}

/// Returns the options of a store in a directory from a caller's keywords; `None` is the default.
pub(crate) fn config(path: PathBuf, options: Option<&Bound<'_, PyDict>>) -> PyResult<StackConfig> {
    let mut config = StackConfig::at(path);
    for (name, value) in options.into_iter().flatten() {
        if !value.is_none() {
            config.set(&name.extract::<String>()?, &text(&value)?).map_err(invalid)?;
        }
    }
    Ok(config)
}

/// Returns the text of an option's value.
fn text(value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(flag) = value.cast::<PyBool>() {
        return Ok(flag.is_true().to_string());
    }
    let list = value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>();
    match list {
        true => Ok(value.extract::<Vec<String>>()?.join(",")),
        false => Ok(value.str()?.to_string()),
    }
}

/// Checks options of a store, by name, as Store and Plane do. beside: further names that are known
/// where they were given, for the error about an unknown one.
#[pyfunction]
#[pyo3(signature = (options, beside = Vec::new()))]
pub fn check_options(options: &Bound<'_, PyDict>, beside: Vec<String>) -> PyResult<()> {
    for name in options.keys() {
        let name = name.extract::<String>()?;
        if !OPTIONS.iter().any(|option| option.name == name) {
            return Err(invalid(unknown_option(&name, &beside)));
        }
    }
    config(PathBuf::new(), Some(options)).map(|_| ())
}

/// Returns the bytes of a size: a number of bytes, or text such as "64MiB". name: what it is the
/// size of, for the error.
#[pyfunction]
#[pyo3(signature = (size, name = "size"))]
pub fn parse_size(size: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    text(size)?.parse().map(|Size(bytes)| bytes).map_err(|why| {
        let given = size.repr().map(|given| given.to_string()).unwrap_or_default();
        invalid(format!("{name}: {given} was given; {why}"))
    })
}

/// Wraps the handle of a CUDA stream.
pub(crate) fn stream(handle: u64) -> RawStream {
    // SAFETY: the documentation of ripieno.Plane requires a stream of the pool's GPU that is not
    // destroyed before the plane is closed.
    unsafe { RawStream::new(handle) }
}

/// Returns the media of the ranks' data.
pub(crate) fn media(config: StackConfig) -> PyResult<RankMedia> {
    let StackConfig { devices, capacity, lba, overwrite, .. } = config;
    match devices.unwrap_or(DeviceChoice::Files(1)) {
        DeviceChoice::Files(count) => {
            let missing = || invalid("capacity: files need a size, such as 100GiB");
            let bytes = capacity.ok_or_else(missing)?;
            Ok(RankMedia::Files { bytes, count, lba_bytes: lba.unwrap_or(4096) })
        }
        DeviceChoice::Drives(addresses) => {
            let overwrite = overwrite.unwrap_or_default();
            Ok(RankMedia::Drives { addresses, bytes: capacity, overwrite })
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

/// Outcome, reason and number of a pin.
pub(crate) type Pinned = (&'static str, Option<String>, Option<u64>);

pub(crate) fn pinned(PinAnswer { outcome, reason, pin }: PinAnswer) -> Pinned {
    (outcome.word(), reason, pin.map(|pin| pin.pin))
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

/// Returns an object of a dataclass of `ripieno`: fields of a value with the same names, and
/// further ones.
macro_rules! dataclass {
    (
        $py:expr, $class:literal, $from:expr, [$($field:ident),+] $(, $name:ident = $value:expr)*
    ) => {{
        let fields = pyo3::types::PyDict::new($py);
        $(fields.set_item(stringify!($field), $from.$field)?;)+
        $(fields.set_item(stringify!($name), $value)?;)*
        $py.import("ripieno")?.getattr($class)?.call((), Some(&fields))
    }};
}
pub(crate) use dataclass;

/// Returns a dataclass of `ripieno` from counts with the same fields.
pub(crate) fn counts<'py>(
    py: Python<'py>,
    class: &str,
    counts: impl Serialize,
) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    let all = serde_json::to_value(counts).expect("numbers");
    for (name, value) in all.as_object().expect("a struct") {
        fields.set_item(name, value.as_u64())?;
    }
    py.import("ripieno")?.getattr(class)?.call((), Some(&fields))
}

/// Returns samples as a dict.
pub(crate) fn samples(
    py: Python<'_>,
    samples: Vec<(String, SampleValue)>,
) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    for (name, value) in samples {
        match value {
            SampleValue::Count(count) => all.set_item(name, count)?,
            SampleValue::Seconds(_) => all.set_item(name, f64::from(value))?,
        }
    }
    Ok(all)
}

/// Checks the number of a layer.
pub(crate) fn layer(layer: u32, layers: u32) -> PyResult<Layer> {
    if layer >= layers {
        return Err(invalid(format!("layer {layer} was given; there are {layers}")));
    }
    Ok(Layer(layer))
}

/// Returns a `ripieno.RankId`.
pub(crate) fn rank_id(py: Python<'_>, id: RankId) -> PyResult<Bound<'_, PyAny>> {
    let store = u128::from_be_bytes(id.store.0).to_string();
    dataclass!(py, "RankId", id, [rank, ranks, files], store = store)
}

/// `ripieno.RankId`.
#[derive(FromPyObject)]
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
