//! Configuration of a store: structs that begin with their size.

#![allow(unsafe_code, reason = "the C interface: reads what callers point to, and calls back")]

use std::{
    ffi::{CStr, OsStr, c_char, c_int, c_void},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::PathBuf,
    ptr::NonNull,
    sync::Arc,
};

use objstore::KvShape;
use ripieno_stack::{EngineMemory, PoolLayout, PoolMemory, StackConfig, expand_home};

use crate::status::{Failure, Status};

/// Shape of a KV block. An object is the data of one layer and segment for the tokens of one block.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Layers of the model.
    pub layers: u32,
    /// Objects of a layer: 2 if K and V are separate tensors, 1 if they are one (MLA).
    pub segments: u32,
    /// Bytes of an object.
    pub object_bytes: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// The engine's KV memory. The object of block b in layer l and segment s is at
/// base + rows[l * segments + s] + b * block_stride. Any alignment is allowed; multiples of 4 bytes
/// need no copies on any device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Pool {
    /// sizeof(ripieno_pool).
    pub size: usize,
    /// First byte, in this process's memory.
    pub base: *mut c_void,
    /// Length in bytes.
    pub bytes: usize,
    /// Offset of block 0 of each row, in bytes; null: one tensor of blocks x object after another,
    /// in row order.
    pub rows: *const u64,
    /// Entries of rows: layers * segments.
    pub rows_count: usize,
    /// Bytes from one block's object to the next one's; 0: object_bytes.
    pub block_stride: u64,
    /// Blocks of the pool.
    pub blocks: u32,
    /// Zero.
    pub reserved: u32,
    /// Called once, on any thread, when nothing accesses the memory any more: after the store was
    /// closed, or after ripieno_open failed (unless it could not read this struct). Until then the
    /// memory must stay mapped. Never called if a device may still access it after a failure. May
    /// be null: RIPIENO_STATUS_OK from ripieno_close means the same.
    pub release: Option<unsafe extern "C" fn(*mut c_void)>,
    /// The argument of release.
    pub release_context: *mut c_void,
    /// With a server: the file that is mapped at base (MAP_SHARED, from its first byte), whose size
    /// is bytes: a memfd (memfd_create) of whole small pages, sealed with F_SEAL_SHRINK. The server
    /// maps it, too. May be closed after ripieno_open. Otherwise unused: 0.
    pub file: c_int,
    /// Zero.
    pub reserved_2: u32,
}

/// Properties that must be equal for two engines to read each other's blocks. Keys of two
/// namespaces never match. Strings are UTF-8 and end with a zero byte; null means empty.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Namespace {
    /// sizeof(ripieno_namespace).
    pub size: usize,
    /// Digest of the model's weights, or of their name and revision.
    pub weights: [u8; 32],
    /// Memory format of a block: shape, order of dimensions, rows.
    pub layout: *const c_char,
    /// Type of an element, such as "bfloat16".
    pub dtype: *const c_char,
    /// Adapter (LoRA) with which the blocks were computed.
    pub adapter: *const c_char,
    /// Salt that keeps the tenant's blocks apart. Only its digest is stored.
    pub tenant_salt: *const u8,
    /// Bytes of tenant_salt.
    pub tenant_salt_bytes: usize,
    /// Name for reports, not part of the identity. At most 64 bytes.
    pub label: *const c_char,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of ripieno_open.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// sizeof(ripieno_config).
    pub size: usize,
    /// Directory of the store, the option path: a file for each software controller, a lock, and
    /// parameters. Its parent must exist. Null with a server, and with drives.
    pub path: *const c_char,
    /// Options of the store in TOML, as in the table store of a server's configuration, such as
    /// "capacity = '64MiB'\ndevices = 2"; null for the defaults. With a capacity, a missing or
    /// incomplete store is made first. All options: docs/reference/options.md.
    pub options: *const c_char,
    /// Shape of a KV block; must match the existing store.
    pub shape: Shape,
    /// The engine's KV memory. Opening the store tests with some of it, and restores the contents:
    /// at its ends, and in its first and last block.
    pub pool: *const Pool,
    /// Namespace of the returned handle; null: an empty one.
    pub namespace_: *const Namespace,
    /// Socket of a server (ripieno serve), whose store is shared with its other clients; null for a
    /// store of this process. The shape is that of the server's blocks, and the pool needs a file.
    /// The server has its own path and options.
    pub server: *const c_char,
}

