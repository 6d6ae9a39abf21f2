mod sim_faults;

use std::sync::Arc;

use nvme_driver::{DmaMemory, DmaSpace, Iova};
use proptest::prelude::*;

use super::*;
use crate::domain::EmuDomain;

const CAPACITY: u64 = 256 << 10;
const UNIT: u64 = 512;
/// Bytes of DMA memory: each transfer takes its memory from anywhere in it.
const ARENA: usize = 128 << 10;

/// A medium and memory for transfers.
struct Rig {
    domain: Arc<EmuDomain>,
    arena: Arc<dyn DmaMemory>,
    media: Box<dyn Media>,
    now: Nanos,
    token: u64,
}

impl Rig {
    fn new(media: impl Media + 'static) -> Self {
        let domain = EmuDomain::new("test");
        let arena = domain.alloc(ARENA).unwrap();
        Self { domain, arena, media: Box::new(media), now: Nanos(0), token: 0 }
    }

    fn iova(&self, offset: usize) -> Iova {
        self.arena.segments()[0].iova.offset(offset as u64)
    }

    fn op(&mut self, kind: MediaKind, offset: u64, len: u64, sg_list: SgList) -> MediaOp {
        self.token += 1;
        let (token, placement, fault) = (self.token, 0, DataFault::None);
        MediaOp { token, kind, offset, len, sg_list, placement, fault }
    }

    fn wait(&mut self, first: Option<MediaDone>) -> MediaDone {
        let mut done = Vec::from_iter(first);
        while done.is_empty() {
            assert!(self.media.in_flight() > 0, "nothing in flight and nothing done");
            match self.media.next_event() {
                Some(event) => self.now = event,
                None => std::thread::yield_now(),
            }
            self.media.poll(self.now, &mut done);
        }
        assert_eq!(done.len(), 1);
        let done = done.remove(0);
        assert_eq!(done.token, self.token);
        done
    }

    fn run(&mut self, op: MediaOp) -> Result<(), MediaError> {
        let first = self.media.submit(op, self.now);
        self.wait(first).result
    }

    fn simple(&mut self, kind: MediaKind, offset: u64, len: u64) -> Result<(), MediaError> {
        let op = self.op(kind, offset, len, SgList::new());
        self.run(op)
    }

    /// Lists memory in the arena: (offset, length), with holes as `None`.
    fn sg_list(&self, parts: &[(Option<usize>, usize)]) -> SgList {
        let (mut sg_list, access) = (SgList::new(), self.domain.access());
        for (offset, len) in parts {
            match offset {
                Some(offset) => access.push(&mut sg_list, self.iova(*offset), *len).unwrap(),
                None => sg_list.push_hole(*len),
            }
        }
        sg_list
    }

    fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), MediaError> {
        self.domain.access().write(self.iova(0), bytes).unwrap();
        let sg_list = self.sg_list(&[(Some(0), bytes.len())]);
        let op = self.op(MediaKind::Write { fua }, offset, bytes.len() as u64, sg_list);
        self.run(op)
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, MediaError> {
        let sg_list = self.sg_list(&[(Some(0), len)]);
        let op = self.op(MediaKind::Read, offset, len as u64, sg_list);
        self.run(op)?;
        let mut bytes = vec![0; len];
        self.domain.access().read(self.iova(0), &mut bytes).unwrap();
        Ok(bytes)
    }
}

#[derive(Debug, Clone)]
enum Action {
    Write { block: u64, parts: Vec<(usize, usize)>, fill: u8, fua: bool },
    Read { block: u64, parts: Vec<(usize, usize)>, hole: bool },
    Zero { block: u64, blocks: u64, deallocate: bool },
    Flush,
}

/// Generates parts of one transfer: non-overlapping places in the arena, multiples of `unit` long,
/// and whole blocks of `block` bytes in total.
fn parts(unit: usize, block: usize) -> impl Strategy<Value = Vec<(usize, usize)>> {
    let part = (0..2048usize, 1..(14_336 / unit).clamp(2, 8));
    proptest::collection::vec(part, 1..5).prop_map(move |parts| {
        let place = |(index, (shift, count))| {
            let slack = shift / unit * unit;
            (16_384 * index + slack, count * unit)
        };
        let mut parts: Vec<_> = parts.into_iter().enumerate().map(place).collect();
        let total: usize = parts.iter().map(|(_, len)| len).sum();
        let rest = total.next_multiple_of(block) - total;
        parts.push((100 * 1024, rest + block));
        parts
    })
}

