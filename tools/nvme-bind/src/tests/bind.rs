//! Binding and releasing: success, and required rejections.

use super::fixture::{Card, FREE, Fixture, GPU, NETWORK, SHARED, SYSTEM};
use super::kernel::{Fault, Kernel};
use crate::command::{bind, release, status};
use crate::problem::Kind;
use crate::report::Paint;

pub(super) fn request(devices: &[&str]) -> bind::Request {
    let devices = devices.iter().map(|&device| device.to_owned()).collect();
    bind::Request { devices, ..bind::Request::default() }
}

fn refused(fixture: &Fixture, request: &bind::Request, kind: Kind, words: &[&str]) {
    let before = fixture.snapshot();
    let kernel = Kernel::new(fixture, Fault::None);
    let problem = bind::run(&kernel.host(), request).unwrap_err();
    assert_eq!(problem.kind, kind, "{problem}");
    for word in words {
        assert!(problem.message.contains(word), "`{word}` is not in: {}", problem.message);
    }
    assert!(!problem.hint.is_empty(), "{problem}");
    assert_eq!(kernel.operations(), 0);
    assert_eq!(fixture.snapshot(), before);
}

#[test]
fn a_free_drive_goes_to_vfio_and_back() {
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    let request = bind::Request { user: Some("alice".into()), ..request(&["67:00.0"]) };
    let reply = bind::run(&kernel.host(), &request).unwrap();
    assert_eq!(reply.text, format!("{FREE} is bound to vfio-pci, /dev/vfio/12"));
    let writes = [
        format!("vfio-pci > /sys/bus/pci/devices/{FREE}/driver_override"),
        format!("{FREE} > /sys/bus/pci/drivers/nvme/unbind"),
        format!("{FREE} > /sys/bus/pci/drivers_probe"),
    ];
    assert_eq!(*kernel.writes.borrow(), writes);
    assert_eq!(fixture.root.text("/dev/vfio/12").as_deref(), Some("1000 0600"));
    let shown = status::run(&kernel.host(), Paint(false));
    assert!(shown.code == 0 && shown.text.contains("bound"), "{}", shown.text);

    let request = release::Request { devices: vec![FREE.into()], ..Default::default() };
    let reply = release::unbind(&kernel.host(), &request).unwrap();
    assert_eq!(reply.text, format!("{FREE} has nvme"));
    assert_eq!(fixture.snapshot(), before);
    // A second call has nothing to do.
    let reply = release::unbind(&kernel.host(), &request).unwrap();
    assert_eq!((reply.text.as_str(), fixture.snapshot() == before), ("nothing to give back", true));
}

#[test]
fn a_virtual_function_is_bound_and_its_drive_is_not() {
    let fixture = Fixture::server();
    let (function, bridge) = ("0000:67:00.1", "pci0000:64/0000:64:01.0/0000:65:00.0/0000:66:00.0");
    fixture.card(&Card {
        path: format!("{bridge}/{function}"),
        class: 0x01_0802,
        ids: (0x144d, 0xa80a),
        driver: Some("nvme"),
        group: Some(16),
        numa: 1,
    });
    fixture.disk(function, "nvme3", "259:9", &[]);
    let count = format!("/sys/bus/pci/devices/{FREE}/sriov_numvfs");
    fixture.file(&count, "1\n");
    refused(&fixture, &request(&[FREE]), Kind::InUse, &["1 virtual functions"]);
    let kernel = Kernel::new(&fixture, Fault::None);
    let reply = bind::run(&kernel.host(), &request(&[function])).unwrap();
    assert_eq!(reply.text, format!("{function} is bound to vfio-pci, /dev/vfio/16"));
    assert!(!kernel.writes.borrow().iter().any(|write| write.contains(FREE)), "only the function");
    // Without virtual functions, the drive is one like any other.
    fixture.file(&count, "0\n");
    let reply = bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    assert_eq!(reply.text, format!("{FREE} is bound to vfio-pci, /dev/vfio/12"));
}

#[test]
fn a_dry_run_prints_what_a_run_does() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::None);
    let before = fixture.snapshot();
    let wanted = bind::Request {
        group: Some("kvcache".into()),
        dry_run: true,
        ..request(&["/dev/nvme0n1"])
    };
    let host = kernel.host();
    let reply = bind::run(&host, &wanted).unwrap();
    assert_eq!((kernel.operations(), fixture.snapshot()), (0, before));
    let text = format!(
        "# journal: /run/nvme-bind/{FREE}.drive.json\n\
         modprobe vfio-pci\n\
         modprobe vfio_iommu_type1\n\
         echo vfio-pci > /sys/bus/pci/devices/{FREE}/driver_override\n\
         echo {FREE} > /sys/bus/pci/drivers/nvme/unbind\n\
         echo {FREE} > /sys/bus/pci/drivers_probe\n\
         # then checked: {FREE} has vfio-pci\n\
         chown :3000 /dev/vfio/12\n\
         chmod 0660 /dev/vfio/12"
    );
    assert_eq!(reply.text, text);
    assert!(host.notes.borrow().iter().any(|note| note == &format!("/dev/nvme0n1 is {FREE}")));
    // The real run makes the same writes.
    bind::run(&host, &bind::Request { dry_run: false, ..wanted }).unwrap();
    let printed = text.lines().filter_map(|line| line.strip_prefix("echo "));
    assert_eq!(printed.collect::<Vec<_>>(), *kernel.writes.borrow());
}

