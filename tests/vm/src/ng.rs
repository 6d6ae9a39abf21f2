//! Drives that the kernel's driver keeps, used by passthrough: `ng:/dev/ng0n1`.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nvme_driver::{Controller, Error, LbaRange};
use nvme_spec::ids::{Lba, Nsid};
use nvme_spec::status::Status;
use objstore::StoreDevice;
use ripieno_stack::Devices;
use serde_json::{Value, json};

use crate::drive::{FIRST, SECOND, options, pattern, same};
use crate::hardware::{
    BAD_READ_LBA, BAD_WRITE_LBA, DRIVE_A, DRIVE_B, DRIVE_S, DRIVE_Z, FILE_A, FILE_B, SERIAL_A,
};
use crate::host::{self, Host};
use crate::pci;
use crate::program::{self, Ran};
use crate::runner::{SECONDS_MAX, Suite, tests, until};
use crate::serve;

pub const SUITE: Suite = Suite {
    name: "ng",
    seconds_max: SECONDS_MAX,
    tests: tests![
        a_drive_says_what_it_is,
        every_command_arrives,
        errors_are_those_of_the_drive,
        both_drives_with_every_byte_checked,
        large_objects_are_moved_in_parts,
        an_lba_that_fails_is_no_wrong_byte,
        what_was_kept_is_found,
        wrong_bytes_are_found,
        a_store_survives_a_kill,
        clients_of_a_server_find_what_they_stored,
        a_mounted_namespace_is_refused,
        data_is_not_overwritten,
        a_store_keeps_others_out,
        other_claims_keep_a_store_out,
        what_has_no_blocks_is_refused,
        a_zoned_namespace_is_refused,
        only_root_may,
        the_same_store_is_found_through_vfio,
        a_namespace_of_two_controllers_has_an_owner,
    ],
};

const FAILED: i32 = 1;
const REFUSED: i32 = 2;

/// Returns the generic devices of a drive, sorted: one for each namespace.
fn nodes(bdf: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    until(&format!("{bdf} has a generic device"), || {
        found.clear();
        for controller in pci::names(&pci::folder(bdf).join("nvme"))? {
            let folder = pci::folder(bdf).join("nvme").join(&controller);
            found.extend(pci::names(&folder)?.into_iter().filter(|name| name.starts_with("ng")));
        }
        Ok(!found.is_empty())
    })?;
    found.sort();
    Ok(found)
}

fn ng(bdf: &str, index: usize) -> Result<String> {
    Ok(format!("ng:/dev/{}", nodes(bdf)?[index]))
}

/// Drive A, and the first namespace of drive B.
fn both() -> Result<String> {
    Ok(format!("{},{}", ng(DRIVE_A, 0)?, ng(DRIVE_B, 0)?))
}

/// Returns the block device of a namespace.
fn disk(bdf: &str, index: usize) -> Result<String> {
    Ok(format!("/dev/{}", pci::wait_for_disks(bdf, if bdf == DRIVE_B { 2 } else { 1 })?[index]))
}

fn ripieno(words: &str) -> Result<Ran> {
    program::run("ripieno", &words.split(' ').collect::<Vec<_>>())
}

fn tool(words: &str) -> Result<Ran> {
    let (name, rest) = words.split_once(' ').context("no arguments")?;
    program::run(name, &rest.split(' ').collect::<Vec<_>>())?.success()
}

const REPLAY: &str = "replay --model tiny --verify full --json --pool-blocks 2048";

/// Runs a replay that checks all bytes and must find no error. Returns its report.
fn replay(device: &str, more: &str) -> Result<Value> {
    let report = ripieno(&format!("{REPLAY} --devices {device} {more}"))?.success()?.json()?;
    for nothing in ["mismatches", "io_errors", "recoveries"] {
        ensure!(report[nothing] == 0, "{nothing}: {report}");
    }
    let count = |name: &str| report[name].as_u64().unwrap_or(0);
    ensure!(count("retrieved_bytes") > 1 << 20, "{report}");
    ensure!(
        count("verified_bytes") == count("retrieved_bytes") + count("final_check_bytes"),
        "{report}"
    );
    Ok(report)
}

