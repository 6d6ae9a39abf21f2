//! Commands for a namespace through the kernel's driver, which keeps the drive: its generic
//! character device, `/dev/ng0n1` (Linux, `include/uapi/linux/nvme_ioctl.h`).
#![allow(unsafe_code, reason = "gives the kernel's driver addresses to read and write")]

use std::{
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use io_uring::{opcode::UringCmd80, squeue::Entry128, types::Fixed};
use nvme_pci::{Use, users_of_disk};
use nvme_spec::{
    admin::{AdminOpcode, Cns, Identify},
    identify::{CommandSet, IdentifyController, IdentifyNamespace, NamespaceDescriptors},
    ids::{Cid, Nsid},
    nvm::{BlockRange, Directive, DirectiveType, NvmOpcode},
    reg::Version,
    sqe::Sqe,
    status::Status,
};
use rustix::{
    fs::{Mode, OFlags, fstat, major, minor},
    io::Errno,
};
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes};

use crate::namespace::{NamespaceError, NamespaceInfo};

/// After this the kernel asks the drive to abort a command, and after twice this it resets the
/// drive: before a store gives up, which waits for both.
const TIMEOUT_MS: u32 = 15_000;
/// Memory of a transfer consists of whole pages: a part of one would take a segment of its own, of
/// which a command has few.
pub const PAGE: usize = 4096;

/// `NVME_IOCTL_ADMIN64_CMD`.
pub const ADMIN: u32 = 0xc050_4e47;
/// `NVME_IOCTL_IO64_CMD`; the next number takes a list of parts, as it does with the next one here.
pub const IO: u32 = 0xc050_4e48;
/// `NVME_URING_CMD_IO`, and `NVME_IOCTL_ID`.
const URING_IO: u32 = 0xc048_4e80;
const ID: u32 = 0x4e40;

const MAY: &str = "the kernel lets only root, or a process with CAP_SYS_ADMIN, send all commands \
                   that a store needs, and the device must be open to it";

/// `struct nvme_passthru_cmd64`. It begins with `struct nvme_uring_cmd`.
#[derive(Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct PassthruCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    address: u64,
    metadata_len: u32,
    /// In bytes, or that of the list in parts.
    len: u32,
    cdw10: [u32; 6],
    timeout_ms: u32,
    reserved_2: u32,
    result: u64,
}

const _: () =
    assert!(size_of::<PassthruCommand>() == 80, "the kernel's structure has another size");

impl PassthruCommand {
    fn new(sqe: &Sqe, address: u64, len: u32) -> Self {
        Self {
            opcode: sqe.opcode,
            nsid: sqe.nsid,
            cdw2: sqe.cdw2,
            cdw3: sqe.cdw3,
            address,
            len,
            cdw10: [sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14, sqe.cdw15],
            timeout_ms: TIMEOUT_MS,
            ..Self::new_zeroed()
        }
    }
}

/// Reason for which a namespace cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{why}; {hint}")]
pub struct PassthroughError {
    /// Finding.
    pub why: String,
    /// Remedy.
    pub hint: &'static str,
    /// True if nothing visible has it: a process that was killed, until its I/O has ended.
    pub is_busy: bool,
}

fn refused(why: impl Into<String>, hint: &'static str) -> PassthroughError {
    PassthroughError { why: why.into(), hint, is_busy: false }
}

/// A namespace. While this exists, no file system on it can be mounted, and no other store opened.
#[derive(Debug)]
pub struct Passthrough {
    /// The device.
    pub file: Arc<OwnedFd>,
    /// Its block device, and those of other paths to it. Whoever uses the device keeps them, too,
    /// until nothing is in the kernel any more.
    pub claims: Vec<OwnedFd>,
    /// Its properties.
    pub namespace: NamespaceInfo,
    /// Version of its controller.
    pub version: Version,
    /// PCI vendor and device of the drive, if it has one controller.
    pub pci_id: Option<(u16, u16)>,
    /// Most bytes of a command, a power of two.
    pub transfer_bytes_max: usize,
}

