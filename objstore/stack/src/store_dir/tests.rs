use std::os::unix::fs::symlink;

use super::*;

const MIB: u64 = 1 << 20;

fn options(count: u32, bytes: u64) -> StoreDirOptions {
    let media = StoreDirMedia::Files { count, bytes };
    StoreDirOptions { id: 0x1234_5678_9abc_def0, media, lba_bytes: 4096 }
}

fn made(dir: &Path, count: u32, bytes: u64) -> StoreDir {
    let mut store_dir = StoreDir::create(dir, &options(count, bytes)).unwrap();
    store_dir.set_ready().unwrap();
    store_dir
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

fn said(result: Result<StoreDir, StoreDirError>, wanted: &str) {
    let error = result.expect_err(wanted).to_string();
    assert!(error.contains(wanted), "`{wanted}` is not in `{error}`");
}

#[test]
fn a_home_is_found_again_with_its_parameters() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("store");
    let store_dir = made(&dir, 2, 5 * MIB + 1);
    let devices: Vec<StoreDirDevice> = store_dir.devices().collect();
    drop(store_dir);
    let again = StoreDir::open(&dir).unwrap();
    assert_eq!(again.devices().collect::<Vec<_>>(), devices);
    assert_eq!((again.lba_bytes(), again.dir()), (4096, &*dir));
    assert_eq!(devices[1].serial, "123456789abcdef0-1");
    assert_eq!(devices[1].path, dir.join("device-1.img"));
    for device in &devices {
        assert_eq!(device.bytes, 2 * MIB, "no more than was asked for, in whole MiB");
        let found = device.path.metadata().unwrap();
        assert_eq!(found.len(), device.bytes);
        assert!(found.blocks() * 512 >= device.bytes, "it has holes");
    }
    let (controllers, _) = again.controllers().unwrap();
    let serials: Vec<&str> = controllers.iter().map(|config| &*config.serial).collect();
    assert_eq!(serials, ["123456789abcdef0-0", "123456789abcdef0-1"]);
    assert!(controllers.iter().all(|config| config.validate().is_ok()));
    drop(controllers);
}

#[test]
fn a_home_is_its_owners_whatever_the_umask() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("store");
    drop(made(&dir, 1, 2 * MIB));
    private().recursive(true).create(place.path().join("a/b")).unwrap();
    for made in [dir.clone(), place.path().join("a"), place.path().join("a/b")] {
        assert_eq!(mode_for_others(&made), None, "{made:?}");
    }
    for name in names(&dir) {
        let mode = dir.join(&name).metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{name}");
    }
    // One that was made by hand is told of, and opened.
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(mode_for_others(&dir), Some(0o755));
    drop(StoreDir::open(&dir).unwrap());
}

#[test]
fn sizes_that_no_file_has_are_refused() {
    let place = tempfile::tempdir().unwrap();
    drop(made(place.path(), 2, 2 * MIB));
    let file = place.path().join("home.json");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace(&MIB.to_string(), &u64::MAX.to_string())).unwrap();
    said(
        StoreDir::open_or_create(place.path(), &options(2, 2 * MIB)),
        "capacity or devices changed",
    );
}

#[test]
fn files_without_their_manifest_are_named() {
    let place = tempfile::tempdir().unwrap();
    drop(made(place.path(), 2, 2 * MIB));
    fs::remove_file(place.path().join("home.json")).unwrap();
    said(StoreDir::open(place.path()), ".img is, and no home.json");
}

#[test]
fn files_that_a_killed_process_still_writes_are_waited_for() {
    let place = tempfile::tempdir().unwrap();
    let store_dir = made(place.path(), 1, MIB);
    // The kernel holds the file, and so its lock, while it works on it.
    let busy = store_dir.controllers().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store_dir.controllers().map(drop));
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert!(!waiting.is_finished());
        drop(busy);
        waiting.join().unwrap().unwrap();
    });
    let _busy = store_dir.controllers().unwrap();
    let twice = store_dir.controllers().unwrap_err().to_string();
    assert!(twice.contains("another controller"), "{twice}");
}

