use super::*;
use crate::workload::Profile;
use kv_schedule::Config;

fn ahead(window: u32) -> Ahead {
    let lookahead = LookaheadConfig { window, drives_window: 2 * window, batch_blocks: 8 };
    Ahead { lookahead, schedule: Config::default() }
}

/// Few requests that are exchanged often enough to use a third of the link.
const DECODE: Decode<'static> = Decode {
    iteration: Duration::from_micros(1200),
    block_tokens: 16,
    batch: 24,
    oversubscription: 3.0,
    exchanged: 0.2,
    profiles: &[Profile::UNIFORM, Profile::CHATBOT],
    lower: LowerTiers {
        block_bytes: 2 << 20,
        host_blocks: 8192,
        drives: lane(Duration::from_micros(80), 7e9),
        link: lane(Duration::from_micros(5), 50e9),
    },
    on_drives: false,
    hbm: Hbm::Lru,
    ahead: None,
    preempted: 0.0,
    iterations: 200,
};

#[test]
fn what_is_known_four_iterations_ahead_is_there_and_what_is_not_is_waited_for() {
    let run = |window| Decode { ahead: Some(ahead(window)), ..DECODE }.run(42);
    let (late, early, oracle) = (run(0), run(4), DECODE.run(42));
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
    let busy = Decode { exchanged: 2.0, iterations: 60, ..DECODE };
    for window in [1, 4, 16] {
        let found = Decode { ahead: Some(ahead(window)), ..busy }.run(42);
        let reads = found["blocks"] * (2 << 20) as f64 / 50e9 * 1e3;
        assert!(reads > 2.0 && found["iteration"] > reads * 0.98, "{window}: {found:?} {reads}");
        assert!(found["link"] > 90.0 && found["link"] < 102.0, "{window}: {found:?}");
    }
}

#[test]
fn what_is_preempted_is_wasted_and_counted() {
    let run = |preempted| Decode { preempted, ahead: Some(ahead(4)), ..DECODE }.run(42);
    assert_eq!(run(0.0)["wasted"], 0.0);
    let wasted = run(0.5)["wasted"];
    assert!(wasted > 2.0 && wasted < 50.0, "{wasted}");
}

#[test]
fn the_same_seed_gives_the_same_numbers() {
    let digest = |decode: Decode<'_>| {
        // FNV-1a over the complete result.
        format!("{:?}", Decode { iterations: 60, ..decode }.run(42))
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
                (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            })
    };
    let early = Decode { ahead: Some(ahead(4)), preempted: 0.2, ..DECODE };
    let drives = Decode { on_drives: true, iteration: Duration::from_millis(20), ..early };
    let late = Decode { ahead: Some(ahead(0)), hbm: Hbm::Lfu, ..DECODE };
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
