use std::sync::mpsc;

use nvme_emu::{FaultAction, FaultPlan, FaultRule, FaultWhen};
use nvme_spec::ids::Lba;

use super::*;

fn flags(line: &str) -> RawFlags {
    config::flags(line).unwrap()
}

/// Measures the first load of a command line. Then does `harm`, and returns the problems that the
/// checks find.
fn checked(line: &str, harm: impl Fn(&mut Bench, &[load::Sampled])) -> Vec<String> {
    let flags = flags(&format!("{line} --size 4MiB --runtime 0.05 --ramp 0"));
    let raw = Raw::check(&flags).unwrap();
    let mut bench = raw.open(None).unwrap();
    raw.fill(&mut bench, &mut Interrupt::never()).unwrap();
    let before = check::counted(&mut bench).unwrap();
    let times = (flags.ramp, flags.runtime);
    let mut interrupt = Interrupt::never();
    bench.run(&raw.loads[0], times, &mut interrupt, &mut |_, _| {}).unwrap().unwrap();
    let sample = bench.sample(&raw.loads[0], &mut interrupt).unwrap().unwrap();
    harm(&mut bench, &sample);
    let checks = check::check(&mut bench, &raw.loads[0], &before, &sample).unwrap();
    bench.close().unwrap();
    assert!(checks.compared > 0);
    checks.wrong
}

#[test]
fn a_measurement_without_faults_passes_its_checks() {
    for line in [
        "--rw randread --bs 4k",
        "--rw read --bs 128k --devices 3 --queues 2",
        "--rw randwrite --bs 4k --iodepth 19",
        "--rw write --bs 1m --mdts 128KiB",
        "--rw randrw --bs 8k --descriptors prp --executor inline",
        "--rw randrw --bs 8k --path /var/tmp --iodepth 40",
        "--rw randrw --bs 8k --path /var/tmp --executor inline",
    ] {
        assert_eq!(checked(line, |_, _| {}), [""; 0], "{line}");
    }
}

#[test]
fn wrong_contents_and_counts_are_noticed() {
    for (line, is_logged) in [
        ("--rw randread --bs 4k", true),
        ("--rw randwrite --bs 4k", true),
        ("--rw randread --bs 4k --path /var/tmp", false),
        ("--rw randwrite --bs 4k --path /var/tmp", false),
    ] {
        let wrong = checked(line, |bench, sample| {
            let device = sample[0].device as usize;
            let lba = bench.areas[device].lba(sample[0].place, 4096);
            let (controller, nsid) = bench.stack.ring.controllers().nth(device).unwrap();
            controller.lock().write(nsid, Lba(lba), &[7; 4096], false).unwrap();
        });
        assert!(wrong.iter().any(|it| it.contains("is not what was")), "{wrong:?}");
        let counts = wrong.iter().any(|it| it.contains("commands were sent"));
        assert_eq!(counts, is_logged, "{wrong:?}");
    }
    let wrong = checked("--rw randread --bs 4k --devices 1", |bench, _| {
        let (controller, nsid) = bench.stack.ring.controllers().next().unwrap();
        controller.lock().read(nsid, Lba(0), &mut [0; 4096]).unwrap();
    });
    assert_eq!(wrong.len(), 1, "{wrong:?}");
}

/// A device that answers nothing is given up after an interrupt, and not after the minute for which
/// a measurement waits: that is an error.
#[test]
fn an_interrupt_ends_everything_that_does_not_complete() {
    let flags = flags("--rw randread --bs 4k --size 4MiB --runtime 0.05 --ramp 0 --devices 1");
    let raw = Raw::check(&flags).unwrap();
    let times = (flags.ramp, flags.runtime);
    let (load, pieces) = (&raw.loads[0], [(0, 4096)]);
    for step in ["fill", "run", "sample", "batch"] {
        let mut bench = raw.open(None).unwrap();
        for emu in bench.stack.emus() {
            let when = FaultWhen { admin: Some(false), ..FaultWhen::default() };
            let rules = vec![FaultRule::new(when, FaultAction::Drop)];
            emu.set_faults(FaultPlan { seed: 1, rules, ..FaultPlan::default() });
        }
        let (user, asked) = mpsc::channel();
        let mut interrupt = Interrupt::by(asked);
        let interrupted = || user.send(libc::SIGINT).unwrap();
        let measured = match step {
            // It comes while the first writes are in flight.
            "fill" => bench.fill(&mut interrupt, &mut |_| interrupted()).map(|()| None),
            "run" => {
                interrupted();
                let run = bench.run(load, times, &mut interrupt, &mut |_, _| {});
                run.map(|found| found.map(|_| ()))
            }
            "sample" => {
                interrupted();
                bench.sample(load, &mut interrupt).map(|found| found.map(|_| ()))
            }
            _ => {
                interrupted();
                bench.batch(&pieces, &mut interrupt).map(|found| found.map(|_| ()))
            }
        };
        assert!(matches!(measured, Ok(None)) && bench.is_stuck, "{step}: {measured:?}");
        // Closing it takes as long as a command may.
        std::mem::forget(bench);
    }
}
