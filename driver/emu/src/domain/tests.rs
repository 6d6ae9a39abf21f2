#![allow(unsafe_code, reason = "imports memory that the tests own")]

use std::sync::mpsc;

use proptest::prelude::*;

use super::*;

/// Page-aligned memory with its own owner, which reports when it is freed.
struct Owned {
    map: HostMap,
    gone: mpsc::Sender<()>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.gone.send(());
    }
}

fn external(len: usize) -> (ExternalMemory, NonNull<u8>, mpsc::Receiver<()>) {
    let (gone, heard) = mpsc::channel();
    let owner = Arc::new(Owned { map: HostMap::anonymous(len).unwrap(), gone });
    let host = owner.map.ptr();
    // SAFETY: the owner holds the mapping; the tests create no references into it.
    let memory = unsafe { ExternalMemory::new(Some(host), None, len, owner) };
    (memory, host, heard)
}

fn iova(memory: &Arc<dyn DmaMemory>) -> Iova {
    memory.segments()[0].iova
}

#[test]
fn allocated_memory_is_zero_and_seen_from_both_sides() {
    let domain = EmuDomain::new("test");
    let memory = domain.alloc(5000).unwrap();
    assert_eq!(memory.len(), 2 * page_bytes(), "whole pages");
    let host = memory.host().unwrap();
    assert_ne!(iova(&memory).0, host.as_ptr().addr() as u64);
    assert!(iova(&memory).0 >= IOVA_FIRST);
    let access = domain.access();
    let mut bytes = [1u8; 16];
    access.read(iova(&memory), &mut bytes).unwrap();
    assert_eq!(bytes, [0; 16]);
    access.write(iova(&memory).offset(3), b"ripieno").unwrap();
    // SAFETY: inside the mapping, which is not being written.
    assert_eq!(unsafe { host.add(3).read() }, b'r');
    access.write_u32(iova(&memory).offset(100), 0x0403_0201).unwrap();
    access.write(iova(&memory).offset(112), &7u64.to_le_bytes()).unwrap();
    assert_eq!(access.read_u32(iova(&memory).offset(101)).unwrap(), 0x0004_0302);
    assert_eq!(access.read_u64(iova(&memory).offset(112)).unwrap(), 7);
    access.store_release32(iova(&memory).offset(8), 9).unwrap();
    assert_eq!(access.load_acquire32(iova(&memory).offset(8)).unwrap(), 9);
    access.fill(iova(&memory), 0xEE, 2).unwrap();
    assert_eq!(access.read_u32(iova(&memory)).unwrap() & 0xFFFF, 0xEEEE);
    assert_eq!(domain.refused(), 0);
}

#[test]
fn unmapped_overlong_and_misaligned_accesses_are_refused_and_counted() {
    let domain = EmuDomain::new("test");
    let a = domain.alloc(4096).unwrap();
    let b = domain.alloc(4096).unwrap();
    let access = domain.access();
    let mut byte = [0u8];
    let mut kind = |at: u64| access.read(Iova(at), &mut byte).unwrap_err().kind;
    assert_eq!(kind(0), DmaFaultKind::Unmapped);
    assert_eq!(kind(IOVA_FIRST - 1), DmaFaultKind::Unmapped);
    assert_eq!(kind(iova(&a).0 + 4096), DmaFaultKind::Unmapped, "one past the end");
    assert_eq!(kind(iova(&b).0 - 1), DmaFaultKind::Unmapped, "one before the start");
    assert_eq!(kind(u64::MAX), DmaFaultKind::Unmapped);
    assert_eq!(kind(a.host().unwrap().as_ptr().addr() as u64), DmaFaultKind::Unmapped);
    let past = access.write(iova(&a).offset(4090), &[0; 7]).unwrap_err();
    assert_eq!(past.kind, DmaFaultKind::PastEnd);
    assert!(past.to_string().contains("7 bytes"), "{past}");
    let odd = access.load_acquire32(iova(&a).offset(2)).unwrap_err();
    assert_eq!(odd.kind, DmaFaultKind::Misaligned);
    let mut sg_list = SgList::new();
    assert!(access.push(&mut sg_list, iova(&a), usize::MAX).is_err());
    assert_eq!(sg_list.bytes(), 0);
    assert_eq!(domain.refused(), 9);
}

#[test]
fn addresses_are_not_used_again() {
    let domain = EmuDomain::new("test");
    let first = domain.alloc(4096).unwrap();
    let old = iova(&first);
    drop(first);
    let second = domain.alloc(4096).unwrap();
    assert_ne!(iova(&second), old);
    assert!(domain.access().resolve(old, 1).is_err(), "a stale address is not given out again");
    assert_eq!(domain.mapped().len(), 1);
}

