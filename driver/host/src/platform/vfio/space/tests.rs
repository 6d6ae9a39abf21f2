#![allow(unsafe_code, reason = "reads and writes the memory that was allocated")]

use super::*;

#[test]
fn memory_is_asked_for_on_the_node() {
    let policy = |memory: &Anonymous| {
        let start = format!("{:x} ", memory.base.as_ptr().addr());
        // The file does not exist on a kernel without NUMA.
        let maps = std::fs::read_to_string("/proc/self/numa_maps").ok()?;
        let line = maps.lines().find_map(|line| line.strip_prefix(&start));
        line.and_then(|line| line.split(' ').next()).map(str::to_owned)
    };
    for len in [4096, LARGE_PAGE] {
        let memory = Anonymous::new(len, HugePages::Never).unwrap();
        let Some(before) = policy(&memory) else { return };
        assert_eq!(before, "default");
        memory.place(None);
        assert_eq!(policy(&memory).unwrap(), "default");
        memory.place(Some(0));
        let after = policy(&memory).unwrap();
        assert!(after.starts_with("prefer") && after.ends_with(":0"), "{after}");
        memory.place(Some(u32::MAX));
    }
}

#[test]
fn memory_is_zeroed_and_aligned() {
    for pages in [HugePages::Never, HugePages::Transparent, HugePages::Reserved] {
        for len in [4096, LARGE_PAGE - 4096, LARGE_PAGE, 2 * LARGE_PAGE + 8192] {
            let memory = Anonymous::new(len, pages).unwrap();
            assert!(memory.len >= len);
            if len >= LARGE_PAGE {
                assert_eq!(memory.base.as_ptr().addr() % LARGE_PAGE, 0);
            }
            for at in [0, 1, len / 2, len - 1] {
                // SAFETY: inside the memory, which has no other users.
                unsafe {
                    assert_eq!(memory.base.add(at).read(), 0);
                    memory.base.add(at).write(0xA5);
                }
            }
        }
    }
    assert!(Anonymous::new(usize::MAX - 4095, HugePages::Transparent).is_err());
}
