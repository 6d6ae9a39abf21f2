//! A drive that two controllers reach.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use clap::Parser as _;
use nvme_emu::{EmuConfig, FaultPlan, IdentifyOverrides, IdentifyPatch, MemoryMedia};
use objstore::{Format, KvShape, Owner, Store, StoreId};

use super::*;

/// Offset of the second copy of the superblock, in a store on a whole namespace.
const COPY: u64 = 512 << 10;

#[derive(Debug, clap::Parser)]
struct Line {
    #[command(flatten)]
    flags: FsckFlags,
}

/// Attaches the drive through a controller of its own, of a subsystem with several (CMIC, NMIC).
fn attached(id: &str, media: &MemoryMedia) -> Devices {
    let patch = |cns, offset, byte| IdentifyPatch { cns, offset, bytes: vec![byte] };
    let patches = vec![patch(1, 76, 2), patch(0, 30, 1)];
    let identify = IdentifyOverrides { patches, ..Default::default() };
    let config = EmuConfig { serial: "SUB".into(), ..EmuConfig::new(id) };
    let config = config.namespace(media.clone(), 4096);
    let config = config.faults(FaultPlan { identify, ..FaultPlan::default() });
    offline::attach(vec![config]).unwrap()
}

#[test]
fn a_store_that_another_process_opens_meanwhile_is_not_repaired() {
    let shape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };
    let media = MemoryMedia::new(64 << 20).unwrap();
    let ours = || attached("ours", &media);
    let other = attached("other", &media);
    Store::format(other.attached(), &Format::new(StoreId([7; 16]), shape)).unwrap();
    media.poke(COPY, &[0xff; 64]).unwrap();
    let damaged = |media: &MemoryMedia| {
        let mut bytes = vec![0; 64];
        media.peek(COPY, &mut bytes).unwrap();
        bytes == [0xff; 64]
    };
    let line = ["fsck", "--devices", "vfio:0000:65:00.0", "--repair"];
    let flags = Line::try_parse_from(line).unwrap().flags;
    let owner = Owner { id: [1; 16], host: "there".into(), pid: 5, since: 0 };
    let (stop, stopped) = channel::<()>();
    let error = thread::scope(|scope| {
        let checked = check_devices(&flags, &ours(), |found| {
            let survey = Survey::take(found, |_, _| {})?;
            let mut io = Store::media(other.attached())?.remove(0).io;
            owner.claim(&mut *io)?;
            let owner = &owner;
            scope.spawn(move || {
                let (mut pulses, beat) = (0, Duration::from_millis(1));
                while stopped.recv_timeout(beat) == Err(RecvTimeoutError::Timeout) {
                    pulses += 1;
                    owner.pulse(&mut *io, pulses).unwrap();
                }
                owner.release(&mut *io).unwrap();
            });
            Ok(survey)
        });
        drop(stop);
        checked.unwrap_err().to_string()
    });
    assert!(error.contains("there"), "{error}");
    assert!(damaged(&media), "it was written to");
    let take = |found: &mut [Medium]| Survey::take(found, |_, _| {});
    assert_eq!(check_devices(&flags, &ours(), take).unwrap(), 0);
    assert!(!damaged(&media), "nothing keeps it from being repaired now");
}
