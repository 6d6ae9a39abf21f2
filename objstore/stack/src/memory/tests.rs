use super::*;

const GIB: u64 = 1 << 30;

/// A machine of 24 GiB, 20 of them available, with these files.
fn memory(files: &[(&str, String)]) -> HostMemory {
    let root = tempfile::tempdir().unwrap();
    let meminfo =
        format!("MemTotal: {} kB\nMemFree: 1 kB\nMemAvailable:  {} kB\n", 24 << 20, 20 << 20);
    for (name, text) in files.iter().chain(&[("proc/meminfo", meminfo)]) {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    HostMemory::below(root.path()).unwrap()
}

fn gib(count: u64) -> String {
    format!("{}\n", count * GIB)
}

fn stat(total: &str, inactive: u64, active: u64) -> String {
    format!(
        "anon 1\nfile 2\n{total}inactive_file {}\n{total}active_file {}\n",
        inactive * GIB,
        active * GIB
    )
}

#[test]
fn file_pages_of_a_group_are_available() {
    let full = [
        ("sys/fs/cgroup/memory.max", gib(8)),
        ("sys/fs/cgroup/memory.current", gib(8)),
        ("sys/fs/cgroup/memory.stat", stat("", 5, 2)),
    ];
    assert_eq!(memory(&full), HostMemory { all: 8 * GIB, available: 7 * GIB });
    assert_eq!(memory(&full[..2]), HostMemory { all: 8 * GIB, available: 0 });
    let machine = HostMemory { all: 24 * GIB, available: 20 * GIB };
    assert_eq!(memory(&[]), machine);
    assert_eq!(memory(&[("sys/fs/cgroup/memory.max", "max\n".to_owned())]), machine);
}

#[test]
fn the_groups_above_limit_it_too() {
    let nested = [
        ("proc/self/cgroup", "0::/a/b/c\n".to_owned()),
        ("sys/fs/cgroup/a/memory.max", gib(6)),
        ("sys/fs/cgroup/a/memory.current", gib(5)),
        ("sys/fs/cgroup/a/memory.stat", stat("", 1, 1)),
        ("sys/fs/cgroup/a/b/memory.max", gib(4)),
        ("sys/fs/cgroup/a/b/memory.current", gib(1)),
        ("sys/fs/cgroup/a/b/c/memory.max", "max".to_owned()),
    ];
    // Of the upper one 3 GiB are left, of the lower one 3, and 4 are its limit.
    assert_eq!(memory(&nested), HostMemory { all: 4 * GIB, available: 3 * GIB });
    assert_eq!(memory(&nested[..4]), HostMemory { all: 6 * GIB, available: 3 * GIB });
}

#[test]
fn groups_of_version_1_count_what_is_below_them() {
    let groups = "5:cpu,cpuacct:/x\n4:memory:/box/in\n0::/elsewhere\n".to_owned();
    let one = [
        ("proc/self/cgroup", groups),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n".to_owned()),
        ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", gib(2)),
        ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", gib(2)),
        ("sys/fs/cgroup/memory/box/memory.stat", stat("total_", 1, 0)),
    ];
    assert_eq!(memory(&one), HostMemory { all: 2 * GIB, available: GIB });
    // As in a container: the path is the host's, and the root is the container's own group.
    let of_host = [
        ("proc/self/cgroup", "0::/../../docker/1\n".to_owned()),
        ("sys/fs/cgroup/memory.max", gib(3)),
    ];
    assert_eq!(memory(&of_host), HostMemory { all: 3 * GIB, available: 3 * GIB });
}

#[test]
fn a_cache_that_has_no_room_is_refused_and_the_numbers_are_named() {
    let machine = HostMemory { all: 24 * GIB, available: 20 * GIB };
    machine.has_room(20 * GIB, 1).unwrap();
    machine.has_room(12 * GIB, 2).unwrap();
    let refused = machine.has_room(21 * GIB, 1).unwrap_err().to_string();
    assert_eq!(
        refused,
        "dram: 21 GiB were asked for; 24 GiB of memory are there, of which 20 GiB are \
         available; give less"
    );
    let refused = machine.has_room(13 * GIB, 2).unwrap_err().to_string();
    assert!(refused.contains("13 GiB for each of 2 workers were"), "{refused}");
    assert!(machine.has_room(u64::MAX, u32::MAX).is_err());
}

#[test]
fn this_machine_has_memory() {
    let memory = HostMemory::of_machine().unwrap();
    assert!(memory.available > 1 << 20 && memory.all >= memory.available, "{memory:?}");
    HostMemory::check_dram(0, 8).unwrap();
    HostMemory::check_dram(1 << 20, 2).unwrap();
    assert!(HostMemory::check_dram(1 << 60, 1).is_err());
}
