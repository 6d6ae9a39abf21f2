//! Checks of the limits on locked and mapped memory.

use super::{Facts, Finding, Verdict};
use crate::report::binary_size;

/// A limit below this is an unchanged default (64 KiB, or 8 MiB since Linux 5.16).
const MEMLOCK_BYTES_MIN: u64 = 1 << 30;

pub(super) fn memlock(facts: &Facts<'_>) -> Finding {
    let finding = Finding::new("memlock", "Locked memory", &["/proc/self/limits"]);
    let limits = facts.root.text("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let soft = line.and_then(|line| line.split_whitespace().next());
    let fix = "VFIO locks all memory that a drive may reach, and counts it: `ulimit -l \
                unlimited`; for good in /etc/security/limits.d (`@kvcache - memlock \
                unlimited`), for a service with LimitMEMLOCK=infinity, for a container with \
                --ulimit memlock=-1";
    match soft {
        None => finding.says(Verdict::Skip, "no limit is shown"),
        Some("unlimited") => finding.says(Verdict::Ok, "unlimited for this shell"),
        Some(text) => {
            let bytes: u64 = text.parse().unwrap_or(0);
            let found = format!("{} for this shell", binary_size(bytes));
            let enough = bytes >= MEMLOCK_BYTES_MIN;
            finding.says(if enough { Verdict::Ok } else { Verdict::Warn }, found).fix(fix)
        }
    }
}

pub(super) fn hugepages(facts: &Facts<'_>) -> Finding {
    let looked_at = ["/sys/kernel/mm/hugepages", "/sys/kernel/mm/transparent_hugepage/enabled"];
    let finding = Finding::new("hugepages", "Huge pages", &looked_at);
    let root = facts.root;
    let folder = "/sys/kernel/mm/hugepages";
    let mut reserved = 0;
    let mut parts = Vec::new();
    for name in root.names(folder) {
        let kib = name.strip_prefix("hugepages-").and_then(|name| name.strip_suffix("kB"));
        let Some(kib) = kib.and_then(|kib| kib.parse::<u64>().ok()) else { continue };
        let count =
            |file: &str| -> u64 { root.number(format!("{folder}/{name}/{file}")).unwrap_or(0) };
        let (all, free) = (count("nr_hugepages"), count("free_hugepages"));
        reserved += all;
        parts.push(format!("{}: {free} of {all} free", binary_size(kib.saturating_mul(1024))));
    }
    let transparent = root.text("/sys/kernel/mm/transparent_hugepage/enabled");
    let transparent = transparent.as_deref().and_then(|text| {
        text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
    });
    parts.push(format!("transparent: {}", transparent.unwrap_or("not there")));
    let found = parts.join("; ");
    if reserved > 0 || matches!(transparent, Some("always" | "madvise")) {
        return finding.says(Verdict::Ok, found);
    }
    let fix = "they make mapping host memory faster, no more: sysctl vm.nr_hugepages=512, or \
                transparent_hugepage=madvise on the kernel command line";
    finding.says(Verdict::Warn, found).fix(fix)
}
