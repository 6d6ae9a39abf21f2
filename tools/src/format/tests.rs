//! Data outside a store's region, as on drives. Store directories and block devices:
//! tests/format.rs.

use clap::Parser as _;
use nvme_emu::{EmuConfig, MemoryMedia};
use nvme_spec::ids::Lba;
use rand::{SeedableRng as _, rngs::SmallRng};
use ripieno_stack::Devices;

use super::*;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 16 * MIB;

#[derive(Debug, clap::Parser)]
struct Line {
    #[command(flatten)]
    flags: FormatFlags,
}

fn flags(line: &str) -> FormatFlags {
    let words = ["format", "--devices", "vfio:0000:65:00.0"].into_iter();
    Line::try_parse_from(words.chain(line.split_whitespace())).unwrap().flags
}

/// Returns a drive of 16 MiB whose store leaves out the first and last MiB, and what runs it.
fn drive() -> (MemoryMedia, Vec<StoreDevice>, Devices) {
    let media = MemoryMedia::new(BYTES).unwrap();
    let config = EmuConfig::new("drive").namespace(media.clone(), 512);
    let mut devices = offline::attach(vec![config]).unwrap();
    let (mut attached, _) = devices.take_attached().unwrap();
    attached[0].region = Some((Lba(MIB >> 9), (BYTES - 2 * MIB) >> 9));
    (media, attached, devices)
}

fn all(drive: &[StoreDevice]) -> Vec<u8> {
    let mut bytes = vec![0; BYTES as usize];
    ripieno_stack::namespaces(drive).unwrap()[0].io.read(0, &mut bytes).unwrap();
    bytes
}

fn format() -> Format {
    let shape = Shape::new(&model::MODELS[0], 512).unwrap();
    let store = StoreId(OsRng.unwrap_err().random());
    Format { overwrite: Overwrite::Anything, ..Format::new(store, *shape) }
}

#[test]
fn what_is_beside_the_region_is_guarded_cleared_and_put_back() {
    let place = tempfile::tempdir().unwrap();
    for (at, what, wanted) in [
        (512, &b"EFI PART"[..], "a partition table (GPT)"),
        (0, b"XFSB", "an XFS filesystem"),
        (700 << 10, b"precious", "data of an unknown kind"),
        (BYTES - MIB, b"precious", "data of an unknown kind"),
        (BYTES - 512, b"EFI PART", "the backup of a partition table (GPT)"),
        (MIB + 0x438, b"\x53\xef", "an ext4 filesystem"),
    ] {
        let (media, drive, _devices) = drive();
        media.poke(at, what).unwrap();
        let before = all(&drive);
        let error = write(&flags("--overwrite store"), &format(), &drive).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
        assert_eq!(all(&drive), before);
        let undo = place.path().join(at.to_string());
        let line = format!("--overwrite anything --undo-file {}", undo.display());
        let report = write(&flags(&line), &format(), &drive).unwrap();
        assert_eq!(report.held[0].what, wanted);
        let made = all(&drive);
        let edges = made[..MIB as usize].iter().chain(&made[(BYTES - MIB) as usize..]);
        assert!(edges.copied().all(|byte| byte == 0), "a later command would not find the store");
        undo::put_back(&undo, &drive).unwrap();
        assert!(all(&drive) == before, "byte for byte");
        drive[0].controller.lock().shutdown().unwrap();
    }
}

/// Power loss may leave any subset of the sectors of a format, or of an undo, written. The previous
/// data can be restored from all of these states.
#[test]
fn a_formatting_or_an_undo_that_was_cut_short_is_undone() {
    let (media, drive, _devices) = drive();
    let place = tempfile::tempdir().unwrap();
    write(&flags(""), &format(), &drive).unwrap();
    // Data outside the region of the existing store.
    for at in (700..MIB).step_by(20 << 10) {
        media.poke(at, b"precious").unwrap();
        media.poke(BYTES - at, b"precious").unwrap();
    }
    let before = all(&drive);
    let undo = place.path().join("undo");
    let line = format!("--overwrite anything --undo-file {}", undo.display());
    write(&flags(&line), &format(), &drive).unwrap();
    let made = all(&drive);
    let sectors = before.chunks(512).zip(made.chunks(512)).enumerate();
    let changed: Vec<_> = sectors.filter(|(_, (before, made))| before != made).collect();
    assert!(changed.len() > 100, "{} sectors", changed.len());
    let mut rng = SmallRng::seed_from_u64(1);
    for _ in 0..40 {
        let part = rng.random_range(0.0..1.0);
        for (at, (before, made)) in &changed {
            let bytes = if rng.random_bool(part) { before } else { made };
            media.poke(512 * *at as u64, bytes).unwrap();
        }
        undo::put_back(&undo, &drive).unwrap();
        assert!(all(&drive) == before, "byte for byte");
    }
    drive[0].controller.lock().shutdown().unwrap();
}

#[test]
fn what_a_replay_left_may_be_lost() {
    let (media, drive, _devices) = drive();
    media.poke(0, b"ripieno replay: scratch data, may be overwritten\n").unwrap();
    media.poke(MIB, b"a store that was not kept").unwrap();
    let report = write(&flags(""), &format(), &drive).unwrap();
    assert_eq!(report.undo_file, None);
    let error = write(&flags(""), &format(), &drive).unwrap_err();
    assert!(error.to_string().contains("it holds store"), "{error}");
    let undo = tempfile::tempdir().unwrap().path().join("undo");
    let line = format!("--overwrite store --undo-file {}", undo.display());
    let error = write(&flags(&line), &format(), &drive).unwrap_err();
    assert!(error.to_string().contains("saving what is overwritten"), "{error}");
    drive[0].controller.lock().shutdown().unwrap();
}
