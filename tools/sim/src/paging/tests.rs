use super::{
    decode::{Hbm, lengths},
    *,
};
use crate::workload::Profile;

const UNIFORM: Profile =
    Profile { input: lengths(512, 512, 512.0, 0.0), output: lengths(256, 256, 256.0, 0.0) };
const CHATBOT: Profile =
    Profile { input: lengths(16, 2_048, 256.0, 0.8), output: lengths(8, 1_024, 128.0, 0.8) };

/// Few requests that are exchanged often enough to use a third of the link, and blocks that are
/// there at once.
const DECODE: Decode = Decode {
    iteration_us: 1200.0,
    block_tokens: 16,
    batch: 24.0,
    oversubscription: 3.0,
    exchanged: 0.2,
    requests: &[UNIFORM, CHATBOT],
    lower: LowerTiers {
        block_bytes: 2 << 20,
        host_blocks: 8192.0,
        drives: Channel { bandwidth: 7e9, latency_us: 80.0, set_up_us: 0.0 },
        link: Channel { bandwidth: 50e9, latency_us: 5.0, set_up_us: 0.0 },
    },
    on_drives: false,
    hbm: Hbm::Lru,
    window: 0,
    batch_blocks: 0,
    high_water: None,
    preempted: 0.0,
    iterations: 200,
};

fn ahead(window: u32) -> Decode {
    Decode { window, batch_blocks: 8, ..DECODE }
}

#[test]
fn what_is_known_four_iterations_ahead_is_there_and_what_is_not_is_waited_for() {
    let run = |window| ahead(window).seeded(42);
    let (late, early, oracle) = (run(0), run(4), DECODE.seeded(42));
    assert_eq!((late["hits"], early["hits"]), (0.0, 100.0));
    assert!(late["iteration"] > oracle["iteration"] * 1.2, "{late:?}");
    assert!((early["iteration"] / oracle["iteration"] - 1.0).abs() < 0.01, "{early:?}");
    // The wait equals the link's time for the blocks.
    let reads = late["blocks"] * (2 << 20) as f64 / 50e9 * 1e3;
    let waits = late["iteration"] - oracle["iteration"];
    assert!((waits / reads - 1.0).abs() < 0.1, "{waits} {reads}");
}

#[test]
fn no_lookahead_makes_an_iteration_shorter_than_its_reads() {
    for window in [1, 4, 16] {
        let busy = Decode { exchanged: 2.0, iterations: 60, ..ahead(window) };
        let found = busy.seeded(42);
        let reads = found["blocks"] * (2 << 20) as f64 / 50e9 * 1e3;
        assert!(reads > 2.0 && found["iteration"] > reads * 0.98, "{window}: {found:?} {reads}");
        assert!(found["link"] > 90.0 && found["link"] < 102.0, "{window}: {found:?}");
    }
}

#[test]
fn what_is_preempted_is_wasted_and_counted() {
    let run = |preempted| Decode { preempted, ..ahead(4) }.seeded(42);
    assert_eq!(run(0.0)["wasted"], 0.0);
    let wasted = run(0.5)["wasted"];
    assert!(wasted > 2.0 && wasted < 50.0, "{wasted}");
}

#[test]
fn the_same_seed_gives_the_same_numbers() {
    let digest = |decode: Decode| {
        // FNV-1a over the complete result.
        format!("{:?}", Decode { iterations: 60, ..decode }.seeded(42))
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
                (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            })
    };
    let early = Decode { preempted: 0.2, ..ahead(4) };
    let drives = Decode { on_drives: true, iteration_us: 20_000.0, ..early };
    let late = Decode { hbm: Hbm::Lfu, ..ahead(0) };
    let busy = Decode { exchanged: 2.0, hbm: Hbm::Latest, ..early };
    // Update only after a change of the model or the scheduler.
    assert_eq!(
        [DECODE, early, drives, late, busy].map(digest),
        [
            0x476a_e5a6_17cd_918f,
            0x0e2b_6d54_3502_ff56,
            0x4caf_e849_375d_fa6d,
            0x8c3f_5a20_520f_8d39,
            0x2e70_fe02_924f_be54,
        ]
    );
}
