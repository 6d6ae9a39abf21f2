//! Scatter gather lists: effects, and every way to be invalid.

use nvme_spec::{
    sgl::{SglDescriptor, SglKind},
    sqe::Psdt,
};

use super::*;
use crate::SglSupport;

const fn kind(kind: u8, descriptor: SglDescriptor) -> SglDescriptor {
    SglDescriptor { identifier: kind, ..descriptor }
}

/// A host with a buffer and a page for lists.
struct Bench {
    host: Host,
    buffer: Arc<dyn DmaMemory>,
    list: Arc<dyn DmaMemory>,
}

impl Bench {
    fn new(change: impl FnOnce(EmuConfig) -> EmuConfig) -> Self {
        let host = Host::ready(change);
        let (buffer, list) = (host.alloc(16 * PAGE), host.alloc(4 * PAGE));
        host.media.poke(0, &pattern(1 << 16, 1)).unwrap();
        Self { host, buffer, list }
    }

    /// Describes `len` bytes at `offset` of the buffer.
    fn data(&self, offset: u64, len: u32) -> SglDescriptor {
        SglDescriptor::data_block(at(&self.buffer).0 + offset, len)
    }

    /// Writes `items` into the list memory at `offset` and returns a last segment for them.
    fn last(&self, offset: u64, items: &[SglDescriptor]) -> SglDescriptor {
        let place = at(&self.list).offset(offset);
        self.host.write(place, items.as_bytes());
        SglDescriptor::last_segment(place.0, 16 * items.len() as u32)
    }

    fn segment(&self, offset: u64, items: &[SglDescriptor]) -> SglDescriptor {
        let SglDescriptor { address, length, .. } = self.last(offset, items);
        SglDescriptor::segment(address, length)
    }

    /// Reads one block.
    fn read(&mut self, descriptor: SglDescriptor) -> Status {
        self.host.io(nvm(NvmOpcode::READ, 0, 1).with_sgl(descriptor))
    }

    fn write(&mut self, descriptor: SglDescriptor) -> Status {
        self.host.io(nvm(NvmOpcode::WRITE, 64, 1).with_sgl(descriptor))
    }
}

#[test]
fn blocks_segments_and_chains_scatter() {
    let mut bench = Bench::new(|config| config);
    assert_eq!(bench.read(bench.data(3, 512)), Status::SUCCESS);
    let expected = pattern(512, 1);
    assert_eq!(bench.host.read(at(&bench.buffer).offset(3), 512), expected);
    let third = [bench.data(8000, 12), bench.data(0, 0)];
    let third = bench.last(4000, &third);
    let second = bench.segment(2000, &[bench.data(6001, 99), third]);
    let first = bench.segment(0, &[bench.data(5000, 1), bench.data(4096, 400), second]);
    assert_eq!(bench.read(first), Status::SUCCESS);
    let parts = [(5000, 1), (4096, 400), (6001, 99), (8000, 12)];
    let read = |(offset, len): (u64, usize)| bench.host.read(at(&bench.buffer).offset(offset), len);
    assert_eq!(parts.into_iter().flat_map(read).collect::<Vec<u8>>(), expected);
    assert_eq!(bench.write(first), Status::SUCCESS);
    assert_eq!(bench.host.stored(64 * 512, 512), expected);
}

#[test]
fn long_lists_are_read_in_parts() {
    let mut bench = Bench::new(|config| config);
    let items: Vec<_> = (0..128).map(|at| bench.data(at * 8, 4)).collect();
    let list = bench.last(0, &items);
    assert_eq!(bench.read(list), Status::SUCCESS);
    let expected = pattern(512, 1);
    for (index, four) in expected.chunks(4).enumerate() {
        assert_eq!(bench.host.read(at(&bench.buffer).offset(index as u64 * 8), 4), four);
    }
}

#[test]
fn bit_buckets_discard_reads_and_are_empty_in_writes() {
    let mut bench = Bench::new(|config| config);
    let before = bench.host.controller.counters().bytes_read;
    let items = [bench.data(0, 100), SglDescriptor::bit_bucket(300), bench.data(100, 112)];
    let list = bench.last(0, &items);
    assert_eq!(bench.read(list), Status::SUCCESS);
    let expected = pattern(512, 1);
    let got = bench.host.read(at(&bench.buffer), 212);
    assert_eq!((&got[..100], &got[100..]), (&expected[..100], &expected[400..]));
    assert_eq!(bench.host.controller.counters().bytes_read - before, 212);
    assert_eq!(bench.read(SglDescriptor::bit_bucket(512)), Status::SUCCESS);
    assert_eq!(bench.write(list), Status::DATA_SGL_LENGTH_INVALID, "a bucket brings no bytes");
    let items = [SglDescriptor::bit_bucket(77), bench.data(0, 512), SglDescriptor::bit_bucket(9)];
    let list = bench.last(0, &items);
    assert_eq!(bench.write(list), Status::SUCCESS);
    let mut without = Bench::new(|config| EmuConfig { bit_bucket: false, ..config });
    let bucket = SglDescriptor::bit_bucket(512);
    assert_eq!(without.read(bucket), Status::SGL_DESCRIPTOR_TYPE_INVALID);
}

