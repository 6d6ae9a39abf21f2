use nvme_driver::MonotonicClock;

use super::*;
use crate::{EmuConfig, EmuDomain};

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
        assert_eq!(runner.threads(), threads.min(3));
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
    assert_eq!(runner.threads(), 0);
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
    assert!(clock.now() - before < Nanos::from_millis(5000));
    drop(runner);
}
