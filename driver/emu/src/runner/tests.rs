use std::sync::Mutex;

use nvme_driver::{MonotonicClock, Waiter};

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
        assert_eq!(runner.threads().len(), threads.min(3));
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
    assert!(runner.threads().is_empty());
}

#[test]
fn a_guest_is_run_until_it_ends_or_the_threads_do() {
    let runner = EmuRunner::spawn(emus(1), Arc::new(MonotonicClock::default())).unwrap();
    let thread = runner.threads().remove(0);
    // None of them finds work, and the controller is disabled: they are called all the same.
    let counted = |turns: u32| -> (Guest, Arc<Mutex<u32>>) {
        let count = Arc::new(Mutex::new(0));
        let mine = count.clone();
        let guest = move || {
            *mine.lock().unwrap() += 1;
            (*mine.lock().unwrap() < turns).then_some(false)
        };
        (Box::new(guest), count)
    };
    let ((short, its), (long, mine)) = (counted(3), counted(u32::MAX));
    thread.host(short).unwrap();
    thread.host(long).unwrap();
    let clock = MonotonicClock::default();
    let mut waiter = Waiter::new(&clock, WATCHDOG);
    while Arc::strong_count(&its) > 1 || *mine.lock().unwrap() <= 100 {
        assert!(waiter.wait(), "the guest is not run, or is kept");
    }
    assert_eq!(*its.lock().unwrap(), 3);
    drop(runner);
    assert_eq!(Arc::strong_count(&mine), 1, "the thread has let go");
    assert!(thread.host(counted(1).0).is_none());
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
