use std::sync::Mutex;

use nvme_driver::MonotonicClock;

use super::*;
use crate::{
    EmuConfig, EmuDomain,
    media::{Media, MediaDone, MediaOp},
};

/// Time after which a wait is a hang, on any machine.
const WATCHDOG: Nanos = Nanos::from_millis(600_000);

fn emus(count: usize) -> Vec<Arc<Emu>> {
    let domain = EmuDomain::new("test");
    let one = |index| Emu::new(domain.clone(), EmuConfig::new(format!("emu{index}"))).unwrap();
    (0..count).map(one).collect()
}

#[test]
fn stops_when_dropped_even_while_parked() {
    let emus = emus(3);
    for threads in [1, 2, 8] {
        let clock = Arc::new(MonotonicClock::default());
        let runner = EmuRunner::on_threads(threads, emus.clone(), clock).unwrap();
        assert_eq!(runner.workers.len(), threads.min(3));
        // Disabled controllers: the threads are parked by now, or soon will be.
        thread::sleep(Duration::from_millis(5));
        drop(runner);
    }
    for emu in emus {
        assert_eq!(Arc::strong_count(&emu), 1, "the threads have let go");
    }
}

#[test]
fn without_controllers_there_are_no_threads() {
    let runner = EmuRunner::spawn(Vec::new(), Arc::new(MonotonicClock::default())).unwrap();
    assert!(runner.workers.is_empty());
}

#[test]
fn register_accesses_are_not_starved_by_steps() {
    let emus = emus(1);
    let clock = Arc::new(MonotonicClock::default());
    let runner = EmuRunner::spawn(emus.clone(), clock.clone()).unwrap();
    let before = clock.now();
    for _ in 0..1000 {
        let _ = emus[0].read32(0x1C);
        emus[0].write32(0x14, 0);
    }
    assert!(clock.now() - before < WATCHDOG);
    drop(runner);
}

/// A disk that counts its polls, and works on an operation for as long as the test has the count.
#[derive(Debug)]
struct Busy(Arc<Mutex<u64>>);

impl Media for Busy {
    fn capacity_bytes(&self) -> u64 {
        1 << 20
    }

    fn granularity_bytes(&self) -> u32 {
        512
    }

    fn submit(&mut self, op: MediaOp, _now: Nanos) -> Option<MediaDone> {
        Some(op.done(Ok(())))
    }

    fn poll(&mut self, _now: Nanos, _done: &mut Vec<MediaDone>) {
        *self.0.lock().unwrap() += 1;
    }

    fn next_event(&self) -> Option<Nanos> {
        None
    }

    fn in_flight(&self) -> usize {
        usize::from(Arc::strong_count(&self.0) > 1)
    }

    fn cancel(&mut self) {}

    fn power_loss(&mut self) {}
}

#[test]
fn a_slow_disk_is_not_polled_all_the_time() {
    let polls = Arc::new(Mutex::new(0));
    let config = EmuConfig::new("emu").namespace(Busy(polls.clone()), 512);
    let emu = Emu::new(EmuDomain::new("test"), config).unwrap();
    let clock = Arc::new(MonotonicClock::default());
    let before = clock.now();
    let runner = EmuRunner::spawn(vec![emu], clock.clone()).unwrap();
    thread::sleep(Duration::from_millis(500));
    let found = *polls.lock().unwrap();
    // Once a millisecond, after a beginning with shorter sleeps.
    let most = (clock.now() - before).0 / 1_000_000 + 100;
    drop(polls);
    drop(runner);
    assert!((1..=most).contains(&found), "{found} polls, at most {most}");
}
