//! Files that survive a reboot, and their removal.

use super::bind::request;
use super::fixture::{FREE, Fixture, PROGRAM};
use super::kernel::{Fault, Kernel};
use crate::command::{bind, release, status};
use crate::problem::Kind;
use crate::report::Paint;

const UNIT: &str = "/etc/systemd/system/nvme-bind-0000-67-00-0.service";
const RULE: &str = "/etc/udev/rules.d/60-nvme-bind-0000-67-00-0.rules";

fn wanted() -> bind::Request {
    bind::Request { user: Some("alice".into()), persist: true, ..request(&[FREE]) }
}

#[test]
fn the_files_bind_this_drive_and_no_other() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::None);
    let dry = bind::run(&kernel.host(), &bind::Request { dry_run: true, ..wanted() }).unwrap();
    bind::run(&kernel.host(), &wanted()).unwrap();
    let unit = fixture.root.text(UNIT).unwrap();
    let command =
        format!("ExecStart=/usr/bin/nvme-bind bind {FREE} --expect-serial SN-nvme0 --user 1000");
    assert!(unit.lines().any(|line| line == command), "{unit}");
    let rule = fixture.root.text(RULE).unwrap();
    let wants = "ENV{SYSTEMD_WANTS}+=\"nvme-bind-0000-67-00-0.service\"";
    for part in [&format!("KERNELS==\"{FREE}\""), "ATTR{serial}==\"SN-nvme0\"", wants] {
        assert!(rule.contains(part), "{rule}");
    }
    // The dry run showed all of them.
    for line in unit.lines().chain(rule.lines()) {
        assert!(dry.text.contains(line), "`{line}` is not in {}", dry.text);
    }
    let link =
        fixture.root.link("/etc/systemd/system/multi-user.target.wants/".to_owned() + &UNIT[20..]);
    assert_eq!(link.as_deref(), Some("../nvme-bind-0000-67-00-0.service"));
    assert!(fixture.root.exists(format!("/var/lib/nvme-bind/{FREE}.drive.json")));
}

#[test]
fn a_plain_release_keeps_them_and_persist_removes_them() {
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &wanted()).unwrap();
    release::restore(&kernel.host(), &release::Request::default()).unwrap();
    assert!(fixture.root.exists(UNIT));
    let shown = status::run(&kernel.host(), Paint(false));
    assert!(shown.text.contains("released until the next boot"), "{}", shown.text);
    let forget =
        release::Request { devices: vec![FREE.into()], persist: true, ..Default::default() };
    release::unbind(&kernel.host(), &forget).unwrap();
    assert_eq!(fixture.snapshot(), before);
}

/// The bind request of the unit.
fn unit() -> bind::Request {
    bind::Request {
        user: Some("1000".into()),
        expect_serial: Some("SN-nvme0".into()),
        ..request(&[FREE])
    }
}

#[test]
fn the_unit_of_the_next_boot_finds_its_way_and_back() {
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &wanted()).unwrap();
    kernel.reboot(FREE, "boot-2");
    bind::run(&kernel.host(), &unit()).unwrap();
    // A restart: the serial number cannot be read now, but is recorded.
    bind::run(&kernel.host(), &unit()).unwrap();
    let shown = status::run(&kernel.host(), Paint(false));
    assert!(shown.text.contains("bound again") && shown.code == 0, "{}", shown.text);
    let forget = release::Request { persist: true, ..Default::default() };
    let reply = release::restore(&kernel.host(), &forget).unwrap();
    assert_eq!(reply.text, format!("{FREE} has nvme"));
    fixture.file("/proc/sys/kernel/random/boot_id", "boot-1");
    assert_eq!(fixture.snapshot(), before);
}

/// A drive of the same model in the same slot matches in all but the serial number.
#[test]
fn another_drive_in_the_slot_is_left_alone() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &wanted()).unwrap();
    kernel.reboot(FREE, "boot-2");
    let real = fixture.root.resolve(format!("/sys/bus/pci/devices/{FREE}")).unwrap();
    fixture.file(&format!("{}/nvme/nvme0/serial", real.display()), "SN-other\n");
    let problem = bind::run(&kernel.host(), &unit()).unwrap_err();
    assert!(problem.message.contains("has serial SN-other, not SN-nvme0"), "{problem}");
    let driver = || fixture.root.link_name(format!("/sys/bus/pci/devices/{FREE}/driver"));
    assert_eq!(driver().as_deref(), Some("nvme"));
    // Another program has bound it: its identity is unknown, so it is not handed over.
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    fixture.file("/proc/sys/kernel/random/boot_id", "boot-3");
    let problem = bind::run(&kernel.host(), &unit()).unwrap_err();
    assert!(problem.message.contains("cannot be read now"), "{problem}");
}

