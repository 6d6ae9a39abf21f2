use super::*;
use crate::gpu::{H100, LLAMA_3_8B, LLAMA_3_70B};

#[test]
fn a_policy_has_what_the_machine_has() {
    let machine = Machine {
        model: LLAMA_3_8B,
        gpu: H100,
        layers: None,
        kv_bytes: 50 << 30,
        dram_bytes: 1 << 40,
        drives: 2,
        drive_bytes: 7_000_000_000_000,
    };
    for policy in [Policy::SSD, Policy::GDS, Policy::OURS, Policy::ORACLE, Policy::HBM] {
        assert_eq!(machine.policy(policy), policy);
    }
    let read = |machine: Machine, policy| machine.policy(policy).tier.unwrap().lane.read;
    // More drives do not help the CPU path, and others only up to the link's bandwidth.
    let four = Machine { drives: 4, ..machine };
    assert_eq!([Policy::SSD, Policy::GDS].map(|it| read(four, it)), [3.4e9, 11.9e9]);
    assert_eq!(read(four, Policy::OURS), 50e9);
    let two_gpus = Machine { gpu: Gpu { count: 2, ..H100 }, ..four };
    assert_eq!(read(two_gpus, Policy::GDS), 23.8e9);
    assert_eq!(read(two_gpus, Policy::OURS), 51.8e9);
    assert_eq!(machine.policy(Policy::DRAM).tier.unwrap().capacity, 1 << 40);
}

#[test]
fn weights_that_do_not_fit_leave_no_room() {
    assert_eq!(Machine::kv_room(&LLAMA_3_70B, &H100), None);
    let two = Machine::kv_room(&LLAMA_3_70B, &Gpu { count: 2, ..H100 });
    assert!(two.is_some_and(|room| room < 10 << 30), "{two:?}");
    let one = Machine::kv_room(&LLAMA_3_8B, &H100).unwrap() >> 30;
    assert!((50..60).contains(&one), "{one}");
}