#[test]
fn a_home_belongs_to_one_process() {
    let place = tempfile::tempdir().unwrap();
    let store_dir = made(place.path(), 1, MIB);
    let holder = format!("in use by process {}", std::process::id());
    said(StoreDir::open(place.path()), &holder);
    said(StoreDir::create(place.path(), &options(1, MIB)), &holder);
    drop(store_dir);
    StoreDir::open(place.path()).unwrap();
}

/// Another user may have put it there, to have a file written that only this one can write.
#[test]
fn a_lock_that_is_a_link_is_not_followed() {
    let place = tempfile::tempdir().unwrap();
    drop(made(&place.path().join("store"), 1, MIB));
    let (lock, target) = (place.path().join("store/lock"), place.path().join("target"));
    fs::write(&target, "mine").unwrap();
    fs::remove_file(&lock).unwrap();
    symlink(&target, &lock).unwrap();
    said(StoreDir::open(&place.path().join("store")), "opening the lock");
    assert_eq!(fs::read(&target).unwrap(), b"mine");
}

#[test]
fn a_home_keeps_its_files() {
    let place = tempfile::tempdir().unwrap();
    made(place.path(), 2, 4 * MIB);
    drop(StoreDir::open_or_create(place.path(), &options(2, 4 * MIB + 1)).unwrap());
    let asked = |count, bytes| StoreDir::open_or_create(place.path(), &options(count, bytes));
    said(asked(2, 6 * MIB), "has 4 MiB in 2 files a rank, and 6 MiB in 2 were asked for");
    said(asked(2, 2 * MIB), "ask for a capacity of 4MiB");
    said(asked(1, 4 * MIB), "and 4 MiB in 1 were asked for");
}

#[test]
fn a_home_that_was_not_completed_is_refused_and_made_anew() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("store");
    // Like the remains of a killed process.
    fs::create_dir(&dir).unwrap();
    let making = new_devices(&options(3, 3 * MIB)).unwrap();
    let manifest = Manifest {
        ripieno_home: manifest::VERSION,
        state: State::Making,
        id: "0".to_owned(),
        lba_bytes: 4096,
        devices: making,
        speed: None,
    };
    write_json(&dir, manifest::NAME, &manifest).unwrap();
    manifest.devices[..2].iter().for_each(|device| make(&dir, device).unwrap());
    assert!(!StoreDir::exists(&dir));
    said(StoreDir::open(&dir), "create it again");
    made(&dir, 1, MIB);
    assert_eq!(names(&dir), ["device-0.img", "home.json", "lock"]);
    assert!(StoreDir::exists(&dir));
    said(StoreDir::create(&dir, &options(1, MIB)), "is here already");
    StoreDir::open(&dir).unwrap();
}

#[test]
fn a_home_that_was_not_completed_goes_with_whoever_made_it() {
    let place = tempfile::tempdir().unwrap();
    let (new, old) = (place.path().join("new"), place.path().join("old"));
    fs::create_dir(&old).unwrap();
    for dir in [&new, &old] {
        let store_dir = StoreDir::create(dir, &options(2, 2 * MIB)).unwrap();
        // Its devices are unused, or a user of them ends later.
        let _controllers = store_dir.controllers().unwrap();
        drop(store_dir);
    }
    assert!(!new.exists(), "it was made for this store");
    assert_eq!(names(&old), ["lock"]);
    made(&new, 1, MIB);
    drop(StoreDir::open(&new).unwrap());
    assert!(StoreDir::exists(&new), "a store directory that is ready stays");
}

#[test]
fn nothing_is_put_beside_the_files_of_somebody_else() {
    let place = tempfile::tempdir().unwrap();
    for name in ["precious", "device-0.img"] {
        fs::write(place.path().join(name), "x").unwrap();
        said(StoreDir::create(place.path(), &options(1, MIB)), name);
        assert_eq!(names(place.path()), [name]);
        said(StoreDir::open(place.path()), "no store here");
        assert_eq!(names(place.path()), [name]);
        fs::remove_file(place.path().join(name)).unwrap();
    }
    said(StoreDir::open(&place.path().join("nowhere")), "no store here");
}

#[test]
fn a_full_disk_is_found_before_anything_is_written_to_it() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("store");
    said(StoreDir::create(&dir, &options(2, 1 << 55)), "are free on this file system");
    assert!(!dir.exists());
    fs::create_dir(&dir).unwrap();
    said(StoreDir::create(&dir, &options(2, 1 << 55)), "are free on this file system");
    assert_eq!(names(&dir), ["lock"]);
    made(&dir, 2, 2 * MIB);
}

