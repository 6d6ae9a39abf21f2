//! The container: an IOMMU address space with its groups and mappings.
#![allow(unsafe_code, reason = "mapping memory for devices is a promise about its life")]

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs::File,
    io,
    path::Path,
    ptr::NonNull,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
};

use nvme_pci::{Function, OpenFile, PciAddress, Root, group_members, open_files, vfio_files};
use rustix::{
    io::Errno,
    process::{Resource, getrlimit},
};
use vfio_bindings::bindings::vfio::VFIO_GROUP_FLAGS_VIABLE;

use super::{
    capability::{Answer, IovaSpan},
    error::{Call, VfioError, map_hint},
    iova::{IovaAllocator, pci_windows, without},
    sys,
};
use crate::dma::{DevicePtr, DmaError, Iova};

/// Free DMA entries below which each halving logs a warning.
const FEW_ENTRIES: u32 = 256;
/// Span assumed if the kernel reports none (before 5.4): 39 bits without the first 4 GiB, which
/// hold the MSI range and the firmware's reserved ranges.
const OLD_KERNEL_SPAN: IovaSpan = IovaSpan { first: 4 << 30, last: (1 << 39) - 1 };

/// A container of the kernel's type 1 IOMMU driver (not iommufd, which rejects memory of other
/// devices by address).
#[derive(Debug)]
pub(super) struct Container {
    name: String,
    fd: File,
    /// Addresses of PCI devices when the container was opened; not used for mappings.
    windows: Vec<IovaSpan>,
    state: Mutex<State>,
    /// Signalled when a group has left.
    left: Condvar,
}

#[derive(Debug)]
struct State {
    /// A group without handles stays here until it has really left.
    groups: BTreeMap<u32, Weak<Group>>,
    /// Functions owned by a bus of this process, and their NUMA nodes.
    claimed: BTreeMap<PciAddress, Option<u32>>,
    /// Groups in the kernel's container. Without any, the kernel drops all mappings.
    attached: u32,
    iova: IovaAllocator,
    /// Host address and length of all mappings, by I/O virtual address.
    live: BTreeMap<Iova, (NonNull<u8>, u64)>,
    mapped_bytes: u64,
}

// SAFETY: the addresses in `live` are only passed to the kernel.
unsafe impl Send for State {}

/// Usage and limits of a space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpaceStatus {
    /// Number of mapped regions.
    pub mappings: usize,
    /// Bytes of all mapped regions.
    pub mapped_bytes: u64,
    /// Regions that can still be mapped; `None` if the kernel does not report it.
    pub mappings_left: Option<u32>,
    /// IOMMU groups currently in the space.
    pub groups: u32,
    /// I/O virtual addresses that the devices of all these groups can use.
    pub iova_spans: Vec<IovaSpan>,
}

