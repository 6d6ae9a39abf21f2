//! Several threads in a commit: the others come while the first one's flush is in progress.

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
    StoreError, StoreOptions, StoreRequest, Ticket,
};
use ripieno_testkit::{Drives, KvMemory, blocks, format, host_executor, keys, until};

const SHAPE: KvShape = KvShape { layers: 2, segments: 1, object_bytes: 4096, block_tokens: 16 };
/// Longer than any pause of a busy machine.
const NEVER: Nanos = Nanos::from_millis(600_000);

/// Flushes that have begun, and who is told of the next one and lets it go on.
#[derive(Debug, Default)]
struct Gate {
    begun: Mutex<u32>,
    /// Writes with force unit access: groups of the journal.
    forced: Mutex<u32>,
    next: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Gate {
    fn flushes(&self) -> u32 {
        *self.begun.lock().unwrap()
    }

    fn groups(&self) -> u32 {
        *self.forced.lock().unwrap()
    }

    /// Stops the next flush. Returns who is told of it, and who lets it go on.
    fn shut(&self) -> (Receiver<()>, Sender<()>) {
        let ((begun, has_begun), (go, may_go)) = (mpsc::channel(), mpsc::channel());
        *self.next.lock().unwrap() = Some((begun, may_go));
        (has_begun, go)
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
        if let MediaKind::Write { fua: true } = op.kind {
            *self.gate.forced.lock().unwrap() += 1;
        }
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

/// A store on a medium with this gate, which is dropped before its drives.
fn gated(gate: &Arc<Gate>) -> (Drives, KvMemory, Store) {
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
    (drives, kv, store)
}

#[test]
fn a_commit_that_comes_during_a_flush_has_one_of_its_own() {
    let gate = Arc::new(Gate::default());
    let (drives, _kv, store) = gated(&gate);
    let (of_first, of_second) = (keys(0..4), keys(4..8));
    let first = written(&store, &of_first, 0);
    let second = written(&store, &of_second, 4);
    let (has_begun, go) = gate.shut();
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

/// If the first that leaves a flush wrote its record at once, the others that had waited for the
/// same flush would have to wait for that, too, for a second time.
#[test]
fn commits_that_wait_together_share_flush_and_group() {
    const OTHERS: u32 = 12;
    let gate = Arc::new(Gate::default());
    let (drives, _kv, store) = gated(&gate);
    let of = |at: u32| keys(at..at + 1);
    let first = written(&store, &of(OTHERS), OTHERS);
    let others: Vec<_> = (0..OTHERS).map(|at| written(&store, &of(at), at)).collect();
    let (has_begun, go) = gate.shut();
    let before = (gate.flushes(), gate.groups());
    thread::scope(|scope| {
        let first = scope.spawn(|| store.commit(first));
        has_begun.recv().unwrap();
        let tickets: Vec<_> = others.iter().map(|save| save.ticket(Layer(0))).collect();
        let commits = others.into_iter().map(|save| scope.spawn(|| store.commit(save)));
        let commits: Vec<_> = commits.collect();
        // A job that has ended is in the queue, or nearly so.
        let is_over =
            |ticket: &Ticket| matches!(store.wait(*ticket), Err(StoreError::Ended { .. }));
        until("all of them wait", || tickets.iter().all(is_over));
        (0..10_000).for_each(|_| thread::yield_now());
        go.send(()).unwrap();
        for commit in commits.into_iter().chain([first]) {
            assert_eq!(commit.join().unwrap().unwrap().written, 1);
        }
    });
    let (flushes, groups) = (gate.flushes() - before.0, gate.groups() - before.1);
    // However many of them came too late.
    assert!((2..=OTHERS).contains(&flushes), "{flushes} flushes");
    assert_eq!(groups, flushes, "records were written alone");
    assert!((0..=OTHERS).all(|at| store.peek(&of(at)) == 1));
    store.close().unwrap();
    drop(drives.runner);
}

/// Two commits wait for a third one, and between the ends of their jobs the flush of another
/// request begins: it covers only the first of the two.
#[test]
fn a_flush_covers_none_of_a_group_whose_jobs_ended_after_it_began() {
    let gate = Arc::new(Gate::default());
    let (drives, _kv, store) = gated(&gate);
    let [a, b, c] = [0, 1, 2].map(|at| written(&store, &keys(at..at + 1), at));
    let reserved = store.reserve(&keys(3..4)).unwrap();
    let part = store.fill(&reserved, &[0], &blocks(3, 1)).unwrap();
    store.move_all(&part).unwrap();
    let is_over = |ticket: &Ticket| matches!(store.wait(*ticket), Err(StoreError::Ended { .. }));
    let before = gate.flushes();
    thread::scope(|scope| {
        let (store, part) = (&store, &part);
        let (has_begun, go) = gate.shut();
        let first = scope.spawn(|| store.commit(a));
        has_begun.recv().unwrap();
        let ticket = b.ticket(Layer(0));
        let second = scope.spawn(|| store.commit(b));
        until("the second one waits", || is_over(&ticket));
        let end = scope.spawn(move || store.end(&[part.ticket(Layer(0)).job]));
        until("the request waits", || is_over(&part.ticket(Layer(0))));
        let (has_begun, let_go) = gate.shut();
        go.send(()).unwrap();
        // The drive does nothing else meanwhile: the first one waits for its record.
        has_begun.recv().unwrap();
        let ticket = c.ticket(Layer(0));
        let third = scope.spawn(|| store.commit(c));
        until("the third one waits", || is_over(&ticket));
        (0..10_000).for_each(|_| thread::yield_now());
        let_go.send(()).unwrap();
        assert!(end.join().unwrap().unwrap()[0].failure.is_none());
        for commit in [first, second, third] {
            assert_eq!(commit.join().unwrap().unwrap().written, 1);
        }
    });
    assert!(gate.flushes() >= before + 3, "the third one relied on a flush before its time");
    drop((part, reserved));
    store.close().unwrap();
    drop(drives.runner);
}
