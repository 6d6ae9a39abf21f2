//! Requests to the kernel's VFIO, one function each. No other file has VFIO ioctls.
//!
//! The structs and constants are vfio-bindings'. Its companion vfio-ioctls 0.10 is not used: it
//! cannot query a container's address ranges or free DMA entries; it drops the errno of most
//! failures, which the hints need; it lets `VFIO_IOMMU_UNMAP_DMA` write the size it checks through
//! a shared reference; it only logs failed accesses to configuration space; and dropping its device
//! panics if sysfs has lost the device, which happens after a hot unplug.
#![allow(unsafe_code, reason = "ioctls take pointers the compiler cannot check")]

use std::{
    ffi::{CStr, c_void},
    fs::{File, OpenOptions},
    io,
    mem::{offset_of, size_of},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::Path,
    ptr::NonNull,
};

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_BASE, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE,
    VFIO_IOMMU_INFO_CAPS, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_REGION_INFO_FLAG_CAPS, VFIO_TYPE, VFIO_TYPE1v2_IOMMU,
    vfio_device_info, vfio_group_status, vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap,
    vfio_iommu_type1_info, vfio_irq_info, vfio_irq_set, vfio_region_info,
};
use zerocopy::IntoBytes;

use super::capability::Answer;
use crate::dma::Iova;

const GET_API_VERSION: u32 = VFIO_BASE;
const CHECK_EXTENSION: u32 = VFIO_BASE + 1;
const SET_IOMMU: u32 = VFIO_BASE + 2;
const GROUP_GET_STATUS: u32 = VFIO_BASE + 3;
const GROUP_SET_CONTAINER: u32 = VFIO_BASE + 4;
const GROUP_UNSET_CONTAINER: u32 = VFIO_BASE + 5;
const GROUP_GET_DEVICE_FD: u32 = VFIO_BASE + 6;
const DEVICE_GET_INFO: u32 = VFIO_BASE + 7;
const DEVICE_GET_REGION_INFO: u32 = VFIO_BASE + 8;
const DEVICE_GET_IRQ_INFO: u32 = VFIO_BASE + 9;
const DEVICE_SET_IRQS: u32 = VFIO_BASE + 10;
const DEVICE_RESET: u32 = VFIO_BASE + 11;
const IOMMU_GET_INFO: u32 = VFIO_BASE + 12;
const IOMMU_MAP_DMA: u32 = VFIO_BASE + 13;
const IOMMU_UNMAP_DMA: u32 = VFIO_BASE + 14;

/// Longest answer accepted.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// A request: a number and an argument that the kernel takes as a pointer or as a number.
struct Request {
    number: u32,
    argument: *mut c_void,
}

// SAFETY: VFIO numbers all its requests with _IO and returns a number; each creator of a Request
// states why its argument fits the request.
unsafe impl Ioctl for Request {
    type Output = i32;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::none(VFIO_TYPE, self.number as u8)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<i32> {
        Ok(out)
    }
}

/// # Safety
/// `argument` must fit the request: a pointer valid for the kernel's accesses through it, or a
/// number.
unsafe fn request(fd: impl AsFd, number: u32, argument: *mut c_void) -> io::Result<i32> {
    // SAFETY: the caller's promise.
    Ok(unsafe { rustix::ioctl::ioctl(fd, Request { number, argument }) }?)
}

/// # Safety
/// `T` must be the struct of the request, with `argsz` set to at most its size.
unsafe fn with_struct<T>(fd: impl AsFd, number: u32, value: &mut T) -> io::Result<i32> {
    // SAFETY: the kernel reads and writes at most `argsz` bytes of `value`, borrowed mutably.
    unsafe { request(fd, number, std::ptr::from_mut(value).cast()) }
}

fn with_number(fd: impl AsFd, number: u32, value: u32) -> io::Result<i32> {
    let argument = std::ptr::without_provenance_mut(value as usize);
    // SAFETY: used only for requests whose argument is a number.
    unsafe { request(fd, number, argument) }
}

const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// Opens a node of /dev/vfio.
pub(super) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Returns whether the kernel has the interface version that this file supports.
pub(super) fn is_known_version(container: &File) -> io::Result<bool> {
    Ok(with_number(container, GET_API_VERSION, 0)? == VFIO_API_VERSION as i32)
}