/// Attaches the driver to a namespace, which is claimed until the result is dropped.
fn attach(device: &str) -> Result<Devices> {
    let mut devices = Devices::drives(&[device.parse().map_err(anyhow::Error::msg)?]);
    devices.attach(&options(), None)?;
    Ok(devices)
}

fn with<T>(devices: &Devices, act: impl FnOnce(&mut Controller) -> Result<T>) -> Result<T> {
    let StoreDevice { controller, .. } = &devices.attached()[0];
    act(&mut controller.lock())
}

fn a_drive_says_what_it_is() -> Result<()> {
    let devices = format!("{},{}", ng(DRIVE_A, 0)?, ng(DRIVE_B, 1)?);
    let report = ripieno(&format!("identify --json --devices {devices}"))?.success()?.json()?;
    let (a, b) = (&report["devices"][0], &report["devices"][1]);
    ensure!(a["serial"] == SERIAL_A && a["model"] == "QEMU NVMe Ctrl", "{a}");
    // That of the software controller has 310 kelvins.
    ensure!(a["health"]["temperature_celsius"] == 50, "{a}");
    ensure!(a["volatile_write_cache"] == true && a["nvme_version"] == "1.4", "{a}");
    ensure!(a["namespaces"][0]["bytes"] == 256 << 20, "{a}");
    let spaces = b["namespaces"].as_array().context("no namespaces")?;
    ensure!(spaces.len() == 1 && spaces[0]["nsid"] == 2 && spaces[0]["lba_bytes"] == 512, "{b}");
    let doctor = ripieno(&format!("doctor --json --devices {devices}"))?.success()?.json()?;
    ensure!(doctor["works"] == json!(["host"]), "{doctor}");
    Ok(())
}