impl Container {
    pub(super) fn open(name: &str) -> Result<Arc<Self>, VfioError> {
        let os = |source| VfioError::os(name, Call::OpenContainer, source);
        let fd = sys::open(Path::new("/dev/vfio/vfio")).map_err(os)?;
        if !sys::is_known_version(&fd).map_err(os)? {
            let what = "the kernel's VFIO has an unknown version";
            let hint = "this driver knows version 0, which all kernels so far have";
            return Err(VfioError::unsupported(name, what, hint));
        }
        if !sys::has_type1(&fd).map_err(os)? {
            let what = "the kernel has no type 1 IOMMU driver for VFIO";
            let hint = "switch the IOMMU on (firmware; intel_iommu=on or amd_iommu=on) and load \
                        the module: modprobe vfio_iommu_type1";
            return Err(VfioError::unsupported(name, what, hint));
        }
        let state = State {
            groups: BTreeMap::new(),
            claimed: BTreeMap::new(),
            attached: 0,
            iova: IovaAllocator::new(Vec::new(), 4096),
            live: BTreeMap::new(),
            mapped_bytes: 0,
        };
        Ok(Arc::new(Self {
            name: name.to_owned(),
            fd,
            windows: pci_windows(&Root::machine()),
            state: Mutex::new(state),
            left: Condvar::new(),
        }))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Locks the state. Nothing panics halfway under the lock, so poisoning is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a function for one owner in this process; the kernel would allow a second open.
    pub(super) fn claim(self: &Arc<Self>, address: PciAddress) -> Result<Claim, VfioError> {
        match self.lock().claimed.entry(address) {
            Entry::Occupied(_) => return Err(VfioError::Claimed { address }),
            Entry::Vacant(entry) => entry.insert(None),
        };
        Ok(Claim { address, container: self.clone() })
    }

    /// Returns the NUMA node of all functions, if it is the same.
    pub(super) fn node(&self) -> Option<u32> {
        let state = self.lock();
        let mut nodes = state.claimed.values();
        let first = *nodes.next()?;
        first.filter(|_| nodes.all(|node| *node == first))
    }

    /// Joins the IOMMU group of a function to this container.
    pub(super) fn join(self: &Arc<Self>, address: PciAddress) -> Result<Arc<Group>, VfioError> {
        let function = Function::read(&Root::machine(), address);
        let wrong = |what, hint| move || VfioError::unsupported(address, what, hint);
        let absent = wrong("there is no such PCI function", "lspci -D lists those there are");
        let function = function.ok_or_else(absent)?;
        let id = function.group.ok_or_else(wrong(
            "it is in no IOMMU group, so nothing would confine its DMA",
            "switch the IOMMU on in the firmware and with intel_iommu=on or amd_iommu=on on the \
             kernel's command line",
        ))?;
        let mut state = self.lock();
        while let Some(known) = state.groups.get(&id) {
            if let Some(group) = known.upgrade() {
                return Ok(group);
            }
            // Another thread is releasing it.
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let file = open_group(&function, id)?;
        self.attach(&mut state, &file, address)?;
        tracing::debug!(space = %self.name, group = id, function = %address, "group joined");
        let group = Arc::new(Group { id, file: Some(file), container: self.clone() });
        state.groups.insert(id, Arc::downgrade(&group));
        Ok(group)
    }

    fn attach(
        &self,
        state: &mut State,
        group: &File,
        address: PciAddress,
    ) -> Result<(), VfioError> {
        let os = |call| move |source| VfioError::os(address, call, source);
        sys::set_container(group, &self.fd).map_err(os(Call::SetContainer))?;
        let first = state.attached == 0;
        let done = (|| {
            if first {
                sys::set_type1(&self.fd).map_err(os(Call::SetIommu))?;
            }
            let (pages, answer) = sys::iommu_info(&self.fd).map_err(os(Call::IommuInfo))?;
            let (spans, page) = self.spans(pages, &answer);
            let reserved = |IovaSpan { first, last }| {
                let what = format!(
                    "memory is mapped at {first:#x} to {last:#x}, which its IOMMU group reserves"
                );
                let hint = "open all functions of a space before mapping memory";
                VfioError::unsupported(address, what, hint)
            };
            state.iova.set_valid(spans, page).map_err(reserved)?;
            if first { self.map_again(state) } else { Ok(()) }
        })();
        match done {
            Ok(()) => state.attached += 1,
            Err(_) => {
                // The first error is returned; a group that cannot leave does so when it is closed.
                let _ = sys::unset_container(group);
            }
        }
        done
    }

    /// Returns the address ranges and the page size of the IOMMU.
    fn spans(&self, page_sizes: u64, answer: &Answer) -> (Vec<IovaSpan>, u64) {
        // Smallest page that all IOMMUs of the container support, at least the machine's page.
        let page = if page_sizes == 0 { 4096 } else { 1 << page_sizes.trailing_zeros() };
        let spans = answer.iova_spans().unwrap_or_else(|| {
            let IovaSpan { first, last } = OLD_KERNEL_SPAN;
            tracing::warn!(
                space = %self.name,
                "the kernel does not say which I/O virtual addresses are reserved (it is older \
                 than 5.4); using {first:#x} to {last:#x}"
            );
            vec![OLD_KERNEL_SPAN]
        });
        (without(spans, &self.windows, page), page)
    }

    /// Restores the mappings that the kernel dropped when the last group left.
    fn map_again(&self, state: &State) -> Result<(), VfioError> {
        for (&iova, &(host, len)) in &state.live {
            // SAFETY: everything in `live` stays mapped in this process until `unmap` removes it,
            // and DmaMemory promises that no reference to it exists.
            let mapped = unsafe { sys::map(&self.fd, host, iova, len) };
            mapped.map_err(|source| self.map_error(state, len, source))?;
        }
        Ok(())
    }

    fn map_error(&self, state: &State, len: u64, source: io::Error) -> DmaError {
        let memlock = getrlimit(Resource::Memlock).current;
        let hint = map_hint(&source, memlock, state.mapped_bytes);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        DmaError::Os { space: self.name.clone(), len, source, hint }
    }

    /// Returns the size of the smallest mappable page in bytes.
    pub(super) fn page(&self) -> u64 {
        self.lock().iova.page()
    }

    /// Maps memory for the devices of the container as one range of I/O virtual addresses. GPU
    /// memory is aligned like the GPU's own address, not like its address in this process.
    ///
    /// # Safety
    /// Until [`Container::unmap`] succeeds, the memory must stay mapped in this process, and no
    /// Rust reference to it may exist.
    pub(super) unsafe fn map(
        &self,
        host: NonNull<u8>,
        device: Option<DevicePtr>,
        len: usize,
    ) -> Result<Iova, DmaError> {
        let mut state = self.lock();
        let address = host.as_ptr().addr() as u64;
        let (page, bytes) = (state.iova.page(), len as u64);
        if state.attached == 0 {
            return Err(DmaError::Unsupported {
                space: self.name.clone(),
                what: format!("memory of {len} bytes"),
                hint: "open a function in this space first: the IOMMU groups in it decide which \
                       addresses there are"
                    .into(),
            });
        }
        if len == 0 || !address.is_multiple_of(page) || !bytes.is_multiple_of(page) {
            let page = usize::try_from(page).unwrap_or(usize::MAX);
            return Err(DmaError::Unaligned { address, len, page });
        }
        self.check_entries(&state, len)?;
        let none = || DmaError::NoIova { space: self.name.clone(), len };
        let like = device.map_or(address, |device| device.0);
        let iova = state.iova.allocate(bytes, like).ok_or_else(none)?;
        // SAFETY: the caller's promise.
        if let Err(source) = unsafe { sys::map(&self.fd, host, iova, bytes) } {
            state.iova.release(iova);
            return Err(self.map_error(&state, bytes, source));
        }
        state.live.insert(iova, (host, bytes));
        state.mapped_bytes += bytes;
        tracing::debug!(space = %self.name, %iova, len, "mapped");
        Ok(iova)
    }

    /// Fails or warns before the kernel runs out of entries for mappings.
    fn check_entries(&self, state: &State, len: usize) -> Result<(), DmaError> {
        // A kernel that does not report it (before 5.10) fails with ENOSPC on exhaustion.
        let left = sys::iommu_info(&self.fd).ok().and_then(|(_, answer)| answer.dma_available());
        let mapped = state.live.len();
        match left {
            Some(0) => {
                let source = io::Error::from(Errno::NOSPC);
                let hint = format!(
                    "the container's {mapped} mappings are as many as it may have (module \
                     parameter vfio_iommu_type1.dma_entry_limit); map fewer, larger pieces"
                );
                return Err(DmaError::Os { space: self.name.clone(), len, source, hint });
            }
            Some(left) if left <= FEW_ENTRIES && left.is_power_of_two() => tracing::warn!(
                space = %self.name, left, mapped, "few DMA entries are left in the container"
            ),
            _ => {}
        }
        Ok(())
    }

    /// Unmaps memory from the devices. If this fails, the memory must not be freed.
    pub(super) fn unmap(&self, iova: Iova) -> io::Result<()> {
        let mut state = self.lock();
        let Some(&(_, len)) = state.live.get(&iova) else { return Ok(()) };
        // Without any group the kernel has unmapped everything already.
        if state.attached > 0 {
            let done = sys::unmap(&self.fd, iova, len)?;
            if done != len {
                return Err(io::Error::other(format!("{done} of {len} bytes were unmapped")));
            }
        }
        state.live.remove(&iova);
        state.iova.release(iova);
        state.mapped_bytes -= len;
        Ok(())
    }

    pub(super) fn status(&self) -> SpaceStatus {
        let state = self.lock();
        let answer = (state.attached > 0).then(|| sys::iommu_info(&self.fd).ok()).flatten();
        SpaceStatus {
            mappings: state.live.len(),
            mapped_bytes: state.mapped_bytes,
            mappings_left: answer.and_then(|(_, answer)| answer.dma_available()),
            groups: state.attached,
            iova_spans: state.iova.valid().to_vec(),
        }
    }
}

/// Exclusive right to drive a function.
#[derive(Debug)]
pub(super) struct Claim {
    address: PciAddress,
    container: Arc<Container>,
}

impl Claim {
    pub(super) fn set_node(&self, node: Option<u32>) {
        self.container.lock().claimed.insert(self.address, node);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.container.lock().claimed.remove(&self.address);
    }
}

/// An IOMMU group in the container. It leaves once its last function is closed: until then none of
/// them can be handed back to a kernel driver.
#[derive(Debug)]
pub(super) struct Group {
    id: u32,
    /// `None` only during drop.
    file: Option<File>,
    container: Arc<Container>,
}

impl Group {
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    pub(super) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let container = &self.container;
        let mut state = container.lock();
        if let Some(file) = self.file.take()
            && let Err(error) = sys::unset_container(&file)
        {
            let (space, group) = (&container.name, self.id);
            tracing::warn!(%space, group, %error, "the group could not leave the container");
        }
        state.attached = state.attached.saturating_sub(1);
        state.groups.remove(&self.id);
        // Fewer addresses may be reserved now.
        if state.attached > 0
            && let Ok((pages, answer)) = sys::iommu_info(&container.fd)
        {
            let (spans, page) = container.spans(pages, &answer);
            let _ = state.iova.set_valid(spans, page);
        }
        container.left.notify_all();
    }
}

fn open_group(function: &Function, group: u32) -> Result<File, VfioError> {
    let (root, address) = (&Root::machine(), function.bdf);
    let opened = sys::open(Path::new(&format!("/dev/vfio/{group}")));
    let file =
        opened.map_err(|source| match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::BUSY) => {
                VfioError::Busy { address, group, holders: holders(root, address) }
            }
            Some(Errno::NOENT) if !function.is_vfio() => {
                VfioError::NotBound { address, driver: function.driver.clone() }
            }
            _ => VfioError::os(address, Call::OpenGroup, source),
        })?;
    let flags = sys::group_flags(&file)
        .map_err(|source| VfioError::os(address, Call::GroupStatus, source))?;
    if flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
        return Err(VfioError::NotViable { address, group, blockers: blockers(root, group) });
    }
    Ok(file)
}

