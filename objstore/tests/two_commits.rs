//! Two threads in a commit: the second one comes while the first one's flush is in progress.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, Sender},
    },
    thread,
};

use nvme_driver::{ControllerOptions, Nanos};
use nvme_emu::{EmuConfig, EmuDomain, Media, MediaDone, MediaKind, MediaOp, MemoryMedia};
use objstore::{
    BlockKey, Format, KvShape, Layer, Namespace, Order, Store, StoreConfig, StoreDevice,
    StoreOptions, StoreRequest,
};
use ripieno_testkit::{Drives, KvMemory, blocks, format, host_executor, keys};

const SHAPE: KvShape = KvShape { layers: 2, segments: 1, object_bytes: 4096, block_tokens: 16 };
/// Longer than any pause of a busy machine.
const NEVER: Nanos = Nanos::from_millis(600_000);

/// Flushes that have begun, and who is told of the next one and lets it go on.
#[derive(Debug, Default)]
struct Gate {
    begun: Mutex<u32>,
    next: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Gate {
    fn flushes(&self) -> u32 {
        *self.begun.lock().unwrap()
    }
}

/// A medium whose flushes wait at a gate.
struct Gated {
    media: MemoryMedia,
    gate: Arc<Gate>,
}

impl fmt::Debug for Gated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gated").field(&self.media).finish()
    }
}

impl Media for Gated {
    fn capacity_bytes(&self) -> u64 {
        self.media.capacity_bytes()
    }

    fn granularity_bytes(&self) -> u32 {
        self.media.granularity_bytes()
    }

    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone> {
        if let MediaKind::Flush = op.kind {
            *self.gate.begun.lock().unwrap() += 1;
            let next = self.gate.next.lock().unwrap().take();
            if let Some((begun, may_go)) = next {
                begun.send(()).unwrap();
                // An error: the test has failed.
                let _ = may_go.recv();
            }
        }
        self.media.submit(op, now)
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        self.media.poll(now, done);
    }

    fn next_event(&self) -> Option<Nanos> {
        self.media.next_event()
    }

    fn in_flight(&self) -> usize {
        self.media.in_flight()
    }

    fn cancel(&mut self) {
        self.media.cancel();
    }

    fn power_loss(&mut self) {
        self.media.power_loss();
    }
}

fn written(store: &Store, keys: &[BlockKey], first: u32) -> StoreRequest {
    let save = store.allocate(keys, &blocks(first, keys.len())).unwrap();
    for layer in (0..SHAPE.layers).map(Layer) {
        let ticket = store.start(&save, layer, Order::Unordered).unwrap();
        store.wait(ticket).unwrap();
    }
    save
}

#[test]
fn a_commit_that_comes_during_a_flush_has_one_of_its_own() {
    let gate = Arc::new(Gate::default());
    let media = Gated { media: MemoryMedia::new(16 << 20).unwrap(), gate: gate.clone() };
    let config = EmuConfig::new("drive0").namespace(media, 4096);
    let domain = EmuDomain::new("commits");
    let drives = Drives::threaded(domain.clone(), vec![config]);
    let options = ControllerOptions { command_timeout: NEVER, ..ControllerOptions::default() };
    let devices = drives.attach(&options).into_iter().map(StoreDevice::new).collect();
    let kv = KvMemory::new(&*domain, SHAPE, 16);
    let config = StoreConfig {
        devices,
        clock: drives.clock.clone(),
        executor: host_executor(drives.clock.clone()),
        shape: SHAPE,
        pool: kv.pool.clone(),
        gpu: None,
        options: StoreOptions { command_timeout: NEVER, ..StoreOptions::default() },
        namespace: Namespace::default(),
    };
    let store = Store::create(config, &Format { checksums: false, ..format(SHAPE) }).unwrap();
    let (of_first, of_second) = (keys(0..4), keys(4..8));
    let first = written(&store, &of_first, 0);
    let second = written(&store, &of_second, 4);
    let ((begun, has_begun), (go, may_go)) = (mpsc::channel(), mpsc::channel());
    *gate.next.lock().unwrap() = Some((begun, may_go));
    let before = gate.flushes();
    thread::scope(|scope| {
        let first = scope.spawn(|| store.commit(first));
        has_begun.recv().unwrap();
        let (comes, has_come) = mpsc::channel();
        let (store, gate) = (&store, &gate);
        let second = scope.spawn(move || {
            comes.send(()).unwrap();
            store.commit(second)
        });
        has_come.recv().unwrap();
        // Time to queue. The assertions hold at any moment.
        (0..10_000).for_each(|_| thread::yield_now());
        assert!(!first.is_finished() && !second.is_finished());
        assert_eq!((store.peek(&of_first), store.peek(&of_second)), (0, 0));
        assert_eq!(gate.flushes(), before + 1, "one at a time");
        go.send(()).unwrap();
        assert_eq!(first.join().unwrap().unwrap().written, 4);
        assert_eq!(second.join().unwrap().unwrap().written, 4);
    });
    assert!(gate.flushes() >= before + 2, "the second one relied on a flush before its time");
    assert_eq!((store.peek(&of_first), store.peek(&of_second)), (4, 4));
    store.close().unwrap();
    drop(drives.runner);
}