fn action(unit: usize) -> impl Strategy<Value = Action> {
    action_on(unit, 512)
}

/// Generates actions on multiples of `block` bytes; offsets on the medium count in `UNIT`s.
fn action_on(unit: usize, block: usize) -> impl Strategy<Value = Action> {
    let scale = block as u64 / UNIT;
    let place = (0..(CAPACITY - (72 << 10)) / block as u64).prop_map(move |place| place * scale);
    let blocks = (0..40 / scale).prop_map(move |blocks| blocks * scale);
    prop_oneof![
        4 => (place.clone(), parts(unit, block), any::<u8>(), any::<bool>())
            .prop_map(|(block, parts, fill, fua)| Action::Write { block, parts, fill, fua }),
        4 => (place.clone(), parts(unit, block), any::<bool>())
            .prop_map(|(block, parts, hole)| Action::Read { block, parts, hole }),
        2 => (place, blocks, any::<bool>())
            .prop_map(|(block, blocks, deallocate)| Action::Zero { block, blocks, deallocate }),
        1 => Just(Action::Flush),
    ]
}

/// Applies `actions` to `rig` and to a plain vector; every read must agree.
fn check_against_vector(rig: &mut Rig, actions: &[Action]) {
    let mut model = vec![0u8; usize::try_from(CAPACITY).unwrap()];
    for action in actions {
        match action {
            Action::Write { block, parts, fill, fua } => {
                write_both(rig, &mut model, *block, parts, *fill, *fua)
            }
            Action::Read { block, parts, hole } => read_both(rig, &model, *block, parts, *hole),
            Action::Zero { block, blocks, deallocate } => {
                let kind = if *deallocate { MediaKind::Deallocate } else { MediaKind::WriteZeroes };
                rig.simple(kind, block * UNIT, blocks * UNIT).unwrap();
                let start = usize::try_from(block * UNIT).unwrap();
                model[start..start + usize::try_from(blocks * UNIT).unwrap()].fill(0);
            }
            Action::Flush => rig.simple(MediaKind::Flush, 0, 0).unwrap(),
        }
    }
    let all = [(0, ARENA)];
    for start in (0..CAPACITY).step_by(ARENA) {
        read_both(rig, &model, start / UNIT, &all, false);
    }
}

fn write_both(
    rig: &mut Rig,
    model: &mut [u8],
    block: u64,
    parts: &[(usize, usize)],
    fill: u8,
    fua: bool,
) {
    let mut at = usize::try_from(block * UNIT).unwrap();
    let offset = at as u64;
    for (index, (place, len)) in parts.iter().enumerate() {
        let byte = |i: usize| fill.wrapping_add(u8::try_from((i + index) % 251).unwrap());
        let bytes: Vec<u8> = (0..*len).map(byte).collect();
        rig.domain.access().write(rig.iova(*place), &bytes).unwrap();
        model[at..at + len].copy_from_slice(&bytes);
        at += len;
    }
    let listed: Vec<_> = parts.iter().map(|(place, len)| (Some(*place), *len)).collect();
    let sg_list = rig.sg_list(&listed);
    let len = sg_list.bytes();
    let op = rig.op(MediaKind::Write { fua }, offset, len, sg_list);
    rig.run(op).unwrap();
}

fn read_both(rig: &mut Rig, model: &[u8], block: u64, parts: &[(usize, usize)], hole: bool) {
    rig.domain.access().fill(rig.iova(0), 0xCC, ARENA).unwrap();
    let skipped = |index: usize| hole && index % 2 == 1;
    let listed: Vec<_> = parts
        .iter()
        .enumerate()
        .map(|(index, (place, len))| ((!skipped(index)).then_some(*place), *len))
        .collect();
    let sg_list = rig.sg_list(&listed);
    let len = sg_list.bytes();
    let op = rig.op(MediaKind::Read, block * UNIT, len, sg_list);
    rig.run(op).unwrap();
    let mut at = usize::try_from(block * UNIT).unwrap();
    for (index, (place, len)) in parts.iter().enumerate() {
        let mut bytes = vec![0; *len];
        rig.domain.access().read(rig.iova(*place), &mut bytes).unwrap();
        if skipped(index) {
            assert!(bytes.iter().all(|byte| *byte == 0xCC), "a hole was written to");
        } else {
            assert_eq!(bytes, model[at..at + len], "part {index} of a read of block {block}");
        }
        at += len;
    }
}