/// Returns the functions of a group that a kernel driver uses.
fn blockers(root: &Root, group: u32) -> Vec<String> {
    let members = group_members(root, group).into_iter().filter(|member| !member.is_viable());
    let driver = |member: &Function| member.driver.clone().unwrap_or_default();
    members.map(|member| format!("{} ({})", member.bdf, driver(&member))).collect()
}

/// Returns the processes that have a function or its group open, as far as this user may see.
fn holders(root: &Root, address: PciAddress) -> Vec<String> {
    let (files, _) = open_files(root);
    vfio_files(root, address, &files).into_iter().map(OpenFile::process).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_function() {
        let folder = tempfile::tempdir().unwrap();
        let address: PciAddress = "65:00.0".parse().unwrap();
        let function = folder.path().join("sys/bus/pci/devices/0000:65:00.0");
        std::fs::create_dir_all(function.join("vfio-dev/vfio3")).unwrap();
        std::os::unix::fs::symlink("../../groups/7", function.join("iommu_group")).unwrap();
        for (pid, comm, open) in [
            ("41", "bash", "/dev/null"),
            ("42", "qemu", "/dev/vfio/7"),
            ("43", "vmm", "/dev/vfio/devices/vfio3"),
            ("44", "other", "/dev/vfio/70"),
        ] {
            let process = folder.path().join("proc").join(pid);
            std::fs::create_dir_all(process.join("fd")).unwrap();
            std::fs::write(process.join("comm"), format!("{comm}\n")).unwrap();
            std::os::unix::fs::symlink(open, process.join("fd/3")).unwrap();
        }
        let root = Root::new(folder.path()).unwrap();
        assert_eq!(holders(&root, address), ["qemu (pid 42)", "vmm (pid 43)"]);
        assert!(holders(&root, "66:00.0".parse().unwrap()).is_empty());
        assert!(blockers(&root, 7).is_empty());
    }
}
