//! Device events while the plane is idle.

use std::path::Path;

use nvme_driver::{Clock, MonotonicClock};
use nvme_emu::{Emu, FaultAction, FaultPlan, FaultRule, FaultWhen};
use nvme_spec::reg::{self, Cc};
use objstore::{
    BlockId, Codec, Direction, FileId, JobId, KvShape, Layer, Move, Order, StoreError, StoreId,
    Ticket,
};
use ripieno_testkit::until;

use super::*;
use crate::{
    Builder, Executor, PoolMemory, RankMedia, Ranks, RanksOptions, StackConfig,
    metrics::MetricsPage,
};

const SHAPE: KvShape = KvShape { layers: 2, segments: 1, object_bytes: 4096, block_tokens: 16 };

fn temporary() -> tempfile::TempDir {
    // Not the temporary directory: that may be a tmpfs without direct I/O.
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn open(dir: &Path) -> (RankStack, Arc<Emu>) {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let media = RankMedia::Files { bytes: 32 << 20, count: 1, lba_bytes: 4096 };
    let options =
        RanksOptions { id: StoreId([7; 16]), ranks: 1, shape: SHAPE, codec: Codec::None, media };
    let ranks = Ranks::prepare(dir, &options, &clock).unwrap();
    // The software controllers count what passes through them.
    let config = StackConfig { executor: Some(Executor::Host), ..StackConfig::default() };
    let builder = Builder::new(config, SHAPE)
        .on(ranks.devices(0).unwrap())
        .pool(PoolMemory::Own { blocks: 4 });
    let stack = builder.open_rank(ranks.rank(0)).unwrap();
    let below = stack.shared.below.lock().unwrap();
    let mut emus = below.as_ref().unwrap().devices.emus().to_vec();
    drop(below);
    (stack, emus.remove(0))
}

fn begin(stack: &RankStack, file: u32) -> Result<JobId, StoreError> {
    let moves = [Move { file: FileId(file), block: BlockId(1), position: 0 }];
    stack.plane().begin(Direction::Write, &moves, &[])
}

/// Returns the error of calls once the thread has noticed the event.
fn refusal(stack: &RankStack) -> String {
    let mut found = None;
    until("somebody looks after the devices", || {
        // Returns the plane's error, without checking devices itself.
        found = stack.plane().take_lost().and_then(|_| stack.plane().stats()).err();
        found.is_some()
    });
    let error = found.expect("it failed");
    assert!(matches!(error, StoreError::Failed { .. }), "{error}");
    error.to_string()
}

#[test]
fn a_drive_whose_owner_wants_it_back_is_drained_and_given_back() {
    let place = temporary();
    let (stack, emu) = open(&place.path().join("store"));
    let job = begin(&stack, 0).unwrap();
    let writes = emu.counters().writes;
    stack.plane().start(Ticket { job, layer: Layer(0) }, Order::Unordered).unwrap();
    emu.request();
    assert!(refusal(&stack).contains("wants it back"));
    assert!(emu.counters().writes > writes, "what was in flight was completed");
    // Returns when the thread has given the devices back.
    stack.close().unwrap();
    assert_eq!(Cc(emu.read32(reg::CC)).en(), 0, "the controller was shut down");
    assert!(
        begin(&stack, 1).is_err() && stack.plane().wait(Ticket { job, layer: Layer(0) }).is_err()
    );
    assert_eq!(Arc::strong_count(&emu), 1, "nothing has the device any more");
}

#[test]
fn a_drive_that_is_removed_ends_the_kernel_though_nobody_asks() {
    let place = temporary();
    let (stack, emu) = open(&place.path().join("store"));
    emu.unplug();
    assert!(refusal(&stack).contains("no longer answers"));
}

#[test]
fn an_engine_can_ask_what_happened() {
    let place = temporary();
    let (stack, emu) = open(&place.path().join("store"));
    assert_eq!(stack.plane().poll_events().unwrap(), []);
    emu.report_pcie_error();
    until("it recovers", || stack.plane().stats().unwrap().recoveries > 0);
    let events = stack.plane().poll_events().unwrap();
    assert_eq!(events.iter().map(|event| event.event.name()).collect::<Vec<_>>(), ["pcie-error"]);
    let job = begin(&stack, 0).unwrap();
    for layer in (0..SHAPE.layers).map(Layer) {
        stack.plane().start(Ticket { job, layer }, Order::Unordered).unwrap();
    }
    assert!(stack.plane().end(&[job]).unwrap()[0].failure.is_none(), "it works again");
    stack.close().unwrap();
}

#[test]
fn a_rank_that_takes_no_writes_any_more_is_not_healthy() {
    let place = temporary();
    let (stack, emu) = open(&place.path().join("store"));
    let mut page = MetricsPage::of(stack.plane().clone(), None);
    let mut is_healthy = || page.text("*/*").1.contains("\nripieno_healthy 1\n");
    let store = |file| {
        let job = begin(&stack, file)?;
        for layer in (0..SHAPE.layers).map(Layer) {
            stack.plane().start(Ticket { job, layer }, Order::Unordered)?;
        }
        let done = stack.plane().end(&[job])?.remove(0);
        done.failure.map_or(Ok(()), Err)
    };
    store(0).unwrap();
    assert!(is_healthy());
    // A flush.
    let when = FaultWhen { opcode: Some(0), admin: Some(false), ..FaultWhen::default() };
    let rule = FaultRule::new(when, FaultAction::Status { code: 0x280, dnr: true });
    emu.set_faults(FaultPlan { rules: vec![rule.limit(1)], ..FaultPlan::default() });
    let error = store(1).unwrap_err();
    assert!(matches!(error, StoreError::JournalFailed { .. }), "{error}");
    assert!(!is_healthy());
    let flushes = emu.counters().flushes;
    store(2).unwrap_err();
    assert_eq!(emu.counters().flushes, flushes, "the drive was asked again");
    stack.close().unwrap();
}
