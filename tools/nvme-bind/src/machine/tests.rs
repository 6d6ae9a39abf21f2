use super::*;

#[test]
fn files_are_replaced_as_a_whole_and_removed_with_what_a_crash_left() {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::new(folder.path()).unwrap();
    let live = Live::new(root.clone());
    let path = "/etc/a/b.conf";
    for text in ["first", "second"] {
        live.put(path, text, 0o640).unwrap();
        assert_eq!(root.text(path).as_deref(), Some(text));
    }
    assert_eq!(root.owner(path).unwrap().2, 0o640);
    live.link("/etc/a/link", "b.conf").unwrap();
    live.link("/etc/a/link", "c.conf").unwrap();
    assert_eq!(root.link("/etc/a/link").as_deref(), Some("c.conf"));
    fs::write(root.at("/etc/a/.b.conf.new"), "half").unwrap();
    for path in [path, "/etc/a/link", "/etc/a/link", "/etc/none/x"] {
        live.remove(path).unwrap();
    }
    assert!(root.names("/etc/a").is_empty());
}

#[test]
fn a_planted_link_is_not_written_through() {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::new(folder.path()).unwrap();
    let live = Live::new(root.clone());
    fs::write(root.at("/victim"), "precious").unwrap();
    for planted in ["/.unit.new", "/unit"] {
        symlink("victim", root.at(planted)).unwrap();
    }
    live.put("/unit", "fresh", 0o644).unwrap();
    assert_eq!(root.text("/victim").as_deref(), Some("precious"));
    assert_eq!((root.link("/unit"), root.text("/unit").as_deref()), (None, Some("fresh")));
}

#[test]
fn sysfs_files_are_written_and_never_made() {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::new(folder.path()).unwrap();
    let live = Live::new(root.clone());
    assert!(live.write("/unbind", "x").is_err());
    assert!(!root.exists("/unbind"));
    fs::write(root.at("/unbind"), "").unwrap();
    live.write("/unbind", "0000:65:00.0").unwrap();
    assert_eq!(fs::read_to_string(root.at("/unbind")).unwrap(), "0000:65:00.0\n");
    assert!(live.load("vfio-pci").is_err(), "not into this machine");
}
