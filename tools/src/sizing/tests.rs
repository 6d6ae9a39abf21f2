use super::*;
use crate::synthetic;

fn args(line: &str) -> StoreArgs {
    StoreArgs::from_line(line).unwrap()
}

fn plan(args: &StoreArgs, requests: usize) -> Plan {
    Plan::new(synthetic::requests(1, requests), &args.shape, None)
}

#[test]
fn the_default_is_what_the_workload_needs() {
    let args = args("--model tiny");
    let plan = plan(&args, 1000);
    let sizing = Sizing::new(&args, &plan, 512).unwrap();
    assert_eq!(u64::from(sizing.files), plan.distinct);
    assert_eq!(sizing.capacity_bytes(), sizing.needed_bytes);
    assert_eq!((sizing.file_bytes, sizing.group), (4096, 128));
    assert!(2 * sizing.device_bytes >= sizing.needed_bytes);
    // Superblocks, journal and the last group.
    let more = 2 * (8 << 20) + 2 * 128 * 4096;
    assert!(2 * sizing.device_bytes < sizing.needed_bytes + more);
    assert_eq!(sizing.pool_blocks, 16384);
    sizing.check_machine(&args, false).unwrap();
}

#[test]
fn objects_are_padded_on_the_device() {
    let args = args("--model tiny --lba 4096 --capacity 1MiB --devices 3");
    let sizing = Sizing::new(&args, &plan(&args, 10), 4096).unwrap();
    assert_eq!((sizing.file_bytes, sizing.files), (4 * 4096, 64));
    assert_eq!(sizing.group % 3, 0);
    assert!(sizing.device_bytes * 3 >= sizing.capacity_bytes());
}

#[test]
fn too_little_and_too_much_are_refused() {
    let little = args("--model llama-3-8b --capacity 8191KiB");
    let problem = Sizing::new(&little, &plan(&little, 1), 4096).unwrap_err();
    assert!(problem.to_string().contains("needs 8388608 bytes (8 MiB)"), "{problem}");
    let much = args("--model qwen3-32b");
    let plan = plan(&much, 40_000);
    let sizing = Sizing::new(&much, &plan, 4096).unwrap();
    assert!(sizing.needed_bytes > 10 << 40, "some machine has room for {}", sizing.needed_bytes);
    let problem = sizing.check_machine(&much, false).unwrap_err();
    for part in ["in the store", "in the KV pool", "for tables of "] {
        assert!(problem.to_string().contains(part), "{problem}");
    }
    assert!(problem.to_string().contains("of memory"), "{problem}");
    assert!(problem.hint().contains("--capacity"));
    let trace = args("--model qwen3-32b --trace x");
    let fitting = Sizing::fitting(&trace, &plan, 4096).unwrap();
    assert!(fitting.files > 0 && fitting.capacity_bytes() < fitting.needed_bytes);
    fitting.check_machine(&much, false).unwrap();
    let disk = args("--model qwen3-32b --path /tmp");
    let problem = sizing.check_machine(&disk, false).unwrap_err();
    assert!(problem.to_string().contains("are free there"), "{problem}");
}
