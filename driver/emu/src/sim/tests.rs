use super::*;
use crate::{EmuConfig, EmuDomain};

#[test]
fn time_passes_only_in_pause_and_not_past_the_deadline() {
    let clock = SimClock::new(1);
    assert_eq!(clock.now(), Nanos(0));
    let mut polls = 0;
    let deadline = Nanos::from_millis(30_000);
    while clock.now() < deadline {
        let before = clock.now();
        clock.pause(polls, deadline);
        assert!(clock.now() > before && clock.now() <= deadline);
        polls += 1;
    }
    assert!(polls < 5000, "30 s of virtual time took {polls} polls");
    clock.pause(0, Nanos(5));
    assert_eq!(clock.now(), deadline, "a deadline in the past does not turn time back");
}

#[test]
fn the_same_seed_gives_the_same_times() {
    let trace = |seed| {
        let clock = SimClock::new(seed);
        let domain = EmuDomain::new("test");
        for id in ["a", "b"] {
            clock.drive(Emu::new(domain.clone(), EmuConfig::new(id)).unwrap());
        }
        let poll = |idle: u32| {
            clock.pause(idle % 3, Nanos::MAX);
            clock.now()
        };
        (0..50).map(poll).collect::<Vec<_>>()
    };
    assert_eq!(trace(7), trace(7));
    assert_ne!(trace(7), trace(8));
}

#[test]
fn in_real_time_only_the_pauses_of_its_thread_run_controllers() {
    let clock = SimClock::real();
    let emu = Emu::new(EmuDomain::new("test"), EmuConfig::new("a")).unwrap();
    clock.drive(emu.clone());
    let options = nvme_driver::ControllerOptions {
        admin_timeout: Nanos::from_millis(20),
        ..Default::default()
    };
    let attach = || {
        let clock: Arc<dyn Clock> = clock.clone();
        nvme_driver::Controller::attach(emu.bus(), clock, options.clone())
    };
    let elsewhere = thread::scope(|scope| scope.spawn(attach).join().unwrap());
    assert!(elsewhere.is_err(), "nothing ran the controller");
    let before = std::time::Instant::now();
    let since = clock.now();
    let controller = attach().unwrap();
    assert_eq!(controller.info().model, "Ripieno software controller");
    assert!(clock.now() - since <= Nanos(before.elapsed().as_nanos() as u64));
}

#[test]
fn run_for_ends_on_time() {
    let clock = SimClock::new(3);
    clock.run_for(Nanos::from_millis(2));
    assert_eq!(clock.now(), Nanos::from_millis(2));
}