#[test]
fn devices_that_are_not_what_they_were_are_named() {
    let place = tempfile::tempdir().unwrap();
    made(place.path(), 2, 4 * MIB);
    let file = place.path().join("device-1.img");
    File::options().write(true).open(&file).unwrap().set_len(MIB).unwrap();
    said(
        StoreDir::open(place.path()),
        "device-1.img: device 1 of the store has 1048576 bytes and had",
    );
    fs::remove_file(&file).unwrap();
    said(StoreDir::open(place.path()), "device-1.img: device 1 of the store is gone");
    fs::create_dir(&file).unwrap();
    said(StoreDir::open(place.path()), "device-1.img: device 1 of the store cannot be opened");
    fs::remove_dir(&file).unwrap();
    // Like a copy by `cp --sparse=always`.
    File::create(&file).unwrap().set_len(2 * MIB).unwrap();
    StoreDir::open(place.path()).unwrap();
    assert!(file.metadata().unwrap().blocks() * 512 >= 2 * MIB, "it has holes still");
}

#[test]
fn parameters_are_not_believed() {
    let place = tempfile::tempdir().unwrap();
    made(place.path(), 1, MIB);
    let (path, outside) = (place.path().join(manifest::NAME), place.path().join("outside"));
    fs::write(&outside, "x").unwrap();
    let good = fs::read_to_string(&path).unwrap();
    let ready = good.replace("\"ready\"", "\"making\"");
    for (text, wanted) in [
        (String::new(), "does not describe a store directory"),
        ("[]".to_owned(), "it has no version"),
        (good.replace("_home\": 1", "_home\": 2"), "version 2, and this program knows 1"),
        (good.replace("4096", "\"many\""), "invalid type"),
        (ready.replace("device-0.img", "../outside"), "is not the name of a device's file"),
        (ready.replace("device-0.img", "device-../outside.img"), "is not the name"),
    ] {
        fs::write(&path, text).unwrap();
        said(StoreDir::open(place.path()), wanted);
        fs::remove_file(&outside).unwrap();
        said(StoreDir::create(place.path(), &options(1, MIB)), wanted);
        fs::write(&outside, "x").unwrap();
    }
}

#[test]
fn what_cannot_be_a_home_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("store");
    let lbas = StoreDirOptions { lba_bytes: 520, ..options(1, MIB) };
    let devices = |paths: &[&str]| {
        let media = StoreDirMedia::BlockDevices(paths.iter().map(PathBuf::from).collect());
        StoreDirOptions { media, ..options(1, MIB) }
    };
    for (options, wanted) in [
        (lbas, "512 or 4096 bytes, and not of 520"),
        (options(0, MIB), "1 to 64 devices, and not 0"),
        (options(65, 99 * MIB), "1 to 64 devices, and not 65"),
        (options(2, 2 * MIB - 1), "at least a MiB a device"),
        (devices(&["/dev/null"]), "/dev/null: it is not a block device"),
        (devices(&["/dev/no-such-disk"]), "No such file"),
        (devices(&["dev/sda"]), "from / on: dev/sda"),
        (devices(&[]), "and not 0"),
    ] {
        said(StoreDir::create(&dir, &options), wanted);
        assert!(!dir.exists());
    }
    said(StoreDir::create(&dir.join("deep"), &options(1, MIB)), "whose parent exists");
}

/// Root may write everywhere, so this runs as another user.
#[test]
fn a_directory_that_cannot_be_written_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let empty = place.path().join("empty");
    fs::create_dir(&empty).unwrap();
    for path in [place.path(), &empty] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o555)).unwrap();
    }
    let new = place.path().join("new");
    let refused = std::thread::spawn(move || {
        if rustix::process::geteuid().is_root() {
            // Affects this thread only.
            let nobody = rustix::process::Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        }
        for dir in [new, empty] {
            let error = StoreDir::create(&dir, &options(1, MIB)).unwrap_err().to_string();
            assert!(error.contains("Permission denied"), "{error}");
            assert!(error.contains("that you may write to"), "{error}");
            said(StoreDir::open(&dir), "no store here");
        }
    });
    refused.join().unwrap();
}