impl Passthrough {
    /// Opens the namespace at `path`, and claims its block device.
    ///
    /// # Errors
    /// Returns [`PassthroughError`] if it is in use, or cannot be used, or if the kernel does not
    /// let this process send commands to it.
    pub fn open(path: &Path) -> Result<Self, PassthroughError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
            let hint = match error {
                Errno::ACCESS | Errno::PERM => MAY,
                _ => {
                    "the kernel has /dev/ng0n1 for each namespace that its own driver has (Linux \
                     5.19); nvme-bind restore gives a drive back to it"
                }
            };
            refused(format!("opening it failed: {error}"), hint)
        })?;
        let generic = folder(&file, "char").unwrap_or_default();
        let nsid = if is_generic(&generic) {
            // SAFETY: the device knows the request, which takes no address.
            unsafe { libc::ioctl(file.as_raw_fd(), ID.into(), 0) }
        } else {
            -1
        };
        let block = generic.parent().and_then(|beside| block(beside, nsid));
        let Some(block) = block.filter(|_| nsid > 0) else {
            let hint = "name /dev/ng0n1, beside which there is a block device, /dev/nvme0n1";
            return Err(refused("it is no namespace with blocks", hint));
        };
        let claims = claim(&block)?;
        // Not all users claim it: a virtual machine, a target for other machines.
        let [disk, other] = [&block, &generic].map(|path| name(path));
        unused(&users_of_disk(&disk, &other))?;
        let (namespace, version) = identify(&file, Nsid(nsid.cast_unsigned()))?;
        Ok(Self {
            file: Arc::new(file),
            claims,
            namespace,
            version,
            pci_id: pci_id(&block),
            transfer_bytes_max: transfer_bytes_max(&block),
        })
    }

    /// Sends a command for the queue [`ADMIN`] or [`IO`], and waits for its end. Returns dword 0.
    ///
    /// # Errors
    /// Returns the drive's status; Internal Error if the kernel does not let it pass.
    pub fn relay(&self, queue: u32, sqe: &Sqe, data: &mut [u8]) -> Result<u32, Status> {
        send(&self.file, queue, sqe, data).unwrap_or_else(|error| {
            tracing::warn!(opcode = sqe.opcode, %error, "the kernel refuses a command");
            Err(Status::INTERNAL_ERROR)
        })
    }

    /// Returns a command for the blocks at an offset, of some bytes. A write with `fua` is durable
    /// when it ends. 0 is the default of `placement`, a Placement Identifier.
    #[must_use]
    pub fn blocks(&self, opcode: NvmOpcode, at: [u64; 2], fua: bool, placement: u16) -> Sqe {
        let [offset, bytes] = at.map(|bytes| bytes >> self.namespace.lba_shift);
        let mut sqe = Sqe::new(opcode.0, Cid(0), self.namespace.nsid);
        let nlb_z = bytes.wrapping_sub(1) as u16;
        BlockRange { slba: offset, nlb_z, fua, ..BlockRange::default() }.write_to(&mut sqe);
        if placement != 0 {
            let kind = DirectiveType::DATA_PLACEMENT;
            Directive { kind, specific: placement }.write_to(&mut sqe);
        }
        sqe
    }

    /// Returns an entry of `io_uring`, for file 0 of a ring, that sends a command of an I/O queue
    /// with its data. Its result is 0, or a positive status, or a negative error.
    #[must_use]
    pub fn entry(&self, sqe: &Sqe, parts: &[libc::iovec]) -> Entry128 {
        let (address, len, list) = match parts {
            [] => (0, 0, 0),
            [part] => (part.iov_base.expose_provenance(), part.iov_len, 0),
            parts => (parts.as_ptr().expose_provenance(), parts.len(), 1),
        };
        let command = PassthruCommand::new(sqe, address as u64, len as u32);
        let bytes = zerocopy::transmute!(command);
        UringCmd80::new(Fixed(0), URING_IO + list).cmd(bytes).build()
    }
}

/// Checks a namespace as [`crate::Controller`] does, before anything else is read. Returns its
/// properties, and the version of its controller.
fn identify(file: &OwnedFd, nsid: Nsid) -> Result<(NamespaceInfo, Version), PassthroughError> {
    let wrong = |error: NamespaceError| refused(error.to_string(), "name another namespace");
    let unanswered = |status| wrong(NamespaceError::Identify { status });
    let ask = |cns, nsid, data: &mut [u8]| {
        let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0, Cid(0), nsid);
        Identify { cns, ..Identify::default() }.write_to(&mut sqe);
        let answered = send(file, ADMIN, &sqe, data);
        answered.map_err(|error| refused(format!("it was not identified: {error}"), MAY))
    };
    // A zoned namespace looks ordinary otherwise. Old drives do not answer.
    let mut list = NamespaceDescriptors::new_zeroed();
    let _ = ask(Cns::NAMESPACE_DESCRIPTORS, nsid, list.as_mut_bytes())?;
    if list.command_set() != CommandSet::NVM {
        return Err(wrong(NamespaceError::CommandSet { csi: list.command_set() }));
    }
    let (mut space, mut controller) =
        (IdentifyNamespace::new_zeroed(), IdentifyController::new_zeroed());
    ask(Cns::NAMESPACE, nsid, space.as_mut_bytes())?.map_err(unanswered)?;
    ask(Cns::CONTROLLER, Nsid(0), controller.as_mut_bytes())?.map_err(unanswered)?;
    let namespace = NamespaceInfo::check(nsid, &space).map_err(wrong)?;
    Ok((namespace, Version(controller.ver)))
}