#[test]
fn the_root_disk_is_refused_by_any_name() {
    let fixture = Fixture::server();
    for name in [SYSTEM, "17:00.0", "nvme1", "nvme1n1", "/dev/nvme1n1"] {
        refused(&fixture, &request(&[name]), Kind::InUse, &["nvme1n1p2: the root filesystem /"]);
    }
    // One drive in use keeps the others unbound.
    refused(&fixture, &request(&[FREE, SYSTEM]), Kind::InUse, &["/boot/efi"]);
    refused(&fixture, &request(&[GPU]), Kind::Usage, &["GPU"]);
    refused(&fixture, &request(&["nvme9n1"]), Kind::Usage, &["nvme9n1"]);
    let nobody = bind::Request { user: Some("bob".into()), ..request(&[FREE]) };
    refused(&fixture, &nobody, Kind::Usage, &["bob"]);
    let other = bind::Request { expect_serial: Some("SN-x".into()), ..request(&[FREE]) };
    refused(&fixture, &other, Kind::Usage, &["SN-nvme0", "SN-x"]);
}

/// Naming a partition does not imply its siblings.
#[test]
fn a_partition_is_refused_and_its_drive_named() {
    let fixture = Fixture::server();
    fixture.link("/dev/disk/by-id/nvme-ACME-part2", "../../nvme1n1p2");
    for (name, drive) in [
        ("nvme1n1p1", "nvme1n1"),
        ("/dev/nvme1n1p1", "nvme1n1"),
        ("/dev/disk/by-id/nvme-ACME-part2", "nvme1n1"),
        // The drive is free, but the partition does not exist.
        ("nvme0n1p1", "nvme0n1"),
        ("/dev/nvme0n1p7", "nvme0n1"),
    ] {
        for dry_run in [false, true] {
            let wanted = bind::Request { dry_run, ..request(&[name]) };
            refused(&fixture, &wanted, Kind::Usage, &[name, "partition"]);
            let problem = bind::run(&Kernel::new(&fixture, Fault::None).host(), &wanted);
            let hint = problem.unwrap_err().hint;
            assert!(hint.contains(&format!("the drive, {drive},")), "{name}: {hint}");
        }
    }
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&["nvme0n1"])).unwrap();
    let given = release::Request { devices: vec!["nvme0n1p1".into()], ..Default::default() };
    assert_eq!(release::unbind(&kernel.host(), &given).unwrap_err().kind, Kind::Usage);
}

#[test]
fn a_shared_group_is_bound_as_a_whole_or_not_at_all() {
    let fixture = Fixture::server();
    refused(&fixture, &request(&[SHARED]), Kind::NotViable, &[NETWORK, "mlx5_core", "group 15"]);
    let whole = bind::Request { whole_group: true, ..request(&[SHARED]) };
    let folder = format!("/sys/bus/pci/devices/{NETWORK}/net/eth0");
    fixture.file(&format!("{folder}/operstate"), "up\n");
    fixture.file(&format!("{folder}/flags"), "0x1003\n");
    refused(&fixture, &whole, Kind::InUse, &["eth0"]);
    fixture.file(&format!("{folder}/operstate"), "down\n");
    fixture.file(&format!("{folder}/flags"), "0x1002\n");

    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &whole).unwrap();
    for bdf in [SHARED, NETWORK] {
        let driver = fixture.root.link_name(format!("/sys/bus/pci/devices/{bdf}/driver"));
        assert_eq!(driver.as_deref(), Some("vfio-pci"), "{bdf}");
    }
    let reply = release::restore(&kernel.host(), &release::Request::default()).unwrap();
    assert_eq!(reply.text, format!("{SHARED} has nvme\n{NETWORK} has mlx5_core"));
    assert_eq!(fixture.snapshot(), before);
}

#[test]
fn without_an_iommu_nothing_is_bound() {
    let fixture = Fixture::server();
    let link = format!("/sys/bus/pci/devices/{FREE}/iommu_group");
    std::fs::remove_file(fixture.root.at(link)).unwrap();
    refused(&fixture, &request(&[FREE]), Kind::NotViable, &["IOMMU"]);
}

#[test]
fn a_group_in_use_is_not_taken_away() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    fixture.process(77, "ripieno", &["/dev/vfio/vfio", "/dev/vfio/12"]);
    let before = fixture.snapshot();
    let wanted = release::Request { devices: vec![FREE.into()], ..Default::default() };
    for attempt in [release::unbind, release::restore] {
        let problem = attempt(&kernel.host(), &wanted).unwrap_err();
        assert_eq!(problem.kind, Kind::InUse);
        assert!(problem.message.contains("ripieno (pid 77)"), "{problem}");
    }
    assert_eq!(fixture.snapshot(), before);
}

#[test]
fn a_drive_bound_by_others_can_be_given_back() {
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    let record = format!("/run/nvme-bind/{FREE}.drive.json");
    std::fs::remove_file(fixture.root.at(&record)).unwrap();
    let shown = status::run(&kernel.host(), Paint(false));
    assert!(shown.text.contains("not by nvme-bind"), "{}", shown.text);
    let wanted = release::Request { devices: vec![FREE.into()], ..Default::default() };
    assert_eq!(release::restore(&kernel.host(), &wanted).unwrap_err().kind, Kind::Usage);
    release::unbind(&kernel.host(), &wanted).unwrap();
    assert_eq!(fixture.snapshot(), before);
}

#[test]
fn binding_twice_keeps_the_former_driver() {
    let fixture = Fixture::server();
    let before = fixture.snapshot();
    let kernel = Kernel::new(&fixture, Fault::None);
    bind::run(&kernel.host(), &request(&[FREE])).unwrap();
    let again = bind::Request { user: Some("1000".into()), ..request(&[FREE]) };
    bind::run(&kernel.host(), &again).unwrap();
    assert_eq!(fixture.root.text("/dev/vfio/12").as_deref(), Some("1000 0600"));
    release::restore(&kernel.host(), &release::Request::default()).unwrap();
    assert_eq!(fixture.snapshot(), before);
}