/// A struct that a caller fills: plain data, for which all zeros is a value.
///
/// # Safety
/// The struct must be of that kind, and begin with a `usize`: its size as the caller knows it.
pub(crate) unsafe trait Growing: Copy {}
// SAFETY: numbers, and pointers that may be null.
unsafe impl Growing for Config {}
// SAFETY: as above.
unsafe impl Growing for Namespace {}
// SAFETY: as above.
unsafe impl Growing for Pool {}

/// Copies a caller's struct. Fields that the caller's version lacks are zero.
///
/// # Safety
/// `from` must be null or point to a `T` of any version, whose first field is its size in bytes.
pub(crate) unsafe fn read<T: Growing>(from: *const T, name: &str) -> Result<T, Failure> {
    let refused = |status, what: String| Failure::new(status, format!("{name}: {what}"));
    if from.is_null() {
        return Err(refused(Status::Invalid, "it is null".to_owned()));
    }
    // SAFETY: the caller's contract.
    let size = unsafe { from.cast::<usize>().read_unaligned() };
    let known = size_of::<T>();
    if size < size_of::<usize>() {
        let what = format!("its size is {size}; set it to sizeof of the struct");
        return Err(refused(Status::Invalid, what));
    }
    for at in known..size {
        // SAFETY: the caller's contract.
        if unsafe { from.cast::<u8>().add(at).read() } != 0 {
            let what = format!(
                "it has {size} bytes, of which this library knows {known}, and byte {at} is not \
                 zero; use a newer library"
            );
            return Err(refused(Status::Version, what));
        }
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both have that many bytes; all zeros is a value of T, and so is any mixture.
    unsafe {
        let to = value.as_mut_ptr().cast::<u8>();
        to.copy_from_nonoverlapping(from.cast(), size.min(known));
        Ok(value.assume_init())
    }
}

/// Returns a caller's string; empty for null.
///
/// # Safety
/// `from` must be null or point to a string that ends with a zero byte.
unsafe fn bytes<'a>(from: *const c_char) -> &'a [u8] {
    // SAFETY: the caller's contract.
    if from.is_null() { b"" } else { unsafe { CStr::from_ptr(from) }.to_bytes() }
}

/// Same as [`bytes`], as UTF-8.
///
/// # Safety
/// Same as [`bytes`].
pub(crate) unsafe fn text(from: *const c_char, name: &str) -> Result<String, Failure> {
    // SAFETY: the caller's contract.
    let text = std::str::from_utf8(unsafe { bytes(from) });
    text.map(str::to_owned).map_err(|error| Failure::invalid(format!("{name}: {error}")))
}

/// Returns a caller's array.
///
/// # Safety
/// `from` must point to `count` values, or `count` must be 0.
pub(crate) unsafe fn array<'a, T>(
    from: *const T,
    count: usize,
    name: &str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if from.is_null() || !from.is_aligned() {
        return Err(Failure::invalid(format!("{name}: {count} entries at {from:?}")));
    }
    // SAFETY: the caller's contract; neither null nor misaligned.
    Ok(unsafe { std::slice::from_raw_parts(from, count) })
}

impl Namespace {
    /// # Safety
    /// All pointers must be valid as the header requires.
    pub(crate) unsafe fn check(&self) -> Result<objstore::Namespace, Failure> {
        let salt_bytes = self.tenant_salt_bytes;
        // SAFETY: the caller's contract.
        unsafe {
            Ok(objstore::Namespace {
                weights: self.weights,
                layout: text(self.layout, "namespace.layout")?,
                dtype: text(self.dtype, "namespace.dtype")?,
                block_tokens: self.block_tokens,
                adapter: text(self.adapter, "namespace.adapter")?,
                tenant_salt: array(self.tenant_salt, salt_bytes, "namespace.tenant_salt")?.to_vec(),
                label: text(self.label, "namespace.label")?,
            })
        }
    }
}

