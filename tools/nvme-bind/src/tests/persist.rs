//! What survives a reboot, and how it is taken back.

use super::bind::request;
use super::fixture::{FREE, Fixture};
use super::kernel::{Fault, Kernel};
use crate::command::{bind, release, status};
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
    for part in [&format!("KERNEL==\"{FREE}\""), "ATTR{vendor}==\"0x144d\"", "=\"vfio-pci\""] {
        assert!(rule.contains(part), "{rule}");
    }
    // The dry run showed all of it.
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

#[test]
fn the_unit_of_the_next_boot_finds_its_way_and_back() {
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &wanted()).unwrap();
    fixture.file("/proc/sys/kernel/random/boot_id", "boot-2");
    // The udev rule was in time: the drive is on VFIO already, and its serial cannot be read.
    let unit = bind::Request {
        user: Some("1000".into()),
        expect_serial: Some("SN-nvme0".into()),
        ..request(&[FREE])
    };
    bind::run(&kernel.host(), &unit).unwrap();
    let shown = status::run(&kernel.host(), Paint(false));
    assert!(shown.text.contains("bound again") && shown.code == 0, "{}", shown.text);
    let forget = release::Request { persist: true, ..Default::default() };
    let reply = release::restore(&kernel.host(), &forget).unwrap();
    assert_eq!(reply.text, format!("{FREE} has nvme"));
    fixture.file("/proc/sys/kernel/random/boot_id", "boot-1");
    assert_eq!(fixture.snapshot(), before);
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
    // Either unit may come first, and each must be able to take the group.
    let unit = fixture.root.text(UNIT.replace("67", "6a")).unwrap();
    assert!(unit.contains("--expect-serial SN-nvme2 --whole-group\n"), "{unit}");
    forget(&[FREE]);
    assert!(!fixture.root.exists(UNIT) && !fixture.root.exists(RULE));
    assert!(fixture.root.exists("/etc/modprobe.d/nvme-bind.conf"));
    forget(&[SHARED, NETWORK]);
    assert_eq!(fixture.snapshot(), before);
}

/// A drive says what its serial number is, and root executes the unit.
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
    assert!(unit.contains(r#""SN\x0a[Service]\x0aExecStart=/bin/evil\x09\xc2\x85end""#), "{unit}");
}