#[test]
fn lengths_have_to_match() {
    let mut bench = Bench::new(|config| config);
    for (parts, good) in [
        (&[512][..], true),
        (&[511], false),
        (&[513], false),
        (&[0], false),
        (&[256, 256], true),
        (&[256, 255], false),
        (&[256, 257], false),
        (&[512, 0, 0], true),
        (&[512, 1], false),
        (&[u32::MAX, u32::MAX], false),
    ] {
        let items: Vec<_> = parts.iter().map(|len| bench.data(0, *len)).collect();
        let list = if let [one] = items[..] { one } else { bench.last(0, &items) };
        let status = if good { Status::SUCCESS } else { Status::DATA_SGL_LENGTH_INVALID };
        assert_eq!((bench.read(list), bench.write(list)), (status, status), "{parts:?}");
    }
}

#[test]
fn types_are_checked() {
    let mut bench = Bench::new(|config| config);
    let data = bench.data(0, 512);
    // Subtypes, keyed and transport descriptors, reserved and vendor types.
    for identifier in [0x01, 0x0f, 0x11, 0x40, 0x50, 0x60, 0xf0] {
        let bad = kind(identifier, data);
        assert_eq!(bench.read(bad), Status::SGL_DESCRIPTOR_TYPE_INVALID, "{identifier:x}");
        let list = bench.last(0, &[bad]);
        assert_eq!(bench.read(list), Status::SGL_DESCRIPTOR_TYPE_INVALID, "{identifier:x}");
    }
    let list = bench.last(0, &[data]);
    for identifier in [0x21, 0x31] {
        assert_eq!(bench.read(kind(identifier, list)), Status::SGL_DESCRIPTOR_TYPE_INVALID);
    }
    assert_eq!(bench.read(list), Status::SUCCESS);
}

#[test]
fn segments_are_checked() {
    let mut bench = Bench::new(|config| config);
    let (half, rest) = (bench.data(0, 256), bench.data(256, 256));
    let list = bench.last(0, &[half, rest]);
    let with = |length, address| SglDescriptor { length, address, ..list };
    for bad in [
        with(0, list.address),
        with(8, list.address),
        with(24, list.address),
        with(32, list.address + 4),
    ] {
        assert_eq!(bench.read(bad), Status::INVALID_SGL_SEGMENT_DESCRIPTOR, "{bad:?}");
    }
    let unmapped = with(32, 0x1000);
    assert_eq!(bench.read(unmapped), Status::DATA_TRANSFER_ERROR);
    // A segment other than the last ends without a pointer.
    let ends = bench.segment(0, &[half, rest]);
    assert_eq!(bench.read(ends), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    let inner = bench.last(512, &[rest]);
    // The last segment ends with a pointer.
    let on = bench.last(0, &[half, inner]);
    assert_eq!(bench.read(on), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    // A segment in the middle of another.
    for middle in [inner, SglDescriptor { identifier: SglKind::SEGMENT.0 << 4, ..inner }] {
        let list = bench.segment(0, &[half, middle, inner]);
        assert_eq!(bench.read(list), Status::INVALID_SGL_DESCRIPTOR_COUNT);
    }
}

#[test]
fn endless_chains_end() {
    let mut bench = Bench::new(|config| config);
    let place = at(&bench.list).0;
    let itself = SglDescriptor::segment(place, 16);
    bench.segment(0, &[itself]);
    assert_eq!(bench.read(itself), Status::INVALID_SGL_DESCRIPTOR_COUNT);
    let huge = SglDescriptor::last_segment(place, u32::MAX - 15);
    assert_eq!(bench.read(huge), Status::INVALID_SGL_DESCRIPTOR_COUNT);
}

#[test]
fn psdt_has_to_be_one_the_controller_takes() {
    let mut bench = Bench::new(|config| config);
    let data = bench.data(0, 512);
    let sqe = nvm(NvmOpcode::READ, 0, 1).with_sgl(data);
    for psdt in [Psdt::SGL_MPTR_SGL, Psdt(3)] {
        assert_eq!(bench.host.io(sqe.with_psdt(psdt)), Status::INVALID_FIELD);
    }
    let mut page = command(AdminOpcode::IDENTIFY, 0).with_sgl(bench.data(0, 4096));
    page.cdw10 = 1;
    assert_eq!(bench.host.admin_status(page), Status::INVALID_FIELD);
    let mut none = Bench::new(|config| EmuConfig { sgl: SglSupport::None, ..config });
    assert_eq!(none.read(none.data(0, 512)), Status::INVALID_FIELD);
    assert_eq!(none.host.identify(1, 0).unwrap()[536..540], [0; 4]);
}

#[test]
fn dword_controllers_take_dwords() {
    let mut bench = Bench::new(|config| EmuConfig { sgl: SglSupport::Dword, ..config });
    assert_eq!(bench.read(bench.data(4, 512)), Status::SUCCESS);
    for (offset, len) in [(1, 512), (2, 512), (0, 510), (0, 511)] {
        let bad = bench.data(offset, len);
        assert_eq!(bench.read(bad), Status::SGL_DATA_BLOCK_GRANULARITY_INVALID);
        let list = bench.last(0, &[bad]);
        assert_eq!(bench.write(list), Status::SGL_DATA_BLOCK_GRANULARITY_INVALID);
    }
}

#[test]
fn refused_data_moves_nothing() {
    let mut bench = Bench::new(|config| config);
    let good = bench.data(0, 256);
    for bad in [0x1000, u64::MAX - 255, at(&bench.buffer).0 + 16 * PAGE as u64 - 255] {
        let list = bench.last(0, &[good, SglDescriptor::data_block(bad, 256)]);
        assert_eq!(bench.read(list), Status::DATA_TRANSFER_ERROR);
        assert_eq!(bench.host.read(at(&bench.buffer), 256), vec![0; 256]);
    }
}
