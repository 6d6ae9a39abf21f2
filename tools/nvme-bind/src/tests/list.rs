//! The list, and the path from drive to GPU.

use super::bind::request;
use super::fixture::{Card, FREE, Fixture, GPU, SYSTEM};
use super::kernel::{Fault, Kernel};
use crate::cli;
use crate::command::{bind, list};
use crate::drive;
use crate::gpu::gpus;
use crate::report::Paint;
use crate::topology::{Meeting, nearest};

#[test]
fn drives_are_listed_with_users_and_neighbours() {
    let fixture = Fixture::server();
    let kernel = Kernel::new(&fixture, Fault::None);
    let reply = list::run(&kernel.host(), true, Paint(false));
    let rows: Vec<&str> = reply.text.lines().collect();
    assert_eq!(rows.len(), 4, "{}", reply.text);
    let words = |row: &str| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let system = words(rows[1]).join(" ");
    let wanted = format!("{SYSTEM} nvme1n1 ACME DC 1920 SN-nvme1 1.92 TB nvme 14 0 /, /boot/efi");
    assert!(system.starts_with(&wanted), "{system}");
    assert!(system.ends_with(&format!("{GPU} (across NUMA nodes)")), "{system}");
    assert!(rows[2].contains(FREE) && rows[2].ends_with("(same switch)"), "{}", rows[2]);
    assert!(rows[3].contains("15 (+1)"), "{}", rows[3]);
    let drives = reply.json["drives"].as_array().unwrap();
    assert_eq!(drives[1]["nearest_gpu"]["distance"]["hops"], serde_json::Value::Null);
    assert_eq!(drives[1]["nearest_gpu"]["hops"], 4);
    assert_eq!(drives[0]["in_use"], true);
}

#[test]
fn the_whole_program_on_a_copy_of_a_machine() {
    let fixture = Fixture::server();
    let root = fixture.root.at("/").display().to_string();
    let run = |arguments: &[&str]| {
        let all = ["nvme-bind", "--root", &root].into_iter().chain(arguments.iter().copied());
        let mut early = Vec::new();
        let mut outcome = cli::answer(all.collect::<Vec<_>>(), Paint(false), &mut early);
        outcome.data.insert_str(0, &String::from_utf8(early).unwrap());
        outcome
    };
    let list = run(&["list"]);
    assert!(list.code == 0 && list.data.contains(FREE) && list.log.is_empty(), "{list:?}");
    let refused = run(&["bind", SYSTEM]);
    assert!(refused.code == 3 && refused.data.is_empty(), "{refused:?}");
    assert!(refused.log.contains("error: in use") && refused.log.contains("hint: "), "{refused:?}");
    let refused = run(&["--json", "bind", SYSTEM]);
    let json: serde_json::Value = serde_json::from_str(&refused.data).unwrap();
    assert_eq!(json["error"]["kind"], "in-use");
    let dry = run(&["bind", "67:00.0", "--dry-run", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&dry.data).unwrap();
    assert_eq!(json["would_do"].as_array().unwrap().len(), 7, "{dry:?}");
    for command in ["list", "status", "doctor", "restore"] {
        let reply = run(&[command, "--json"]);
        assert_eq!(reply.code, 0, "{reply:?}");
        serde_json::from_str::<serde_json::Value>(&reply.data).unwrap();
    }
}

#[test]
fn the_nearest_gpu_is_the_one_on_the_shortest_way() {
    let fixture = Fixture::bare();
    let card = |path: &str, class, numa| {
        fixture.card(&Card {
            path: path.into(),
            class,
            ids: (0x10de, 0x2330),
            driver: None,
            group: None,
            numa,
        });
    };
    let meeting = |drive: &str| {
        let (function, _) = drive::named(&fixture.root, drive).unwrap();
        let gpus = gpus(&fixture.root);
        let (gpu, way) = nearest(&function, &gpus).unwrap();
        (gpu.function.bdf.to_string(), way.meeting, way.hops)
    };
    card("pci0000:00/0000:00:01.0/0000:01:00.0", 0x01_0802, 0);
    card("pci0000:80/0000:80:01.0/0000:81:00.0", 0x03_0200, 1);
    let far = ("0000:81:00.0".to_owned(), Meeting::AcrossNodes, 4);
    assert_eq!(meeting("01:00.0"), far);
    card("pci0000:40/0000:40:01.0/0000:41:00.0", 0x03_0200, 0);
    assert_eq!(meeting("01:00.0"), ("0000:41:00.0".to_owned(), Meeting::SameNode, 4));
    card("pci0000:00/0000:00:02.0/0000:02:00.0", 0x03_0200, 0);
    assert_eq!(meeting("01:00.0"), ("0000:02:00.0".to_owned(), Meeting::SameHostBridge, 4));
    // Two switches below one root port.
    card("pci0000:c0/0000:c0:01.0/0000:c1:00.0/0000:c2:00.0/0000:c3:00.0", 0x01_0802, 0);
    card(
        "pci0000:c0/0000:c0:01.0/0000:c1:00.0/0000:c2:01.0/0000:c4:00.0/0000:c5:00.0/0000:c6:00.0",
        0x03_0200,
        0,
    );
    assert_eq!(meeting("c3:00.0"), ("0000:c6:00.0".to_owned(), Meeting::SameRootPort, 6));
}

#[test]
fn disks_behind_multipath_belong_to_their_controllers() {
    let fixture = Fixture::server();
    let real = fixture.root.resolve(format!("/sys/bus/pci/devices/{FREE}")).unwrap();
    // A path without a device number, and its disk outside the PCI tree.
    fixture.folder(&format!("{}/nvme/nvme0/nvme7c0n1", real.display()));
    fixture.block("/sys/devices/virtual/nvme-subsystem/nvme-subsys7/nvme7n1", "259:70", 1 << 20);
    let (function, note) = drive::named(&fixture.root, "nvme7n1").unwrap();
    assert_eq!((function.bdf.to_string().as_str(), note.is_some()), (FREE, true));
    let disks = drive::disks(&fixture.root, function.bdf);
    let names: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["nvme0n1", "nvme7n1"]);
}