/// Returns whether the container supports the type 1 IOMMU driver, version 2.
pub(super) fn has_type1(container: &File) -> io::Result<bool> {
    Ok(with_number(container, CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU)? > 0)
}

/// Selects the type 1 IOMMU driver. The container must have a group.
pub(super) fn set_type1(container: &File) -> io::Result<()> {
    with_number(container, SET_IOMMU, VFIO_TYPE1v2_IOMMU).map(drop)
}

/// Returns the flags of a group: viable, in a container.
pub(super) fn group_flags(group: &File) -> io::Result<u32> {
    let mut status = vfio_group_status { argsz: size::<vfio_group_status>(), flags: 0 };
    // SAFETY: the struct of this request, argsz its size.
    unsafe { with_struct(group, GROUP_GET_STATUS, &mut status) }?;
    Ok(status.flags)
}

/// Adds a group to a container.
pub(super) fn set_container(group: &File, container: &File) -> io::Result<()> {
    let mut fd = container.as_raw_fd();
    // SAFETY: the request takes a pointer to a file descriptor.
    unsafe { with_struct(group, GROUP_SET_CONTAINER, &mut fd) }.map(drop)
}

/// Removes a group from its container. With the last group, the kernel drops all mappings.
pub(super) fn unset_container(group: &File) -> io::Result<()> {
    with_number(group, GROUP_UNSET_CONTAINER, 0).map(drop)
}