fn file(direct: bool) -> (tempfile::TempDir, FileMedia) {
    let dir = tempfile::tempdir().unwrap();
    let options = FileOptions { direct, depth: 8, ..FileOptions::default() };
    let media = FileMedia::open(&dir.path().join("medium"), CAPACITY, options).unwrap();
    (dir, media)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn memory_is_a_vector(actions in proptest::collection::vec(action(1), 1..40)) {
        let media = Overlay::new(Box::new(MemoryMedia::new(CAPACITY).unwrap()));
        check_against_vector(&mut Rig::new(media), &actions);
    }

    #[test]
    fn sim_is_a_vector(actions in proptest::collection::vec(action(1), 1..40), seed: u64) {
        let options = SimOptions { seed, lba_bytes: 512, ..SimOptions::default() };
        let media = SimMedia::new(MemoryMedia::new(CAPACITY).unwrap(), options);
        check_against_vector(&mut Rig::new(media), &actions);
    }

    #[test]
    fn cached_file_is_a_vector(actions in proptest::collection::vec(action(1), 1..20)) {
        let (_dir, media) = file(false);
        check_against_vector(&mut Rig::new(media), &actions);
    }

    /// Parts of any length and address (bounced) and of whole blocks (direct), in blocks that every
    /// filesystem's direct I/O supports.
    #[test]
    fn direct_file_is_a_vector(
        bounced in proptest::collection::vec(action_on(1, 4096), 1..10),
        straight in proptest::collection::vec(action_on(4096, 4096), 1..10),
    ) {
        let (_dir, media) = file(true);
        prop_assert!(media.granularity_bytes() <= 4096);
        let actions: Vec<_> = bounced.into_iter().chain(straight).collect();
        check_against_vector(&mut Rig::new(media), &actions);
    }

    /// After power loss every block has a content that it had since it was durable.
    #[test]
    fn power_loss_leaves_old_or_new_blocks(
        writes in proptest::collection::vec((0u64..16, 1u64..4, 0u8..4), 1..40),
        seed: u64,
    ) {
        power_loss_case(&writes, seed);
    }
}

fn power_loss_case(writes: &[(u64, u64, u8)], seed: u64) {
    let options = SimOptions { seed, lba_bytes: 512, ..SimOptions::default() };
    let bytes = MemoryMedia::new(20 * UNIT).unwrap();
    let mut rig = Rig::new(SimMedia::new(bytes.clone(), options));
    let mut allowed = vec![vec![0u8]; 20];
    for (index, (block, blocks, what)) in writes.iter().enumerate() {
        let fill = u8::try_from(index + 1).unwrap();
        let touched = usize::try_from(*block).unwrap()..usize::try_from(block + blocks).unwrap();
        let content = vec![fill; usize::try_from(blocks * UNIT).unwrap()];
        match what {
            0 => {
                rig.simple(MediaKind::Flush, 0, 0).unwrap();
                allowed.iter_mut().for_each(|past| *past = vec![*past.last().unwrap()]);
            }
            1 => {
                rig.write(block * UNIT, &content, true).unwrap();
                allowed[touched].iter_mut().for_each(|past| *past = vec![fill]);
            }
            _ => {
                rig.write(block * UNIT, &content, false).unwrap();
                allowed[touched].iter_mut().for_each(|past| past.push(fill));
            }
        }
    }
    // One more write is in flight when the power fails; its memory outlives that.
    rig.domain.access().fill(rig.iova(0), 0xFF, 4 * 512).unwrap();
    let sg_list = rig.sg_list(&[(Some(0), 4 * 512)]);
    let op = rig.op(MediaKind::Write { fua: false }, 0, 4 * UNIT, sg_list);
    assert!(rig.media.submit(op, rig.now).is_none());
    allowed[..4].iter_mut().for_each(|past| past.push(0xFF));
    rig.media.power_loss();
    assert_eq!(rig.media.in_flight(), 0);
    let mut done = Vec::new();
    rig.media.poll(Nanos::MAX, &mut done);
    assert!(done.is_empty(), "a lost operation came back");
    for (block, past) in allowed.iter().enumerate() {
        let mut found = [0u8; 512];
        bytes.peek(block as u64 * UNIT, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == found[0]), "block {block} is torn inside");
        assert!(past.contains(&found[0]), "block {block}: {} is none of {past:?}", found[0]);
    }
}

