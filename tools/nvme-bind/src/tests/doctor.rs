//! The doctor on machines with problems, and without hardware to check.

use super::bind::request;
use super::fixture::{Card, FREE, Fixture, GPU};
use super::kernel::{Fault, Kernel};
use crate::command::bind;
use crate::doctor::{self, EXIT_UNFIT, Finding, Verdict};
use crate::problem::Kind;
use crate::report::Paint;

fn examine(root: &crate::pci::Root) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut keep = |finding| {
        findings.push(finding);
        Ok::<_, std::convert::Infallible>(())
    };
    doctor::examine(root, &mut keep).unwrap();
    findings
}

pub(super) fn find(fixture: &Fixture, id: &str) -> Finding {
    examine(&fixture.root).into_iter().find(|finding| finding.id == id).unwrap()
}

/// Turns the server into one without problems.
fn healthy() -> Fixture {
    let fixture = Fixture::server();
    for module in ["vfio", "vfio_iommu_type1", "gdrdrv"] {
        fixture.folder(&format!("/sys/module/{module}"));
    }
    fixture.folder("/sys/bus/pci/drivers/vfio-pci");
    for node in ["/dev/vfio/vfio", "/dev/gdrdrv"] {
        use std::os::unix::fs::PermissionsExt;
        fixture.file(node, "");
        let open = std::fs::Permissions::from_mode(0o666);
        std::fs::set_permissions(fixture.root.at(node), open).unwrap();
    }
    let limits = "Limit  Soft Limit  Hard Limit  Units\n\
                  Max locked memory         unlimited            unlimited            bytes\n";
    fixture.file("/proc/self/limits", limits);
    fixture.file("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65\nGCC\n";
    fixture.file("/proc/driver/nvidia/version", version);
    fixture.file("/proc/driver/nvidia/params", "RegistryDwords: \"PeerMappingOverride=1\"\n");
    let about = format!("/proc/driver/nvidia/gpus/{GPU}/information");
    fixture.file(&about, "Model: \t\t NVIDIA H100\n");
    window(&fixture, 128 << 30);
    fixture
}

fn window(fixture: &Fixture, bytes: u64) {
    let start = 0x3800_0000_0000_u64;
    let line = format!("{start:#018x} {:#018x} 0x000000000014220c\n", start + bytes - 1);
    fixture.file(&format!("/sys/bus/pci/devices/{GPU}/resource"), &line);
}

/// Sets the ACS control of a bridge, as visible to root.
fn redirect(fixture: &Fixture, bdf: &str, control: u32) {
    let mut config = vec![0_u8; 4096];
    config[0x100..0x104].copy_from_slice(&(1_u32 << 16 | 0x000d).to_le_bytes());
    config[0x104..0x108].copy_from_slice(&(control << 16 | 0x005f).to_le_bytes());
    fixture.bytes(&format!("/sys/bus/pci/devices/{bdf}/config"), &config);
}

/// Sets ACS of both ports above drives that share a switch with the GPU.
fn acs(fixture: &Fixture, control: u32) {
    redirect(fixture, "0000:66:00.0", control);
    redirect(fixture, "0000:66:02.0", 0x1d);
}

fn driver(fixture: &Fixture, version: &str, kernel: &str) {
    let line = format!(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
    );
    fixture.file("/proc/driver/nvidia/version", &line);
    fixture.file("/proc/sys/kernel/osrelease", kernel);
}

#[test]
fn what_drives_under_vfio_need_is_right() {
    let fixture = healthy();
    acs(&fixture, 0x1d);
    let finding = find(&fixture, "acs");
    assert_eq!(finding.verdict, Verdict::Ok, "{finding:?}");
    assert!(finding.found.contains("uplink"), "the price is said: {finding:?}");
    for (version, kernel) in [("565.57.01", "6.8.0"), ("570.133.07", "6.12.0"), ("580.65", "6.17")]
    {
        driver(&fixture, version, kernel);
        assert_eq!(find(&fixture, "nvidia").verdict, Verdict::Ok, "{version} on {kernel}");
    }
}

/// Binding the GPU's group would take the GPU from the driver that is to use the drive.
#[test]
fn a_gpus_group_is_never_to_be_bound() {
    let fixture = healthy();
    assert!(find(&fixture, "groups").fix.unwrap().contains("--whole-group"), "a network card's");
    let devices = "/sys/kernel/iommu_groups/12/devices";
    fixture.link(&format!("{devices}/{GPU}"), &format!("/sys/devices/{GPU}"));
    let finding = find(&fixture, "groups");
    assert!(!finding.fix.unwrap().contains("--whole-group"));
}

#[test]
fn nothing_is_wrong_with_a_good_server_but_what_it_shares() {
    let fixture = healthy();
    for finding in examine(&fixture.root) {
        let wanted = match finding.id.as_str() {
            // One drive is on the other socket, one shares its group; ACS is visible only to root.
            "groups" | "distance" => Verdict::Warn,
            "acs" => Verdict::Skip,
            _ => Verdict::Ok,
        };
        assert_eq!(finding.verdict, wanted, "{finding:?}");
        assert!(!finding.found.is_empty() && !finding.looked_at.is_empty());
    }
    let bar = find(&fixture, "bar1").found;
    assert!(bar.contains("NVIDIA H100: 128 GiB"), "{bar}");
}

/// Turns all groups into those that VFIO makes in its no-IOMMU mode.
fn without_iommu(fixture: &Fixture) {
    std::fs::remove_dir_all(fixture.root.at("/sys/class/iommu")).unwrap();
    for group in fixture.root.names("/sys/kernel/iommu_groups") {
        let folder = format!("/sys/kernel/iommu_groups/{group}");
        fixture.file(&format!("{folder}/name"), "vfio-noiommu\n");
        fixture.file(&format!("{folder}/type"), "\n");
    }
}

#[test]
fn a_group_without_an_iommu_is_none() {
    let fixture = healthy();
    without_iommu(&fixture);
    let kernel = Kernel::new(&fixture, Fault::None);
    let problem = bind::run(&kernel.host(), &request(&[FREE])).unwrap_err();
    assert_eq!(problem.kind, Kind::NotViable);
    assert!(problem.message.contains("no-IOMMU mode"), "{problem}");
    assert_eq!(find(&fixture, "iommu-mode").verdict, Verdict::Skip);
}

/// Drives can move data only to GPUs of NVIDIA; a processor's graphics may be nearer.
#[test]
fn the_gpu_is_the_one_that_can_do_it() {
    let fixture = healthy();
    let graphics = "0000:66:03.0";
    fixture.card(&Card {
        path: format!("pci0000:64/0000:64:01.0/0000:65:00.0/{graphics}"),
        class: 0x03_0000,
        ids: (0x1002, 0x13c0),
        driver: None,
        group: Some(20),
        numa: 1,
    });
    for id in ["distance", "bar1"] {
        let found = find(&fixture, id).found;
        assert!(found.contains(GPU) && !found.contains(graphics), "{found}");
    }
    // Without one of NVIDIA, the other is shown.
    std::fs::remove_file(fixture.root.at(format!("/sys/bus/pci/devices/{GPU}"))).unwrap();
    let found = find(&fixture, "distance").found;
    assert!(found.contains(graphics), "{found}");
}

#[test]
fn each_fault_is_found_and_has_a_remedy() {
    type Break = fn(&Fixture);
    let breaks: &[(&str, Verdict, &str, Break)] = &[
        ("iommu", Verdict::Fail, "DMAR", |f| {
            std::fs::remove_dir_all(f.root.at("/sys/kernel/iommu_groups")).unwrap();
            std::fs::remove_dir_all(f.root.at("/sys/class/iommu")).unwrap();
            f.file("/sys/firmware/acpi/tables/DMAR", "");
        }),
        ("iommu", Verdict::Fail, "no-IOMMU mode", without_iommu),
        ("groups", Verdict::Fail, FREE, without_iommu),
        ("iommu", Verdict::Fail, "intel_iommu=off", |f| {
            std::fs::remove_dir_all(f.root.at("/sys/kernel/iommu_groups")).unwrap();
            f.file("/proc/cmdline", "quiet intel_iommu=off");
        }),
        ("vfio-modules", Verdict::Warn, "not loaded: vfio_iommu_type1", |f| {
            std::fs::remove_dir(f.root.at("/sys/module/vfio_iommu_type1")).unwrap();
            let list = "kernel/drivers/vfio/vfio_iommu_type1.ko.xz: kernel/drivers/vfio/vfio.ko\n";
            f.file("/lib/modules/6.1.0-test/modules.dep", list);
        }),
        ("vfio-modules", Verdict::Fail, "not there: vfio-pci", |f| {
            std::fs::remove_dir(f.root.at("/sys/bus/pci/drivers/vfio-pci")).unwrap();
        }),
        ("vfio-container", Verdict::Warn, "iommufd", |f| {
            std::fs::remove_dir(f.root.at("/sys/module/vfio_iommu_type1")).unwrap();
            f.file("/dev/iommu", "");
        }),
        ("groups", Verdict::Fail, FREE, |f| {
            let link = format!("/sys/bus/pci/devices/{FREE}/iommu_group");
            std::fs::remove_file(f.root.at(link)).unwrap();
        }),
        ("memlock", Verdict::Warn, "8 MiB", |f| {
            f.file("/proc/self/limits", "Max locked memory  8388608  8388608  bytes\n");
        }),
        ("groups", Verdict::Fail, "(GPU)", |f| {
            let groups = "/sys/kernel/iommu_groups/12/devices";
            f.link(&format!("{groups}/{GPU}"), &format!("/sys/devices/{GPU}"));
        }),
        ("acs", Verdict::Fail, "not redirected to the IOMMU by 0000:66:00.0", |f| acs(f, 0)),
        // The GPU's own port does not affect the drive's requests.
        ("acs", Verdict::Fail, "0000:66:00.0", |f| {
            acs(f, 0);
            redirect(f, "0000:66:01.0", 0x1d);
        }),
        ("nvidia", Verdict::Fail, "560.35", |f| driver(f, "560.35.03", "6.1.0-test")),
        ("nvidia", Verdict::Fail, "565.57", |f| driver(f, "565.57.01", "6.12.3-test")),
        ("nvidia", Verdict::Fail, "570.86", |f| driver(f, "570.86.15", "6.14.0")),
        ("bar1", Verdict::Warn, "256 MiB", |f| window(f, 256 << 20)),
        ("nvidia", Verdict::Fail, "not loaded", |f| {
            std::fs::remove_file(f.root.at("/proc/driver/nvidia/version")).unwrap();
        }),
        ("gdrdrv", Verdict::Warn, "not loaded", |f| {
            std::fs::remove_dir(f.root.at("/sys/module/gdrdrv")).unwrap();
        }),
        ("machine", Verdict::Warn, "virtual", |f| {
            f.file("/proc/cpuinfo", "flags\t\t: fpu hypervisor sse\n");
        }),
    ];
    for (id, verdict, words, set_up) in breaks {
        let fixture = healthy();
        assert_ne!(find(&fixture, id).verdict, Verdict::Fail, "{id}");
        set_up(&fixture);
        let finding = find(&fixture, id);
        assert_eq!(finding.verdict, *verdict, "{finding:?}");
        assert!(finding.found.contains(words), "`{words}` is not in {finding:?}");
        assert!(finding.fix.is_some(), "{finding:?}");
    }
}

#[test]
fn an_empty_folder_gets_a_report_and_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let root = crate::pci::Root::new(folder.path()).unwrap();
    let findings = examine(&root);
    assert!(findings.iter().all(|finding| !finding.found.is_empty()), "{findings:#?}");
    let fixture = Fixture::bare();
    let run = |strict, as_json| {
        let mut out = Vec::new();
        let code = doctor::run(&fixture.root, strict, as_json, Paint(false), &mut out).unwrap();
        (code, String::from_utf8(out).unwrap())
    };
    let (code, text) = run(false, false);
    assert!(code == 0 && text.contains("found ") && text.contains(" failed, "), "{text}");
    let (code, text) = run(true, true);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &json["fit"]), (EXIT_UNFIT, &false.into()));
    assert_eq!(json["checks"].as_array().unwrap().len(), findings.len());
}

/// A check that hangs must not hide earlier findings.
#[test]
fn findings_are_written_as_they_come() {
    for as_json in [false, true] {
        let mut out = Vec::new();
        let mut report = doctor::Report::new(&mut out, as_json, Paint(false)).unwrap();
        report.add(&Finding::new("one", "First", &[]).says(Verdict::Ok, "it is there")).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("First") && text.contains("it is there"), "{text}");
    }
}
