//! A crash or a rejection at every operation of a bind, and of the restore after it.

use super::bind::request;
use super::fixture::{FREE, Fixture, SHARED};
use super::kernel::{Fault, Kernel};
use crate::command::{bind, release, status};
use crate::journal::Journal;
use crate::problem::Kind;
use crate::report::Paint;

/// All features in one request: two drives, a whole group, an owner, files for the next boot.
fn wanted() -> bind::Request {
    bind::Request {
        user: Some("alice".into()),
        group: Some("kvcache".into()),
        whole_group: true,
        persist: true,
        ..request(&[FREE, SHARED])
    }
}

/// Returns the number of operations of a bind, and of a restore after it.
fn operations() -> (usize, usize) {
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &wanted()).unwrap();
    let bind = kernel.operations();
    let forget = release::Request { persist: true, ..Default::default() };
    release::restore(&kernel.host(), &forget).unwrap();
    assert_eq!(fixture.snapshot(), before);
    (bind, kernel.operations() - bind)
}

fn restore(fixture: &Fixture, fault: Fault) -> (crate::problem::Result<String>, bool) {
    let kernel = Kernel::new(fixture, fault);
    let forget = release::Request { persist: true, ..Default::default() };
    let outcome = release::restore(&kernel.host(), &forget);
    (outcome.map(|reply| reply.text), kernel.is_dead())
}

#[test]
fn restore_recovers_from_a_crash_at_every_operation() {
    let (count, _) = operations();
    assert!(count > 30, "only {count} operations: is this still the whole bind?");
    let mut half_done = 0;
    // One machine for all faults: each iteration restores its state.
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    for at in 0..count {
        for fault in [Fault::CrashBefore(at), Fault::CrashAfter(at)] {
            fixture.unload();
            let kernel = Kernel::new(&fixture, fault);
            let problem = bind::run(&kernel.host(), &wanted());
            assert!(kernel.is_dead() && problem.is_err(), "{fault:?}");

            let kernel = Kernel::new(&fixture, Fault::None);
            let shown = status::run(&kernel.host(), Paint(false));
            let is_last = fault == Fault::CrashAfter(count - 1);
            if fixture.snapshot() != before && !is_last {
                assert_eq!(shown.code, Kind::HalfDone.exit_code(), "{fault:?}\n{}", shown.text);
                half_done += 1;
                // No further operation is accepted on top.
                let again = bind::run(&kernel.host(), &wanted()).unwrap_err();
                assert_eq!(again.kind, Kind::HalfDone, "{fault:?}");
                assert_eq!(kernel.operations(), 0);
            }
            let (outcome, _) = restore(&fixture, Fault::None);
            assert!(outcome.is_ok(), "{fault:?}: {outcome:?}");
            assert_eq!(fixture.snapshot(), before, "{fault:?}");
            assert_eq!(status::run(&kernel.host(), Paint(false)).text, "", "{fault:?}");
        }
    }
    assert!(half_done >= 2 * (count - 2), "{half_done} of {count}");
}

#[test]
fn status_names_the_step_before_which_it_stopped() {
    let fixture = Fixture::server();
    // The operations before the probe: the record, then two modules, the override and the unbind,
    // each with the record after it.
    let kernel = Kernel::new(&fixture, Fault::CrashBefore(9));
    bind::run(&kernel.host(), &request(&[FREE])).unwrap_err();
    let shown = status::run(&Kernel::new(&fixture, Fault::None).host(), Paint(false));
    assert!(shown.text.contains("half-done bind (4 of 6 steps)"), "{}", shown.text);
    let next = format!("{FREE} stopped before: echo {FREE} > /sys/bus/pci/drivers_probe");
    assert!(shown.text.ends_with(&next), "{}", shown.text);
}

#[test]
fn a_restore_that_crashes_can_be_repeated() {
    let (bind_count, restore_count) = operations();
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    // After the whole bind, and from two positions within it.
    for bind_at in [bind_count / 3, 2 * bind_count / 3, bind_count] {
        for at in 0..restore_count {
            for fault in [Fault::CrashBefore(at), Fault::CrashAfter(at)] {
                fixture.unload();
                let kernel = Kernel::new(&fixture, Fault::CrashAfter(bind_at));
                let _ = bind::run(&kernel.host(), &wanted());
                let (first, is_dead) = restore(&fixture, fault);
                // Restoring an early bind takes fewer operations.
                assert_eq!(first.is_err(), is_dead, "{bind_at} {fault:?}: {first:?}");
                let (second, _) = restore(&fixture, Fault::None);
                assert!(second.is_ok(), "{bind_at} {fault:?}: {second:?}");
                assert_eq!(fixture.snapshot(), before, "{bind_at} {fault:?}");
            }
        }
    }
}

#[test]
fn a_refused_step_is_undone_at_once() {
    let (count, _) = operations();
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    for at in 0..count {
        fixture.unload();
        let kernel = Kernel::new(&fixture, Fault::Refuse(at));
        let problem = bind::run(&kernel.host(), &wanted()).unwrap_err();
        assert_eq!(problem.kind, Kind::Failed, "{at}: {problem}");
        assert_eq!(fixture.snapshot(), before, "{at}: {problem}");
    }
}

