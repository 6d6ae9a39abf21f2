use super::*;

#[test]
fn a_batch_is_spread_as_a_store_spreads_it() {
    let args = StoreArgs::from_line("--devices 3 --model llama-3-8b --block-tokens 16").unwrap();
    let slot = args.shape.object_bytes;
    let of = |size, run| -> Vec<(u32, u32)> {
        let found = pieces(&args, size, slot, run);
        found.iter().map(|(device, bytes)| (*device, bytes / slot)).collect()
    };
    assert_eq!(of(1, slot), [(0, 1), (1, 1)], "two segments");
    assert_eq!(of(4, 8 * slot), [(0, 2), (1, 1), (2, 1), (1, 2), (2, 1), (0, 1)]);
    assert_eq!(of(7, 2 * slot)[..4], [(0, 2), (0, 1), (1, 2), (2, 2)]);
}