/// Sends a command, and waits for its end.
fn send(
    file: &OwnedFd,
    request: u32,
    sqe: &Sqe,
    data: &mut [u8],
) -> io::Result<Result<u32, Status>> {
    let address = data.as_mut_ptr().expose_provenance() as u64;
    let mut command = PassthruCommand::new(sqe, address, data.len() as u32);
    // SAFETY: the kernel moves `data`, which has that length, before it returns.
    match unsafe { ioctl(file.as_raw_fd(), request, &mut command) } {
        0 => Ok(Ok(command.result as u32)),
        status if status > 0 => Ok(Err(status_of(status))),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// Returns the status in a result above 0.
#[must_use]
pub fn status_of(result: i32) -> Status {
    Status(result as u16)
}

/// Carries out an entry of [`Passthrough::entry`], without `io_uring`, and returns its result.
///
/// # Safety
/// Its memory is valid until this returns.
pub(super) unsafe fn run(file: RawFd, request: u32, command: [u8; 80]) -> i32 {
    let mut command: PassthruCommand = zerocopy::transmute!(command);
    // SAFETY: the caller's promise.
    unsafe { ioctl(file, IO + (request - URING_IO), &mut command) }
}

/// # Safety
/// The memory that the command names is valid.
unsafe fn ioctl(file: RawFd, request: u32, command: &mut PassthruCommand) -> i32 {
    // SAFETY: the requests take this structure; the rest is the caller's promise.
    match unsafe { libc::ioctl(file, request.into(), std::ptr::from_mut(command)) } {
        -1 => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        result => result,
    }
}

/// Returns the folder of an open device in sysfs.
fn folder(file: &OwnedFd, kind: &str) -> Option<PathBuf> {
    let number = fstat(file).ok()?.st_rdev;
    let link = format!("/sys/dev/{kind}/{}:{}", major(number), minor(number));
    fs::canonicalize(link).ok()
}

fn is_generic(folder: &Path) -> bool {
    fs::canonicalize(folder.join("subsystem")).is_ok_and(|it| it.ends_with("nvme-generic"))
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the folder of a namespace's block device, which is beside that of the other device. The
/// numbers in their names may differ.
fn block(beside: &Path, nsid: i32) -> Option<PathBuf> {
    let mut found = fs::read_dir(beside).ok()?.flatten().map(|entry| entry.path());
    found.find(|it| {
        number(&it.join("nsid")) == u64::try_from(nsid).ok() && it.join("queue").exists()
    })
}

/// Returns the most bytes of a command: the kernel's limit, which includes that of the drive, and
/// as many pages as it has segments for if no two are neighbours.
fn transfer_bytes_max(block: &Path) -> usize {
    let limit = |name: &str| number(&block.join("queue").join(name)).unwrap_or(0) as usize;
    let pages = limit("max_segments").saturating_sub(1) * PAGE;
    // A command counts up to 65,536 LBAs.
    let bytes = (limit("max_hw_sectors_kb") << 10).min(pages).clamp(2 * PAGE, 1 << 24);
    1 << bytes.ilog2()
}

fn pci_id(block: &Path) -> Option<(u16, u16)> {
    let read = |name: &str| {
        let text = fs::read_to_string(block.parent()?.join("device").join(name)).ok()?;
        u16::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
    };
    Some((read("vendor")?, read("device")?))
}

/// Returns the name of a device by its folder.
fn name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Refuses a namespace that has users.
fn unused(users: &[Use]) -> Result<(), PassthroughError> {
    let in_use = |user: &Use| refused(format!("it is in use: {}", user.sentence()), "end that use");
    users.first().map_or(Ok(()), |user| Err(in_use(user)))
}

/// Claims a block device, and those of other paths to the same namespace.
fn claim(block: &Path) -> Result<Vec<OwnedFd>, PassthroughError> {
    let wwid = |folder: &Path| fs::read_to_string(folder.join("wwid")).ok();
    let all = fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    let same = all.filter_map(|entry| fs::canonicalize(entry.path()).ok()).filter(|it| {
        it == block
            || (wwid(it).is_some_and(|it| wwid(block) == Some(it))
                // The kernel's own paths of what it shows as one device.
                && number(&it.join("hidden")) != Some(1))
    });
    let claim = |folder: PathBuf| {
        let disk = name(&folder);
        let path = Path::new("/dev").join(&disk);
        let flags = OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, Mode::empty());
        let why = |error| format!("claiming {} failed: {error}", path.display());
        match opened {
            Ok(file) if self::folder(&file, "block").as_ref() == Some(&folder) => Ok(file),
            Ok(_) => Err(refused(format!("{} is another device", path.display()), "see /dev")),
            Err(Errno::BUSY) => {
                unused(&users_of_disk(&disk, ""))?;
                let hint = "something uses it that is not visible from here: see lsblk";
                Err(PassthroughError { is_busy: true, ..refused(why(Errno::BUSY), hint) })
            }
            Err(error) => Err(refused(why(error), "the store needs that device, too, for a claim")),
        }
    };
    same.map(claim).collect()
}

#[cfg(test)]
mod tests;