/// Reads and writes of all sizes, FUA, flush, write zeroes and deallocation, seen from outside.
fn every_command_arrives() -> Result<()> {
    let mut host = Host::open()?;
    let spaces = [(DRIVE_A, 0, FIRST, FILE_A), (DRIVE_B, 0, FIRST, FILE_B[0])];
    let spaces = [spaces[0], spaces[1], (DRIVE_B, 1, SECOND, FILE_B[1])];
    for (seed, (bdf, index, nsid, file)) in (100..).step_by(50).zip(spaces) {
        let devices = attach(&ng(bdf, index)?)?;
        with(&devices, |drive| {
            let lba = drive.namespace(nsid)?.lba_bytes() as usize;
            let mut check = |drive: &mut Controller, at: u64, bytes: &[u8]| -> Result<()> {
                let mut found = vec![0; bytes.len()];
                drive.read(nsid, Lba(at), &mut found)?;
                same(&format!("{file} {at}"), &found, bytes)?;
                let outside = host.hash(file, at * lba as u64, bytes.len())?;
                ensure!(outside == host::hash(bytes), "{} bytes at {at} of {file}", bytes.len());
                Ok(())
            };
            let all = [1, 3, (128 << 10) / lba, (1 << 20) / lba + 1];
            for (seed, lbas) in (seed..).zip(all) {
                let bytes = pattern(seed, lbas * lba);
                drive.write(nsid, Lba(1000 + seed), &bytes, lbas == 3)?;
                check(drive, 1000 + seed, &bytes)?;
            }
            drive.flush(nsid)?;
            let (at, lbas) = (4000, (1 << 20) / lba as u64);
            let bytes = pattern(seed + 40, 1 << 20);
            drive.write(nsid, Lba(at), &bytes, false)?;
            let range = |from, lbas| LbaRange { lba: Lba(at + from), lbas };
            drive.write_zeroes(nsid, range(1, lbas / 2), true)?;
            let mut wanted = bytes;
            wanted[lba..lba + (lbas as usize / 2) * lba].fill(0);
            check(drive, at, &wanted)?;
            // The bytes of a deallocated range are not certain; those beside it are.
            let unit = 65_536 / lba as u64;
            drive.deallocate(nsid, &[range(8 * unit, unit), range(10 * unit, 2 * unit)])?;
            for (from, units) in [(7, 1), (9, 1), (12, 4)] {
                let part = (from << 16) as usize..((from + units) << 16) as usize;
                check(drive, at + from * unit, &wanted[part])?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The status of a failed command is the drive's own.
fn errors_are_those_of_the_drive() -> Result<()> {
    let devices = attach(&ng(DRIVE_A, 0)?)?;
    with(&devices, |drive| {
        let mut block = vec![0; 512];
        let read = drive.read(FIRST, Lba(BAD_READ_LBA), &mut block);
        let status = |ended: &Result<(), Error>| {
            ended.as_ref().err().and_then(Error::status).map(Status::code)
        };
        ensure!(status(&read) == Some(Status::UNRECOVERED_READ_ERROR), "{read:?}");
        let written = drive.write(FIRST, Lba(BAD_WRITE_LBA), &block, false);
        ensure!(status(&written) == Some(Status::WRITE_FAULT), "{written:?}");
        let beyond = drive.deallocate(FIRST, &[LbaRange { lba: Lba(1 << 40), lbas: 1 }]);
        ensure!(beyond.is_err(), "{beyond:?}");
        let other = drive.read(Nsid(7), Lba(0), &mut block);
        ensure!(matches!(other, Err(Error::Namespace { .. })), "{other:?}");
        Ok(drive.read(FIRST, Lba(0), &mut block)?)
    })
}

fn both_drives_with_every_byte_checked() -> Result<()> {
    let report = replay(&both()?, "--requests 150 --overwrite anything")?;
    ensure!(report["devices"] == 2 && report["executor"] == "file", "{report}");
    // The I/O kernel on software controllers, which pass on what they get.
    let other = replay(&both()?, "--requests 60 --executor host")?;
    ensure!(other["executor"] == "host", "{other}");
    Ok(())
}

/// Objects of 576 KiB are longer than a command of QEMU's drive (512 KiB), or of the kernel.
fn large_objects_are_moved_in_parts() -> Result<()> {
    let shape = "--model deepseek-v3-mla --block-tokens 512 --pool-blocks 2 --capacity 100MiB";
    let words = format!(
        "replay {shape} --requests 2 --overwrite anything --verify full --json --devices {}",
        ng(DRIVE_B, 0)?
    );
    let report = ripieno(&words)?.success()?.json()?;
    ensure!(report["object_bytes"] == 576 << 10, "{report}");
    ensure!(report["retrieved_bytes"].as_u64() > Some(10 << 20), "{report}");
    ensure!(report["mismatches"] == 0 && report["io_errors"] == 0, "{report}");
    Ok(())
}

/// The region of drive A includes an LBA that can be written but not read.
fn an_lba_that_fails_is_no_wrong_byte() -> Result<()> {
    let report = ripieno(&format!("{REPLAY} --requests 450 --devices {}", both()?))?;
    let report = report.with_code(FAILED)?.json()?;
    ensure!(report["mismatches"] == 0, "{report}");
    ensure!(report["io_errors"].as_u64() > Some(0), "LBA {BAD_READ_LBA} was not read: {report}");
    Ok(())
}

const KEEP: &str = "--keep --capacity 8MiB";

/// Makes a store that is kept, and stores blocks in it. Returns the report.
fn make(device: &str) -> Result<Value> {
    replay(device, &format!("{KEEP} --requests 60 --overwrite anything"))
}

/// A process finds the blocks that another one stored, and writes nothing.
fn what_was_kept_is_found() -> Result<()> {
    let device = ng(DRIVE_B, 0)?;
    let first = make(&device)?;
    let again = replay(&device, &format!("{KEEP} --requests 60"))?;
    ensure!(first["store"] == "made" && again["store"] == "opened", "{first} {again}");
    ensure!(again["trace_blocks_hit"] == again["trace_blocks"], "{again}");
    ensure!(again["stored_bytes"] == 0, "{again}");
    fsck(&device)
}

fn fsck(device: &str) -> Result<()> {
    let report = ripieno(&format!("fsck --json --devices {device}"))?.success()?.json()?;
    ensure!(report["damage"] == json!([]), "{report}");
    Ok(())
}

/// Bytes that something else changed are found by their checksums, and are never delivered.
fn wrong_bytes_are_found() -> Result<()> {
    let device = ng(DRIVE_B, 0)?;
    make(&device)?;
    let clean = ripieno(&format!("scrub --json --devices {device}"))?.success()?.json()?;
    ensure!(clean["damaged"] == json!([]) && clean["files_read"].as_u64() > Some(0), "{clean}");
    let about = ripieno(&format!("inspect --json --devices {device}"))?.success()?.json()?;
    // Before the store's region is a MiB for the signatures of others.
    let data = (1 << 20) + about["store"]["data_offset"].as_u64().context("no data_offset")?;
    let disk = File::options().write(true).custom_flags(libc::O_DSYNC).open(disk(DRIVE_B, 0)?)?;
    disk.write_all_at(&pattern(9, 64 << 10), data)?;
    drop(disk);
    let hit = ripieno(&format!("scrub --json --devices {device}"))?.with_code(FAILED)?.json()?;
    ensure!(hit["damaged"].as_array().is_some_and(|all| !all.is_empty()), "{hit}");
    Ok(())
}

/// Starts a replay that takes far longer than the test, and waits until it has the namespace.
fn start(device: &str) -> Result<Child> {
    let words = format!(
        "replay --model tiny --devices {device} --keep --capacity 8MiB --requests 20000 \
         --pool-blocks 2048"
    );
    let mut child = program::start("ripieno", &words.split(' ').collect::<Vec<_>>())?;
    let node = device.strip_prefix("ng:").context("it is no ng")?;
    until("the replay has opened the namespace", || {
        ensure!(child.try_wait()?.is_none(), "it ended");
        let files = fs::read_dir(format!("/proc/{}/fd", child.id())).into_iter().flatten();
        let mut files = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
        Ok(files.any(|file| file == Path::new(node)))
    })?;
    // Continue in the middle of its I/O.
    thread::sleep(Duration::from_millis(1_500));
    ensure!(child.try_wait()?.is_none(), "it was over too early");
    Ok(child)
}

/// Fails unless a store opens at once, and its data is right.
fn is_whole(device: &str) -> Result<()> {
    fsck(device)?;
    let again = replay(device, &format!("{KEEP} --requests 60"))?;
    ensure!(again["store"] == "opened", "{again}");
    Ok(())
}

/// Kills a replay that evicts, with commands in the drive: the store opens at once, and its data is
/// right.
fn a_store_survives_a_kill() -> Result<()> {
    let device = ng(DRIVE_B, 0)?;
    make(&device)?;
    for _ in 0..4 {
        let mut child = start(&device)?;
        child.kill()?;
        child.wait()?;
        is_whole(&device)?;
    }
    Ok(())
}

/// Returns all commands that write to a namespace.
fn writers(device: &str) -> [String; 4] {
    [
        format!("format --model tiny --no-undo --overwrite anything --devices {device}"),
        format!("replay --model tiny --overwrite anything --devices {device}"),
        format!("bench raw --rw randwrite --overwrite anything --runtime 1 --devices {device}"),
        format!("fsck --repair --devices {device}"),
    ]
}

fn refused(device: &str, words: &[&str]) -> Result<()> {
    for line in writers(device) {
        let ran = ripieno(&line)?.with_code(REFUSED)?;
        for word in words {
            ensure!(ran.err.contains(word), "`{word}` is not in {ran:?}");
        }
    }
    Ok(())
}

fn clients_of_a_server_find_what_they_stored() -> Result<()> {
    serve::is_found_on(&both()?)
}

fn a_mounted_namespace_is_refused() -> Result<()> {
    let (device, disk) = (ng(DRIVE_B, 1)?, disk(DRIVE_B, 1)?);
    tool(&format!("mke2fs -F {disk}"))?;
    tool(&format!("mount -t ext2 {disk} /mnt"))?;
    fs::write("/mnt/file", "kept")?;
    let words = [&disk["/dev/".len()..], "mounted /mnt"];
    let refusal = refused(&device, &[&[&*device], &words[..]].concat());
    let block = ripieno(&format!("bench raw --runtime 1 --block {disk}"))?;
    let text = fs::read_to_string("/mnt/file");
    tool("umount /mnt")?;
    refusal?;
    let is_named = words.iter().all(|word| block.err.contains(word));
    ensure!(is_named && block.code == Some(REFUSED), "{block:?}");
    ensure!(text? == "kept");
    Ok(())
}

/// The file system of the last test, which is not mounted any more.
fn data_is_not_overwritten() -> Result<()> {
    let (device, disk) = (ng(DRIVE_B, 1)?, disk(DRIVE_B, 1)?);
    for line in [
        format!("format --model tiny --no-undo --devices {device}"),
        format!("replay --model tiny --devices {device}"),
        format!("replay --model tiny --keep --capacity 8MiB --devices {device}"),
        format!("bench raw --rw randwrite --runtime 1 --devices {device}"),
    ] {
        let ran = ripieno(&line)?.with_code(REFUSED)?;
        ensure!(ran.err.contains(&device), "{ran:?}");
    }
    tool(&format!("mount -t ext2 {disk} /mnt"))?;
    let text = fs::read_to_string("/mnt/file");
    tool("umount /mnt")?;
    ensure!(text? == "kept");
    Ok(())
}

/// While a store is open: no other one, no mount, no file system, and the drive is not unbound.
fn a_store_keeps_others_out() -> Result<()> {
    let (device, disk) = (ng(DRIVE_B, 0)?, disk(DRIVE_B, 0)?);
    make(&device)?;
    let mut child = start(&device)?;
    let mut others = || -> Result<()> {
        refused(&device, &["open in ripieno"])?;
        let block = ripieno(&format!("bench raw --runtime 1 --block {disk}"))?;
        ensure!(block.code == Some(REFUSED), "{block:?}");
        let mount = program::run("mount", &["-t", "ext2", &disk, "/mnt"])?;
        ensure!(mount.code != Some(0), "{mount:?}");
        let bind = program::run("nvme-bind", &["bind", DRIVE_B])?.with_code(3)?;
        ensure!(bind.err.contains(&disk["/dev/".len()..]), "{bind:?}");
        ensure!(child.try_wait()?.is_none(), "the store ended");
        Ok(())
    };
    let outcome = others();
    child.kill()?;
    child.wait()?;
    outcome?;
    fsck(&device)
}

/// A store on the block device, and a drive that vfio-pci has.
fn other_claims_keep_a_store_out() -> Result<()> {
    let (device, disk) = (ng(DRIVE_B, 0)?, disk(DRIVE_B, 0)?);
    make(&device)?;
    let claim = File::options().read(true).write(true).custom_flags(libc::O_EXCL).open(&disk)?;
    refused(&device, &["in use", "open in vm-tests"])?;
    drop(claim);
    // Not all users claim it.
    let open = File::open(&disk)?;
    refused(&device, &["in use", "open in vm-tests"])?;
    drop(open);
    fsck(&device)?;
    program::run("nvme-bind", &["bind", DRIVE_B])?.success()?;
    let refusal = refused(&device, &["No such", "nvme-bind"]);
    program::run("nvme-bind", &["restore"])?.success()?;
    pci::wait_for_disks(DRIVE_B, 2)?;
    refusal?;
    fsck(&ng(DRIVE_B, 0)?)
}

fn what_has_no_blocks_is_refused() -> Result<()> {
    for path in ["/dev/null", "/dev/nvme0", "/tmp", "/dev/ng77n1"] {
        let ran = ripieno(&format!("identify --devices ng:{path}"))?.with_code(REFUSED)?;
        ensure!(ran.err.contains(path) && ran.err.contains("/dev/ng0n1"), "{ran:?}");
    }
    let bare = ripieno("identify --devices /dev/ng0n1")?.with_code(REFUSED)?;
    ensure!(bare.err.contains("ng:/dev/ng0n1"), "{bare:?}");
    Ok(())
}

fn a_zoned_namespace_is_refused() -> Result<()> {
    refused(&ng(DRIVE_Z, 0)?, &["zoned"])
}

/// With the device open to everyone, the kernel still lets only root send admin commands.
fn only_root_may() -> Result<()> {
    let (device, disk) = (ng(DRIVE_A, 0)?, disk(DRIVE_A, 0)?);
    let node = &device["ng:".len()..];
    let attempt = |open: bool| -> Result<()> {
        tool(&format!("chmod {} {node} {disk}", if open { "666" } else { "600" }))?;
        let mut command = Command::new("ripieno");
        let ran = command.args(["identify", "--devices", &device]).uid(65_534).output()?;
        ensure!(ran.status.code() == Some(REFUSED), "{ran:?}");
        let said = String::from_utf8_lossy(&ran.stderr);
        ensure!(said.contains("CAP_SYS_ADMIN"), "{said}");
        Ok(())
    };
    attempt(false)?;
    let open = attempt(true);
    tool(&format!("chmod 600 {node} {disk}"))?;
    open
}

/// The kernel shows both paths as one device. Whoever comes by the other controller, without the
/// kernel, finds a living owner. Leaves that controller to vfio-pci.
fn a_namespace_of_two_controllers_has_an_owner() -> Result<()> {
    pci::wait_for_driver(DRIVE_S[1], Some("nvme"))?;
    let mut found = None;
    for subsystem in pci::names(Path::new("/sys/class/nvme-subsystem"))? {
        let folder = Path::new("/sys/class/nvme-subsystem").join(subsystem);
        let generic = pci::names(&folder)?.into_iter().find(|name| name.starts_with("ng"));
        found = found.or(generic);
    }
    let device = format!("ng:/dev/{}", found.context("no generic device of a subsystem")?);
    make(&device)?;
    let mut child = start(&device)?;
    fs::write("/sys/bus/pci/drivers/nvme/unbind", DRIVE_S[1])?;
    pci::wait_for_driver(DRIVE_S[1], None)?;
    pci::give_to_vfio(&DRIVE_S[1..])?;
    let format =
        format!("format --model tiny --no-undo --overwrite anything --devices vfio:{}", DRIVE_S[1]);
    let refused = ripieno(&format)?.with_code(REFUSED)?;
    let owner = format!("process {} on", child.id());
    ensure!(refused.err.contains("is alive") && refused.err.contains(&owner), "{refused:?}");
    ensure!(child.try_wait()?.is_none(), "the store ended");
    child.kill()?;
    child.wait()?;
    is_whole(&device)
}

/// Places, serial number and namespace are those of a store that vfio-pci made.
fn the_same_store_is_found_through_vfio() -> Result<()> {
    let device = ng(DRIVE_B, 0)?;
    make(&device)?;
    program::run("nvme-bind", &["bind", DRIVE_B])?.success()?;
    let again = replay(&format!("vfio:{DRIVE_B}"), &format!("{KEEP} --requests 60"));
    program::run("nvme-bind", &["restore"])?.success()?;
    pci::wait_for_disks(DRIVE_B, 2)?;
    let again = again?;
    ensure!(again["store"] == "opened" && again["stored_bytes"] == 0, "{again}");
    let back = replay(&ng(DRIVE_B, 0)?, &format!("{KEEP} --requests 60"))?;
    ensure!(back["store"] == "opened" && back["stored_bytes"] == 0, "{back}");
    let mut byte = [0];
    File::open(disk(DRIVE_B, 0)?)?.read_exact(&mut byte)?;
    Ok(())
}