/// Opens a function of a group.
pub(super) fn device(group: &File, name: &CStr) -> io::Result<File> {
    // SAFETY: the request reads a string that ends with a zero byte.
    let fd = unsafe { request(group, GROUP_GET_DEVICE_FD, name.as_ptr().cast_mut().cast()) }?;
    // SAFETY: the kernel just created this file descriptor; it has no other owner.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Returns a function's flags, and its numbers of regions and interrupts.
pub(super) fn device_info(device: &File) -> io::Result<vfio_device_info> {
    let mut info = vfio_device_info { argsz: size::<vfio_device_info>(), ..Default::default() };
    // SAFETY: the struct of this request, argsz its size.
    unsafe { with_struct(device, DEVICE_GET_INFO, &mut info) }?;
    Ok(info)
}

/// Returns the info of a region (BAR or configuration space) and its capabilities.
pub(super) fn region_info(device: &File, index: u32) -> io::Result<(vfio_region_info, Answer)> {
    let argsz = size::<vfio_region_info>();
    let mut info = vfio_region_info { argsz, index, ..Default::default() };
    // SAFETY: the struct of this request, argsz its size.
    unsafe { with_struct(device, DEVICE_GET_REGION_INFO, &mut info) }?;
    if info.flags & VFIO_REGION_INFO_FLAG_CAPS == 0 || info.argsz <= argsz {
        return Ok((info, Answer::default()));
    }
    let place = offset_of!(vfio_region_info, index);
    let bytes = answer(device, DEVICE_GET_REGION_INFO, info.argsz, &[(place, index)])?;
    let first = word(&bytes, offset_of!(vfio_region_info, cap_offset));
    Ok((info, Answer { bytes, first }))
}

/// Returns a function's interrupts of one kind.
pub(super) fn irq_info(device: &File, index: u32) -> io::Result<vfio_irq_info> {
    let argsz = size::<vfio_irq_info>();
    let mut info = vfio_irq_info { argsz, index, ..Default::default() };
    // SAFETY: the struct of this request, argsz its size.
    unsafe { with_struct(device, DEVICE_GET_IRQ_INFO, &mut info) }?;
    Ok(info)
}

/// Makes the kernel signal one eventfd for each vector from 0 on. Returns 0, or the number of
/// available vectors if that is lower; none is set up then.
pub(super) fn set_irqs(device: &File, index: u32, fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let header = offset_of!(vfio_irq_set, data);
    let flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
    let argsz = (header + size_of_val(fds)) as u32;
    let mut words = vec![argsz, flags, index, 0, fds.len() as u32];
    assert_eq!(header, words.len() * 4);
    words.extend(fds.iter().map(|fd| fd.as_raw_fd() as u32));
    // SAFETY: vfio_irq_set is these five words and then the file descriptors; argsz is their size.
    let left = unsafe { request(device, DEVICE_SET_IRQS, words.as_mut_ptr().cast()) }?;
    Ok(usize::try_from(left).unwrap_or(0))
}

/// Disables all interrupts of a kind.
pub(super) fn disable_irqs(device: &File, index: u32) -> io::Result<()> {
    let flags = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER;
    let mut words = [size::<[u32; 5]>(), flags, index, 0, 0];
    // SAFETY: vfio_irq_set without data is these five words; argsz is their size.
    unsafe { with_struct(device, DEVICE_SET_IRQS, &mut words) }.map(drop)
}

/// Resets a function.
pub(super) fn reset(device: &File) -> io::Result<()> {
    with_number(device, DEVICE_RESET, 0).map(drop)
}

/// Returns the IOMMU's page sizes (one bit each) and the container's capabilities.
pub(super) fn iommu_info(container: &File) -> io::Result<(u64, Answer)> {
    let argsz = size::<vfio_iommu_type1_info>();
    let mut info = vfio_iommu_type1_info { argsz, ..Default::default() };
    // SAFETY: the struct of this request, argsz its size.
    unsafe { with_struct(container, IOMMU_GET_INFO, &mut info) }?;
    if info.flags & VFIO_IOMMU_INFO_CAPS == 0 || info.argsz <= argsz {
        return Ok((info.iova_pgsizes, Answer::default()));
    }
    let bytes = answer(container, IOMMU_GET_INFO, info.argsz, &[])?;
    let first = word(&bytes, offset_of!(vfio_iommu_type1_info, cap_offset));
    Ok((info.iova_pgsizes, Answer { bytes, first }))
}

/// Lets the devices of the container access `len` bytes at `host` as `iova`.
///
/// # Safety
/// Until [`unmap`] succeeds or the container has no group left, the memory must stay mapped in this
/// process, and no Rust reference to it may exist.
pub(super) unsafe fn map(
    container: &File,
    host: NonNull<u8>,
    iova: Iova,
    len: u64,
) -> io::Result<()> {
    let mut map = vfio_iommu_type1_dma_map {
        argsz: size::<vfio_iommu_type1_dma_map>(),
        flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: host.as_ptr().expose_provenance() as u64,
        iova: iova.0,
        size: len,
    };
    // SAFETY: the struct of this request, argsz its size; the memory is the caller's promise.
    unsafe { with_struct(container, IOMMU_MAP_DMA, &mut map) }.map(drop)
}

/// Unmaps memory from the devices. Returns the number of bytes unmapped.
pub(super) fn unmap(container: &File, iova: Iova, len: u64) -> io::Result<u64> {
    let mut unmap = vfio_iommu_type1_dma_unmap {
        argsz: size::<vfio_iommu_type1_dma_unmap>(),
        iova: iova.0,
        size: len,
        ..Default::default()
    };
    // SAFETY: the struct of this request, argsz its size.
    unsafe { with_struct(container, IOMMU_UNMAP_DMA, &mut unmap) }?;
    Ok(unmap.size)
}

/// Requests an answer of `argsz` bytes with `fields` (offset, value) set beforehand.
fn answer(fd: &File, number: u32, argsz: u32, fields: &[(usize, u32)]) -> io::Result<Vec<u8>> {
    let too_long = || io::Error::other(format!("its answer would have {argsz} bytes"));
    let len = Some(argsz as usize).filter(|len| *len <= ANSWER_BYTES_MAX).ok_or_else(too_long)?;
    // The structs have 64-bit fields; a vector of bytes would not be aligned for them.
    let mut buffer = vec![0u64; len.div_ceil(8)];
    for &(at, value) in [(0, argsz)].iter().chain(fields) {
        if let Some(field) = buffer.as_mut_bytes().get_mut(at..at + 4) {
            field.copy_from_slice(&value.to_ne_bytes());
        }
    }
    // SAFETY: argsz, the first field, is at most the size of the buffer.
    unsafe { request(fd, number, buffer.as_mut_ptr().cast()) }?;
    let mut bytes = buffer.as_bytes().to_vec();
    bytes.truncate(len);
    Ok(bytes)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk());
    field.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}