#[test]
fn unflushed_writes_do_get_lost() {
    let mut lost = 0;
    for seed in 0..32 {
        let options = SimOptions { seed, lba_bytes: 512, ..SimOptions::default() };
        let mut rig = Rig::new(SimMedia::new(MemoryMedia::new(CAPACITY).unwrap(), options));
        rig.write(0, &[7; 512], false).unwrap();
        rig.media.power_loss();
        lost += u32::from(rig.read(0, 512).unwrap()[0] == 0);
    }
    assert!((4..28).contains(&lost), "{lost} of 32 writes were lost");
}

#[test]
fn a_flush_covers_what_had_finished_when_it_was_submitted() {
    let latency = |ns| Latency { min_ns: ns, mean_ns: ns, ..Latency::default() };
    let (write, flush) = (latency(10), latency(1000));
    let base = SimOptions { write, flush, lba_bytes: 512, ..SimOptions::default() };
    let bytes = MemoryMedia::new(CAPACITY).unwrap();
    let mut sim = SimMedia::new(bytes, base);
    let rig = Rig::new(MemoryMedia::new(1).unwrap());
    let mut submit = |kind, at, now| {
        let sg_list = rig.sg_list(&[(Some(0), if kind == MediaKind::Flush { 0 } else { 512 })]);
        let len = sg_list.bytes();
        let (offset, placement, fault) = (at, 0, DataFault::None);
        let op = MediaOp { token: now, kind, offset, len, sg_list, placement, fault };
        assert!(sim.submit(op, Nanos(now)).is_none());
        let mut done = Vec::new();
        sim.poll(Nanos(now + 100), &mut done);
        (done.len(), sim.volatile_blocks())
    };
    let write = MediaKind::Write { fua: false };
    assert_eq!(submit(write, 0, 0), (1, 1));
    assert_eq!(submit(MediaKind::Flush, 0, 200), (0, 1));
    assert_eq!(submit(write, 512, 400), (1, 2));
    let mut done = Vec::new();
    sim.poll(Nanos(1200), &mut done);
    assert_eq!((done.len(), sim.volatile_blocks()), (1, 1), "the second write came too late");
}

#[test]
fn sim_finishes_out_of_order_and_the_same_way_for_a_seed() {
    let order = |seed| {
        let options = SimOptions { seed, ..SimOptions::default() };
        let mut rig = Rig::new(SimMedia::new(MemoryMedia::new(CAPACITY).unwrap(), options));
        for block in 0..32 {
            let sg_list = rig.sg_list(&[(Some(0), 512)]);
            let op = rig.op(MediaKind::Read, block * 512, 512, sg_list);
            assert!(rig.media.submit(op, Nanos(0)).is_none());
        }
        let mut done = Vec::new();
        while let Some(event) = rig.media.next_event() {
            rig.media.poll(event, &mut done);
        }
        done.iter().map(|done| done.token).collect::<Vec<_>>()
    };
    assert_eq!(order(5), order(5));
    assert_ne!(order(5), order(6));
    assert!(!order(5).is_sorted());
}

#[test]
fn latencies_have_their_mean_and_tail() {
    let latency = Latency { min_ns: 100, mean_ns: 300, tail_ns: 9000, tail_ppm: 100_000 };
    let options = SimOptions { read: latency, ..SimOptions::default() };
    let mut rig = Rig::new(SimMedia::new(MemoryMedia::new(CAPACITY).unwrap(), options));
    let (mut tail, mut sum) = (0u64, 0u64);
    for _ in 0..2000 {
        let before = rig.now;
        rig.read(0, 512).unwrap();
        match (rig.now - before).0 {
            9000 => tail += 1,
            ns => {
                assert!((100..=500).contains(&ns), "{ns}");
                sum += ns;
            }
        }
    }
    assert!((140..260).contains(&tail), "{tail}");
    assert!((290..310).contains(&(sum / (2000 - tail))));
}

