//! Images of a store of any content: a fuzzer edits superblocks, journal and data.
//!
//! An image is refused, or opens. A block that is found then is read with its own bytes, or not at
//! all. With checksums that a fuzzer made right again, which no accident does, only this has to
//! hold: nothing panics and every call ends.

mod stack;

use std::sync::LazyLock;

use bolero::{TypeGenerator, check};
use nvme_driver::ControllerOptions;
use nvme_emu::{EmuConfig, EmuDomain, MemoryMedia, SimClock};
use objstore::{KvShape, Namespace, Store, StoreConfig, StoreDevice, StoreError, StoreOptions};
use ripieno_testkit::{Drives, KvMemory, format, inline_executor};
use stack::{Stack, keys};

const SHAPE: KvShape = KvShape { layers: 2, segments: 1, object_bytes: 512, block_tokens: 16 };
const LBA_BYTES: u32 = 512;
const MEDIA_BYTES: u64 = 4 << 20;
const KEYS: u32 = 12;
/// Where the parts of an image are: docs/reference/on-disk-format.md.
const SUPERBLOCKS: [usize; 2] = [0, 512 << 10];
const SUPERBLOCK_BYTES: usize = 8 << 10;
const JOURNAL: usize = 1 << 20;
const GROUP_HEADER_BYTES: usize = 48;

#[derive(Debug, Clone, Copy, TypeGenerator)]
enum Part {
    /// The fields of a copy of the superblock.
    Superblock { second: bool },
    /// The first groups of the half in use.
    Journal,
    /// The first objects.
    Data,
    /// Anywhere.
    Anywhere { pages: u16 },
}

#[derive(Debug, TypeGenerator)]
struct Edit {
    part: Part,
    offset: u16,
    bytes: Vec<u8>,
}

#[derive(Debug, TypeGenerator)]
struct Input {
    edits: Vec<Edit>,
    /// Makes the checksums of what was edited right.
    seals: bool,
}

/// A store's only device, and where its data begins.
#[derive(Clone)]
struct Image(Vec<u8>, usize);

impl Image {
    /// A store with blocks, of which some were removed.
    fn new() -> Self {
        let media = MemoryMedia::new(MEDIA_BYTES).unwrap();
        let mut stack = open(&media, true).unwrap();
        let keys = keys(0..KEYS);
        stack.put(&keys[..8], 0);
        stack.store.remove(&keys[7..8]).unwrap();
        stack.put(&keys[8..], 20);
        let data = stack.data_lba() as usize * LBA_BYTES as usize;
        stack.store.close().unwrap();
        let mut bytes = vec![0; MEDIA_BYTES as usize];
        media.peek(0, &mut bytes).unwrap();
        Self(bytes, data)
    }

    fn edit(&mut self, edit: &Edit) {
        let offset = usize::from(edit.offset);
        let at = match edit.part {
            Part::Superblock { second } => SUPERBLOCKS[usize::from(second)] + offset % 512,
            Part::Journal => JOURNAL + offset % 4096,
            Part::Data => self.1 + offset % (1 << 14),
            Part::Anywhere { pages } => (usize::from(pages) << 12 | offset) % self.0.len(),
        };
        for (to, from) in self.0[at..].iter_mut().zip(edit.bytes.iter().take(64)) {
            *to = *from;
        }
    }

    fn seal(&mut self) {
        for at in SUPERBLOCKS {
            seal(&mut self.0[at..at + SUPERBLOCK_BYTES], 12);
        }
        let mut at = JOURNAL;
        while self.0[at..].starts_with(b"RIPGROUP") {
            let header: [u8; 4] = self.0[at + 40..at + 44].try_into().unwrap();
            let bytes = GROUP_HEADER_BYTES + u32::from_le_bytes(header) as usize;
            let Some(group) = self.0.get_mut(at..at + bytes) else { break };
            seal(group, 44);
            at += bytes.next_multiple_of(LBA_BYTES as usize);
        }
    }
}

/// Writes the CRC of `bytes` to its place in them.
fn seal(bytes: &mut [u8], place: usize) {
    bytes[place..place + 4].fill(0);
    let crc = crc32c::crc32c(bytes);
    bytes[place..place + 4].copy_from_slice(&crc.to_le_bytes());
}

fn open(media: &MemoryMedia, formats: bool) -> Result<Stack, StoreError> {
    let clock = SimClock::new(1);
    let config = EmuConfig::new("drive").namespace(media.clone(), LBA_BYTES);
    let drives = Drives::simulated(EmuDomain::new("image"), vec![config], &clock);
    let controllers = drives.attach(&ControllerOptions::default());
    let devices: Vec<StoreDevice> = controllers.into_iter().map(StoreDevice::new).collect();
    if formats {
        Store::format(&devices, &format(SHAPE))?;
    }
    let Drives { domain, emus, .. } = drives;
    let kv = KvMemory::new(&*domain, SHAPE, 64);
    let store = Store::open(StoreConfig {
        devices,
        clock: clock.clone(),
        executor: inline_executor(clock.clone()),
        shape: SHAPE,
        namespace: Namespace::default(),
        pool: kv.pool.clone(),
        gpu: None,
        options: StoreOptions { virtual_time: true, ..StoreOptions::default() },
    })?;
    Ok(Stack { store, shape: SHAPE, kv, domain, emus, clock })
}

#[test]
fn image() {
    static WHOLE: LazyLock<Image> = LazyLock::new(Image::new);
    check!(name = "image").with_type::<Input>().with_iterations(150).for_each(|input| {
        let mut image = WHOLE.clone();
        input.edits.iter().take(8).for_each(|edit| image.edit(edit));
        if input.seals {
            image.seal();
        }
        let media = MemoryMedia::new(MEDIA_BYTES).unwrap();
        media.poke(0, &image.0).unwrap();
        let Ok(mut stack) = open(&media, false) else { return };
        for key in keys(0..KEYS) {
            let Ok(prefix) = stack.store.lookup(&[key]) else { continue };
            if prefix.is_empty() || stack.read(&prefix, 40).is_err() {
                continue;
            }
            let is_right = stack.holds(objstore::BlockId(40), key);
            assert!(is_right || input.seals, "not the bytes of {key}");
        }
        // It takes new blocks, or says why not.
        let new = keys(100..104);
        if let Ok(save) = stack.store.allocate(&new, &stack::blocks(50, new.len())) {
            let _ = stack.write_all(&save);
            let _ = stack.store.commit(save);
        }
        let _ = stack.store.close();
    });
}

#[test]
fn the_parts_of_an_image_are_where_the_fuzzer_edits_them() {
    let mut image = Image::new();
    assert!(SUPERBLOCKS.iter().all(|at| image.0[*at..].starts_with(b"RIPIENO\n")));
    assert!(image.0[JOURNAL..].starts_with(b"RIPGROUP"));
    let before = image.0.clone();
    image.seal();
    assert!(image.0 == before, "the checksums are computed as the store computes them");
}