#[test]
fn imported_memory_is_checked_and_kept() {
    let domain = EmuDomain::new("test");
    let (memory, host, gone) = external(2 * page_bytes());
    let mapped = domain.import(memory).unwrap();
    domain.access().write(iova(&mapped), b"x").unwrap();
    // SAFETY: the owner lives, and the memory is not being written.
    assert_eq!(unsafe { host.read() }, b'x');
    assert!(gone.try_recv().is_err());
    drop(mapped);
    gone.try_recv().expect("the owner goes with the mapping");

    let (memory, host, _gone) = external(page_bytes());
    let (_, _, _, owner) = memory.into_parts();
    // SAFETY: as in `external`.
    let odd = unsafe { ExternalMemory::new(Some(host), None, 100, owner.clone()) };
    assert!(matches!(domain.import(odd), Err(DmaError::Unaligned { .. })));
    // SAFETY: an address only for the GPU, which is refused before it is used.
    let gpu = unsafe { ExternalMemory::new(None, Some(DevicePtr(1 << 40)), 4096, owner) };
    let error = domain.import(gpu).unwrap_err().to_string();
    assert!(error.contains("offer that address too"), "{error}");
}

#[test]
fn memory_in_flight_outlives_its_mapping() {
    let domain = EmuDomain::new("test");
    let (memory, host, gone) = external(page_bytes());
    let mapped = domain.import(memory).unwrap();
    let at = iova(&mapped);
    let mut sg_list = SgList::new();
    domain.access().push(&mut sg_list, at, 64).unwrap();
    drop(mapped);
    assert!(domain.access().resolve(at, 1).is_err(), "nothing new finds it");
    assert!(gone.try_recv().is_err(), "but it is still there");
    // SAFETY: `sg_list` keeps the owner alive.
    unsafe { host.write(1) };
    sg_list.clear();
    gone.try_recv().expect("and goes with the last transfer");
}

#[test]
fn dropping_a_mapping_waits_for_accesses() {
    let domain = EmuDomain::new("test");
    let mapped = domain.alloc(4096).unwrap();
    let (started, begin) = mpsc::channel();
    let (ended, end) = mpsc::channel();
    let access = domain.access();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            started.send(()).unwrap();
            drop(mapped);
            ended.send(()).unwrap();
        });
        begin.recv().unwrap();
        let early = end.recv_timeout(Duration::from_millis(20));
        assert!(early.is_err(), "unmapped under an access");
        drop(access);
        end.recv_timeout(Duration::from_secs(600)).expect("and goes on after it");
    });
}

#[test]
fn pieces_join_and_shorten() {
    let domain = EmuDomain::new("test");
    let a = domain.alloc(8192).unwrap();
    let b = domain.alloc(4096).unwrap();
    let mut sg_list = SgList::new();
    let access = domain.access();
    access.push(&mut sg_list, iova(&a), 512).unwrap();
    access.push(&mut sg_list, iova(&a).offset(512), 512).unwrap();
    assert_eq!(sg_list.as_slice().len(), 1, "neighbours join");
    access.push(&mut sg_list, iova(&a).offset(4096), 100).unwrap();
    sg_list.push_hole(50);
    sg_list.push_hole(50);
    access.push(&mut sg_list, iova(&b), 4096).unwrap();
    assert_eq!(sg_list.as_slice().len(), 4);
    assert_eq!(sg_list.bytes(), 1024 + 100 + 100 + 4096);
    sg_list.truncate(1024 + 100 + 30);
    assert_eq!(sg_list.bytes(), 1154);
    assert_eq!(sg_list.as_slice().last(), Some(&SgEntry { host: None, len: 30 }));
    sg_list.truncate(0);
    assert!(sg_list.as_slice().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Compares the table with a plain list: an access succeeds exactly inside one live mapping.
    #[test]
    fn lookup_agrees_with_a_list(
        sizes in proptest::collection::vec(1usize..40_000, 1..12),
        drops in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6),
        probes in proptest::collection::vec((0u64..2_000_000, 1usize..50_000), 40),
    ) {
        let domain = EmuDomain::new("test");
        let mut live: Vec<_> = sizes.iter().map(|len| domain.alloc(*len).unwrap()).collect();
        for index in drops {
            if !live.is_empty() {
                live.remove(index.index(live.len()));
            }
        }
        let access = domain.access();
        for (offset, len) in probes {
            let start = IOVA_FIRST + offset;
            let expected = live.iter().find_map(|memory| {
                let range = memory.segments()[0];
                let end = range.iova.0 + range.len;
                let inside = range.iova.0 <= start && start + len as u64 <= end;
                let delta = usize::try_from(start.wrapping_sub(range.iova.0)).unwrap();
                inside.then(|| memory.host().unwrap().as_ptr().wrapping_add(delta))
            });
            let found = access.resolve(Iova(start), len).ok().and_then(|entry| entry.host);
            prop_assert_eq!(found.map(NonNull::as_ptr), expected);
        }
    }
}