/// Root runs it at each boot.
#[test]
fn a_program_that_others_can_change_is_not_run_at_boot() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::None);
    let refused = |wanted: &bind::Request, words: &str| {
        let problem = bind::run(&kernel.host(), wanted).unwrap_err();
        assert_eq!(problem.kind, Kind::Usage, "{problem}");
        assert!(problem.message.contains(words), "{problem}");
        assert!(problem.hint.contains("/usr/local/sbin"), "{}", problem.hint);
        assert_eq!(kernel.operations(), 0);
    };
    for path in ["/usr", "/usr/bin", PROGRAM] {
        fixture.mode(path, 0o757);
        refused(&wanted(), &format!("{path} can be written to by others (mode 0757)"));
        refused(&bind::Request { dry_run: true, ..wanted() }, "written to by others");
        fixture.mode(path, 0o755);
    }
    std::fs::remove_file(fixture.root.at(PROGRAM)).unwrap();
    refused(&wanted(), "is not there");
    bind::run(&kernel.host(), &bind::Request { persist: false, ..wanted() }).unwrap();
}

/// On the machine itself everything must belong to root.
#[test]
fn a_program_of_another_user_is_not_run_at_boot() {
    use crate::pci::Root;
    use crate::persist::check_program;
    let machine = Root::machine();
    // Installed by a package.
    check_program(&machine, "/usr/bin/env").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nvme-bind");
    std::fs::write(&path, "").unwrap();
    let problem = check_program(&machine, path.to_str().unwrap()).unwrap_err();
    // A temporary directory is writable by all, or belongs to this user.
    let is_said = ["written to by others", "belongs to user"].iter();
    assert!(is_said.clone().any(|words| problem.message.contains(words)), "{problem}");
}

#[test]
fn files_of_two_drives_stay_until_the_second_is_gone() {
    use super::fixture::{NETWORK, SHARED};
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    let both = bind::Request { persist: true, whole_group: true, ..request(&[FREE, SHARED]) };
    bind::run(&kernel.host(), &both).unwrap();
    let forget = |devices: &[&str]| {
        let devices = devices.iter().map(|&device| device.to_owned()).collect();
        let request = release::Request { devices, persist: true, ..Default::default() };
        release::restore(&kernel.host(), &request).unwrap();
    };
    // Either unit may start first, and each must be able to take the group.
    let unit = fixture.root.text(UNIT.replace("67", "6a")).unwrap();
    assert!(unit.contains("--expect-serial SN-nvme2 --whole-group\n"), "{unit}");
    forget(&[FREE]);
    assert!(!fixture.root.exists(UNIT) && !fixture.root.exists(RULE));
    assert!(fixture.root.exists("/etc/modules-load.d/nvme-bind.conf"));
    forget(&[SHARED, NETWORK]);
    assert_eq!(fixture.snapshot(), before);
}

/// The drive supplies its serial number, and root executes the unit.
#[test]
fn a_serial_number_cannot_add_lines_to_the_unit() {
    let fixture = Fixture::server();
    let serial = "SN\n[Service]\nExecStart=/bin/evil\t\u{85}";
    let real = fixture.root.resolve(format!("/sys/bus/pci/devices/{FREE}")).unwrap();
    fixture.file(&format!("{}/nvme/nvme0/serial", real.display()), &format!("{serial}end\n"));
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &wanted()).unwrap();
    let unit = fixture.root.text(UNIT).unwrap();
    assert_eq!(unit.lines().filter(|line| line.starts_with("ExecStart=")).count(), 1, "{unit}");
    let rule = fixture.root.text(RULE).unwrap();
    let lines = rule.lines().filter(|line| !line.starts_with('#'));
    assert_eq!(lines.count(), 1, "{rule}");
    assert!(rule.contains("==\"SN??Service??ExecStart??bin?evil???end\""), "{rule}");
    assert!(unit.contains(r#""SN\x0a[Service]\x0aExecStart=/bin/evil\x09\xc2\x85end""#), "{unit}");
}
