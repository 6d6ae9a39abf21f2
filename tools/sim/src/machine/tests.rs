use super::*;
use crate::gpu::{LLAMA_3_8B, LLAMA_3_70B};

#[test]
fn tiers_are_what_drives_and_links_can_do() {
    let parameters = &Parameters::default();
    let machine = Machine {
        parameters,
        model: LLAMA_3_8B,
        gpu: Gpu::h100(),
        layers: None,
        known: None,
        kv_bytes: 50 << 30,
        dram_bytes: 1 << 40,
        drives: 2,
        drive_bytes: 7_000_000_000_000,
    };
    let read = |machine: Machine<'_>| {
        let Storage { direct, gds, cpu, .. } = machine.storage();
        [direct, gds, cpu].map(|lane| lane.read)
    };
    assert_eq!(read(machine), [25.9e9, 11.9e9, 3.4e9]);
    // More drives do not help the software paths, and the direct one only up to the link.
    let four = Machine { drives: 4, ..machine };
    assert_eq!(read(four), [50e9, 11.9e9, 3.4e9]);
    let two_gpus = Machine { gpu: Gpu { count: 2, ..machine.gpu }, ..four };
    assert_eq!(read(two_gpus), [51.8e9, 23.8e9, 6.8e9]);
    // A slow drive limits all of them.
    let mut slow = parameters.clone();
    slow.set("drive.read", 2e9, "here").unwrap();
    assert_eq!(read(Machine { parameters: &slow, ..machine }), [4e9, 4e9, 3.4e9]);
    let Storage { host_bytes, drive_bytes, .. } = machine.storage();
    assert_eq!((host_bytes, drive_bytes), (1 << 40, 14_000_000_000_000));
}

#[test]
fn weights_that_do_not_fit_leave_no_room() {
    assert_eq!(Machine::kv_room(&LLAMA_3_70B, &Gpu::h100()), None);
    let two = Machine::kv_room(&LLAMA_3_70B, &Gpu { count: 2, ..Gpu::h100() });
    assert!(two.is_some_and(|room| room < 10 << 30), "{two:?}");
    let one = Machine::kv_room(&LLAMA_3_8B, &Gpu::h100()).unwrap() >> 30;
    assert!((50..60).contains(&one), "{one}");
}