impl Config {
    /// # Safety
    /// All pointers must be valid as the header requires.
    pub(crate) unsafe fn options(&self) -> Result<StackConfig, Failure> {
        // SAFETY: the caller's contract.
        let (path, toml) = unsafe { (bytes(self.path), text(self.options, "config.options")?) };
        let wrong = |error| Failure::invalid(format!("config.options: {error}"));
        let mut config: StackConfig = basic_toml::from_str(&toml).map_err(wrong)?;
        if !path.is_empty() {
            if config.path.is_some() {
                return Err(Failure::invalid("config.path: options have a path, too; give one"));
            }
            config.path = Some(OsStr::from_bytes(path).into());
        }
        Ok(config)
    }

    /// Returns the socket of the server, if there is one.
    ///
    /// # Safety
    /// All pointers must be valid as the header requires.
    pub(crate) unsafe fn server(&self) -> Result<Option<PathBuf>, Failure> {
        if self.server.is_null() {
            return Ok(None);
        }
        if !self.path.is_null() || !self.options.is_null() {
            return Err(Failure::invalid(
                "config.server: a server has its own path and options; leave these null",
            ));
        }
        // SAFETY: the caller's contract.
        let path = OsStr::from_bytes(unsafe { bytes(self.server) });
        Ok(Some(expand_home(path.as_ref()).into_owned()))
    }

    /// # Safety
    /// All pointers must be valid as the header requires.
    pub(crate) unsafe fn namespace(&self) -> Result<objstore::Namespace, Failure> {
        if self.namespace_.is_null() {
            return Ok(objstore::Namespace::default());
        }
        // SAFETY: the caller's contract.
        unsafe { read(self.namespace_, "config.namespace")?.check() }
    }

    pub(crate) fn shape(&self) -> Result<KvShape, Failure> {
        let Shape { layers, segments, object_bytes, block_tokens } = self.shape;
        let shape = KvShape { layers, segments, object_bytes, block_tokens };
        shape.validate().map_err(|error| Failure::invalid(format!("config.shape: {error}")))?;
        Ok(shape)
    }

    /// # Safety
    /// All pointers must be valid as the header requires.
    pub(crate) unsafe fn pool(&self) -> Result<Memory, Failure> {
        // SAFETY: the caller's contract.
        let pool = unsafe { read(self.pool, "config.pool")? };
        let Pool { base, bytes, rows, rows_count, block_stride, blocks, .. } = pool;
        let owner = Owner { release: pool.release, context: Context(pool.release_context) };
        let shape = &self.shape()?;
        let base = NonNull::new(base.cast::<u8>());
        let base = base.ok_or_else(|| Failure::invalid("config.pool.base: it is null"))?;
        let mut layout = PoolLayout::contiguous(shape, blocks);
        if block_stride != 0 {
            layout.block_stride = block_stride;
        }
        if !rows.is_null() {
            // SAFETY: the caller's contract.
            layout.rows = unsafe { array(rows, rows_count, "config.pool.rows")? }.to_vec();
        } else if block_stride != 0 && block_stride != u64::from(shape.object_bytes) {
            return Err(Failure::invalid("config.pool: a block_stride needs rows"));
        }
        Ok(Memory { base, bytes, layout, file: pool.file, owner })
    }
}

/// The engine's KV memory.
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    pub(crate) layout: PoolLayout,
    file: c_int,
    pub(crate) owner: Owner,
}

impl Memory {
    /// Returns the memory for a store of this process.
    pub(crate) fn pool(self) -> PoolMemory {
        let Self { base, bytes, layout, owner, .. } = self;
        // SAFETY: as the header requires, the memory stays until `release` is called.
        let memory = unsafe { EngineMemory::new(base, bytes, Arc::new(owner)) };
        PoolMemory::Engine { memory, layout }
    }