#[test]
fn a_refused_change_of_owner_leaves_a_bound_drive_bound() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    let own = |fault| {
        let kernel = Kernel::new(&fixture, fault);
        let wanted = bind::Request { user: Some("alice".into()), ..request(&[FREE]) };
        (bind::run(&kernel.host(), &wanted), kernel.operations())
    };
    let node = fixture.root.text("/dev/vfio/12");
    // Saving the record, then the change itself.
    let (outcome, _) = own(Fault::Refuse(1));
    assert_eq!(outcome.unwrap_err().kind, Kind::Failed);
    assert_eq!(fixture.root.text("/dev/vfio/12"), node);
    let reply = release::restore(&Kernel::new(&fixture, Fault::None).host(), &Default::default());
    assert_eq!(reply.unwrap().text, format!("{FREE} has nvme"));
}

#[test]
fn a_reboot_ends_what_was_half_done() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::CrashAfter(6));
    let before = fixture.snapshot();
    let _ = bind::run(&kernel.host(), &request(&[FREE]));
    assert_ne!(fixture.snapshot(), before);
    // The driver is back, as after each boot; the journal survives outside /run.
    let _ = restore(&fixture, Fault::None);
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    let record = format!("/run/nvme-bind/{FREE}.drive.json");
    let text = fixture.root.text(&record).unwrap();
    restore(&fixture, Fault::None).0.unwrap();
    fixture.file(&record, &text);
    fixture.file("/proc/sys/kernel/random/boot_id", "boot-2");
    let shown = status::run(&kernel.host(), Paint(false));
    assert!(shown.code == 0 && shown.text.contains("earlier boot"), "{}", shown.text);
    let operations = kernel.operations();
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    assert!(kernel.operations() > operations);
}

#[test]
fn a_record_that_cannot_be_read_is_named() {
    let fixture = Fixture::server();
    fixture.file("/run/nvme-bind/0000:01:00.0.drive.json", "{ \"version\": 1,");
    let kernel = Kernel::new(&fixture, Fault::None);
    let host = kernel.host();
    status::run(&host, Paint(false));
    let notes = host.notes.borrow().join("\n");
    assert!(notes.contains("0000:01:00.0.drive.json cannot be read"), "{notes}");
}

/// Another run ends while this one waits for the lock: this one must act on the state it left.
#[test]
fn the_journal_is_read_under_the_lock() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    let lock = Journal::new(None).lock(&fixture.root).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let kernel = Kernel::new(&fixture, Fault::None);
            let unbind = release::Request { devices: vec![FREE.into()], ..Default::default() };
            let reply = release::restore(&kernel.host(), &release::Request::default());
            let again = release::unbind(&kernel.host(), &unbind);
            (reply.map(|reply| reply.text), again.map(|reply| reply.text))
        });
        // Long enough to read the journal, if it were not for the lock; if too short, the test
        // passes without proving anything.
        std::thread::sleep(std::time::Duration::from_millis(200));
        let record = format!("/run/nvme-bind/{FREE}.drive.json");
        std::fs::remove_file(fixture.root.at(record)).unwrap();
        let real = fixture.root.resolve(format!("/sys/bus/pci/devices/{FREE}")).unwrap();
        let driver = fixture.root.at(real).join("driver");
        std::fs::remove_file(&driver).unwrap();
        std::os::unix::fs::symlink("/sys/bus/pci/drivers/nvme", driver).unwrap();
        drop(lock);
        let (restored, unbound) = waiting.join().unwrap();
        assert_eq!(restored.unwrap(), "nothing to give back");
        assert_eq!(unbound.unwrap(), "nothing to give back");
    });
}

#[test]
fn a_journal_that_others_can_write_is_not_believed() {
    use std::os::unix::fs::PermissionsExt;
    let open = |fixture: &Fixture, path: &str, mode| {
        let open = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(fixture.root.at(path), open).unwrap();
    };
    for (path, mode, safe) in [
        ("/srv/state", 0o777, false),
        ("/srv", 0o777, false),
        ("/srv", 0o1777, true),
        ("/srv/state", 0o1777, false),
        ("/srv/state", 0o755, true),
    ] {
        let fixture = Fixture::server();
        fixture.folder("/srv/state");
        open(&fixture, path, mode);
        let kernel = Kernel::new(&fixture, Fault::None);
        let mut host = kernel.host();
        host.journal = Journal::new(Some("/srv/state"));
        let before = fixture.snapshot();
        match release::restore(&host, &release::Request::default()) {
            Ok(_) => assert!(safe, "{path} {mode:o}"),
            Err(problem) => {
                assert!(!safe && problem.message.contains(path), "{path} {mode:o}: {problem}");
                assert_eq!((kernel.operations(), fixture.snapshot()), (0, before));
            }
        }
    }
}