#[test]
fn memory_handles_share_their_bytes() {
    let media = MemoryMedia::new(CAPACITY).unwrap();
    Rig::new(media.clone()).write(512, &[3; 512], false).unwrap();
    assert_eq!(Rig::new(media.clone()).read(512, 512).unwrap(), [3; 512]);
    let huge = MemoryMedia::new(1 << 42).unwrap();
    huge.poke((1 << 42) - 1, &[1]).unwrap();
    assert!(huge.poke(1 << 42, &[1]).is_err());
    assert!(MemoryMedia::new(u64::MAX).is_err());
}

#[test]
fn bad_operations_move_nothing() {
    let (_dir, file) = file(false);
    let sim = SimMedia::new(MemoryMedia::new(CAPACITY).unwrap(), SimOptions::default());
    for mut rig in [
        Rig::new(MemoryMedia::new(CAPACITY).unwrap()),
        Rig::new(sim),
        Rig::new(file),
        Rig::new(Overlay::new(Box::new(MemoryMedia::new(CAPACITY).unwrap()))),
    ] {
        let error = rig.read(CAPACITY - 512, 1024).unwrap_err();
        assert!(matches!(error, MediaError::OutOfRange { .. }), "{error}");
        let error = rig.simple(MediaKind::WriteZeroes, u64::MAX, 2).unwrap_err();
        assert!(matches!(error, MediaError::OutOfRange { .. }), "{error}");
        let sg_list = rig.sg_list(&[(Some(0), 100)]);
        let op = rig.op(MediaKind::Read, 0, 512, sg_list);
        let error = rig.run(op).unwrap_err();
        assert_eq!(error, MediaError::Length { len: 512, memory: 100 });
    }
}

#[test]
fn twists_change_bytes_and_report_success() {
    let store = MemoryMedia::new(CAPACITY).unwrap();
    let mut rig = Rig::new(Overlay::new(Box::new(store.clone())));
    let mut twisted = |kind, offset, fault| {
        rig.domain.access().fill(rig.iova(0), 9, 8192).unwrap();
        let sg_list = rig.sg_list(&[(Some(0), 1000), (Some(2000), 3096)]);
        let op = MediaOp { fault, ..rig.op(kind, offset, 4096, sg_list) };
        rig.run(op).unwrap();
        let mut bytes = vec![0; 8192];
        rig.domain.access().read(rig.iova(0), &mut bytes).unwrap();
        bytes
    };
    let write = MediaKind::Write { fua: false };
    let nines = |offset, len: usize| {
        let mut bytes = vec![0; len];
        store.peek(offset, &mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte == 9).count()
    };
    twisted(write, 0, DataFault::Torn { keep_bytes: 1500 });
    assert_eq!((nines(0, 1500), nines(1500, 4096)), (1500, 0));
    twisted(write, 0, DataFault::Torn { keep_bytes: 0 });
    twisted(write, 8192, DataFault::Misdirected { delta_bytes: 4096 });
    assert_eq!((nines(8192, 4096), nines(12_288, 4096)), (0, 4096));
    twisted(write, 0, DataFault::Misdirected { delta_bytes: -1 });
    assert_eq!(nines(CAPACITY - 4096, 4096), 4096, "around the end");
    let bytes = twisted(MediaKind::Read, 12_288, DataFault::Corrupt { seed: 1 });
    let read: Vec<u8> = [&bytes[..1000], &bytes[2000..5096]].concat();
    let flipped: u32 = read.iter().map(|byte| (byte ^ 9).count_ones()).sum();
    assert!((1..=8).contains(&flipped), "{flipped} bits");
    assert_eq!(nines(12_288, 4096), 4096, "the medium stays as it is");
}