    /// Returns the file of the memory, for a server.
    pub(crate) fn file(&self) -> Result<OwnedFd, Failure> {
        if self.file <= 0 {
            return Err(Failure::invalid(
                "config.pool.file: a server shares the engine's memory; make it with memfd_create, \
                 seal it with F_SEAL_SHRINK, map it with MAP_SHARED, and give its file here",
            ));
        }
        // SAFETY: the caller's, and open during this call, as the header requires.
        let file = unsafe { BorrowedFd::borrow_raw(self.file) };
        let failed = |error| Failure::invalid(format!("config.pool.file: {error}"));
        file.try_clone_to_owned().map_err(failed)
    }

    /// Checks that the engine's memory is a mapping, such as this one, of all of its file.
    pub(crate) fn check(&self, (mapped, len): (NonNull<u8>, usize)) -> Result<(), Failure> {
        let is_same = |at: usize| {
            let (own, other) = (mapped.as_ptr().wrapping_add(at), self.base.as_ptr());
            // SAFETY: inside of both mappings, which nothing else uses before the store is open.
            unsafe {
                let byte = own.read_volatile();
                own.write_volatile(!byte);
                let seen = other.wrapping_add(at).read_volatile();
                own.write_volatile(byte);
                seen == !byte
            }
        };
        if self.bytes == len && is_same(0) && is_same(len - 1) {
            return Ok(());
        }
        let bytes = self.bytes;
        let why = format!(
            "config.pool.file: it has {len} bytes, and base is {bytes} bytes of other memory; map \
             all of the file (MAP_SHARED)"
        );
        Err(Failure::invalid(why))
    }
}

/// A pointer that is only passed back.
#[derive(Debug)]
struct Context(*mut c_void);
// SAFETY: the header says that `release` is called on any thread.
unsafe impl Send for Context {}
// SAFETY: it is not used through a shared reference.
unsafe impl Sync for Context {}

/// Calls the engine's `release` when nothing accesses its memory any more.
#[derive(Debug)]
pub struct Owner {
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    context: Context,
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the engine's own function, called once, with its argument.
            unsafe { release(self.context.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Small {
        size: usize,
        first: u64,
        second: u64,
    }
    // SAFETY: numbers.
    unsafe impl Growing for Small {}

    fn status(size: usize, words: [u64; 4]) -> Result<(u64, u64), Status> {
        let mut given = [size as u64, 0, 0, 0, 0];
        given[1..].copy_from_slice(&words);
        // SAFETY: `size` is at most that of the array, or refused.
        let read = unsafe { read(given.as_ptr().cast::<Small>(), "small") };
        read.map(|small| (small.first, small.second))
            .map_err(|failure| crate::status::guard(|| Err(failure)))
    }

    #[test]
    fn callers_with_older_and_newer_headers_are_understood() {
        assert_eq!(status(24, [7, 8, 9, 9]), Ok((7, 8)));
        assert_eq!(status(16, [7, 8, 9, 9]), Ok((7, 0)), "what an older caller does not know");
        assert_eq!(status(40, [7, 8, 0, 0]), Ok((7, 8)), "a newer one that uses nothing new");
        assert_eq!(status(40, [7, 8, 0, 1]), Err(Status::Version));
        assert_eq!(status(0, [7, 8, 0, 0]), Err(Status::Invalid));
        // SAFETY: null is refused.
        assert!(unsafe { read(std::ptr::null::<Small>(), "small") }.is_err());
    }

    /// Programs have these sizes and offsets in them; later versions may only add at the end.
    #[test]
    fn the_first_version_stays_as_it_is() {
        assert_eq!(std::mem::offset_of!(Config, server), 56);
        assert_eq!(size_of::<Config>(), 64);
        assert_eq!(size_of::<Namespace>(), 96);
        assert_eq!(std::mem::offset_of!(Pool, file), 72);
        assert_eq!(size_of::<Pool>(), 80);
        assert_eq!(std::mem::offset_of!(Namespace, block_tokens), 88);
        assert_eq!(std::mem::offset_of!(Pool, release_context), 64);
    }
}