#[test]
fn all_disks_of_a_drive_are_shown_and_named() {
    let fixture = Fixture::server();
    let real = fixture.root.resolve(format!("/sys/bus/pci/devices/{FREE}")).unwrap();
    for (namespace, number) in [(17, "259:50"), (3, "259:51")] {
        let disk = format!("nvme0n{namespace}");
        fixture.block(&format!("{}/nvme/nvme0/{disk}", real.display()), number, 3_750_748_848);
        fixture.bytes(&format!("/dev/{disk}"), &[0; 4096]);
    }
    let kernel = Kernel::new(&fixture, Fault::None);
    let list = list::run(&kernel.host(), false, Paint(false)).text;
    let row = list.lines().find(|row| row.contains(FREE)).unwrap();
    assert!(row.contains("nvme0n1 +2") && row.contains("5.76 TB"), "{row}");
    let names: Vec<String> = drive::disks(&fixture.root, FREE.parse().unwrap())
        .into_iter()
        .map(|disk| disk.name)
        .collect();
    assert_eq!(names, ["nvme0n1", "nvme0n3", "nvme0n17"]);
    let host = kernel.host();
    bind::run(&host, &request(&["nvme0n3"])).unwrap();
    let notes = host.notes.borrow().join("\n");
    assert!(notes.contains("all its disks: nvme0n1, nvme0n3, nvme0n17"), "{notes}");
}

#[test]
fn a_virtual_function_without_a_controller_has_a_hint() {
    let fixture = Fixture::server();
    let function = "0000:67:00.1";
    fixture.card(&Card {
        path: format!("pci0000:64/0000:64:01.0/0000:65:00.0/0000:66:00.0/{function}"),
        class: 0x01_0802,
        ids: (0x144d, 0xa80a),
        driver: None,
        group: Some(16),
        numa: 1,
    });
    fixture.link(&format!("/sys/bus/pci/devices/{function}/physfn"), &format!("../{FREE}"));
    let kernel = Kernel::new(&fixture, Fault::None);
    for command in ["list", "bind"] {
        let host = kernel.host();
        if command == "list" {
            list::run(&host, false, Paint(false));
        } else {
            bind::run(&host, &request(&[function])).unwrap();
        }
        let notes = host.notes.borrow().join("\n");
        assert!(notes.contains(&format!("{function} is a virtual function of {FREE}")), "{notes}");
        assert!(notes.contains("offline"), "{notes}");
    }
}