#[test]
fn files_take_more_than_the_kernel_does_and_end_on_drop() {
    let (dir, media) = file(false);
    let mut rig = Rig::new(media);
    let mut done = Vec::new();
    for block in 0..100u64 {
        rig.domain.access().fill(rig.iova(512 * block as usize), block as u8, 512).unwrap();
        let sg_list = rig.sg_list(&[(Some(512 * block as usize), 512)]);
        let op = rig.op(MediaKind::Write { fua: block % 7 == 0 }, block * 512, 512, sg_list);
        done.extend(rig.media.submit(op, Nanos(0)));
    }
    assert!(rig.media.in_flight() > 8, "more than the depth");
    while done.len() < 100 {
        rig.media.poll(Nanos(0), &mut done);
    }
    let mut tokens: Vec<_> = done.iter().map(|done| done.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (1..=100).collect::<Vec<_>>());
    let sg_list = rig.sg_list(&[(Some(0), 512)]);
    let op = rig.op(MediaKind::Read, 0, 512, sg_list);
    assert!(rig.media.submit(op, Nanos(0)).is_none());
    let busy = FileMedia::open(&dir.path().join("medium"), 0, FileOptions::default());
    assert!(busy.unwrap_err().to_string().contains("another controller"));
    drop(rig);
    let path = dir.path().join("medium");
    let options = FileOptions { direct: false, ..FileOptions::default() };
    let again = FileMedia::open(&path, 0, options).unwrap();
    assert_eq!(again.capacity_bytes(), CAPACITY);
    assert_eq!(Rig::new(again).read(99 * 512, 512).unwrap(), [99; 512]);
}

#[test]
fn a_file_is_read_beside_the_medium_that_writes_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("medium");
    let options = FileOptions { direct: false, ..FileOptions::default() };
    let mut writer = Rig::new(FileMedia::open(&path, CAPACITY, options).unwrap());
    let open = || FileMedia::open(&path, 0, FileOptions { read_only: true, ..options }).unwrap();
    for (byte, mut reader) in [(1, Rig::new(open())), (2, Rig::new(open()))] {
        writer.write(512, &[byte; 512], true).unwrap();
        assert_eq!(reader.read(512, 512).unwrap(), [byte; 512]);
        reader.write(512, &[9; 512], true).unwrap_err();
        assert_eq!(writer.read(512, 512).unwrap(), [byte; 512]);
    }
}

#[test]
fn cancel_ends_everything_in_flight() {
    let (_dir, file) = file(false);
    let sim = SimMedia::new(MemoryMedia::new(CAPACITY).unwrap(), SimOptions::default());
    for mut rig in [Rig::new(file), Rig::new(sim)] {
        for block in 0..20 {
            let sg_list = rig.sg_list(&[(Some(512 * block), 512)]);
            let op = rig.op(MediaKind::Read, 0, 512, sg_list);
            assert!(rig.media.submit(op, Nanos(0)).is_none());
        }
        rig.media.cancel();
        let mut done = Vec::new();
        while rig.media.in_flight() > 0 {
            rig.media.poll(Nanos(0), &mut done);
        }
        assert!(done.is_empty(), "cancelled operations came back: {done:?}");
    }
}

#[test]
fn files_without_direct_io_are_an_error_that_says_so() {
    let options = FileOptions::default();
    let error = FileMedia::open("/proc/self/comm".as_ref(), 0, options).unwrap_err();
    assert!(error.to_string().contains("direct: false"), "{error}");
}

#[test]
fn a_file_that_should_be_there_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("medium");
    let error = FileMedia::open(&path, 0, FileOptions::default()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}");
    assert!(!path.exists());
}

#[test]
fn what_is_deallocated_leaves_the_file_unless_it_keeps_its_space() {
    let dir = tempfile::tempdir().unwrap();
    for (keep_space, left) in [(false, 0), (true, CAPACITY)] {
        let path = dir.path().join("medium");
        let options = FileOptions { keep_space, ..FileOptions::default() };
        let mut rig = Rig::new(FileMedia::open(&path, CAPACITY, options).unwrap());
        for at in (0..CAPACITY).step_by(64 << 10) {
            rig.write(at, &[7; 64 << 10], true).unwrap();
        }
        rig.simple(MediaKind::Deallocate, 0, CAPACITY).unwrap();
        assert_eq!(rig.read(4096, 512).unwrap(), [0; 512]);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&path.metadata().unwrap());
        assert_eq!(blocks * 512, left, "keep_space: {keep_space}");
        std::fs::remove_file(path).unwrap();
    }
}
