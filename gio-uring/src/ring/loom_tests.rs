#![allow(unsafe_code, reason = "loom's UnsafeCell is how the model sees plain memory")]
//! Both rings under loom: every interleaving that the C++11 memory model allows, up to a bound on
//! preemptions. Run with `RUSTFLAGS="--cfg loom" cargo test -p gio-uring --release --lib loom`.
//!
//! Payloads are loom's `UnsafeCell`s: an access not ordered after the other side's fails the model,
//! even if the value happens to be right. Loom cannot show pair 3 of the ring's `Ordering:`
//! paragraph, because its stores to one word are ordered as they ran.

use loom::{cell::UnsafeCell, sync::Arc, thread};

use super::{CompleteProducer, Consumer, SubmitProducer, Tail, Words};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// A ring's words in loom's model.
#[derive(Clone)]
struct Ring(Arc<Vec<AtomicU64>>);

impl Ring {
    fn new(len: usize) -> Self {
        Self(Arc::new((0..len).map(|_| AtomicU64::new(0)).collect()))
    }
}

impl Words for Ring {
    fn load(&self, slot: u32, order: Ordering) -> u64 {
        self.0[slot as usize].load(order)
    }

    fn store(&self, slot: u32, word: u64, order: Ordering) {
        self.0[slot as usize].store(word, order);
    }
}

/// The same ring with a seeded defect: Release becomes Relaxed.
#[derive(Clone)]
struct Weakened(Ring);

impl Words for Weakened {
    fn load(&self, slot: u32, order: Ordering) -> u64 {
        self.0.load(slot, order)
    }

    fn store(&self, slot: u32, word: u64, _order: Ordering) {
        self.0.store(slot, word, Ordering::Relaxed);
    }
}

#[derive(Clone)]
struct SharedTail(Arc<AtomicU32>);

impl SharedTail {
    fn new() -> Self {
        Self(Arc::new(AtomicU32::new(0)))
    }
}

impl Tail for SharedTail {
    fn next(&self, order: Ordering) -> u32 {
        self.0.fetch_add(1, order)
    }
}

/// Polls twice. Loom explores all schedules of the other threads in between, so two polls suffice
/// for some execution to succeed, while an unbounded wait would have endless executions.
fn look_for<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    (0..2).find_map(|_| {
        let found = look();
        if found.is_none() {
            thread::yield_now();
        }
        found
    })
}

/// Checks every execution of `body`, which returns `Some` at its end; at least one must.
fn model(preemptions: usize, body: impl Fn() -> Option<()> + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    // Not loom's mutex: this one is outside the model.
    let ends = std::sync::Arc::new(std::sync::Mutex::new(0u64));
    let counted = ends.clone();
    builder.check(move || *counted.lock().unwrap() += u64::from(body().is_some()));
    assert!(*ends.lock().unwrap() > 0, "no execution got to its end");
}

/// One IOCB: the caller's half, and a result per warp.
struct Job {
    order: UnsafeCell<u32>,
    results: [UnsafeCell<u32>; 2],
    warps_left: AtomicU32,
}

impl Job {
    fn new() -> Self {
        Self {
            order: UnsafeCell::new(0),
            results: [UnsafeCell::new(0), UnsafeCell::new(0)],
            warps_left: AtomicU32::new(0),
        }
    }

    fn set(cell: &UnsafeCell<u32>, value: u32) {
        // SAFETY: loom itself checks that no other thread accesses the cell at the same time.
        cell.with_mut(|cell| unsafe { *cell = value });
    }

    fn get(cell: &UnsafeCell<u32>) -> u32 {
        // SAFETY: as above.
        cell.with(|cell| unsafe { *cell })
    }

    /// The caller's part before publication.
    fn fill(&self, order: u32) {
        Self::set(&self.order, order);
        self.warps_left.store(2, Ordering::Relaxed);
    }

    /// A warp's part; returns true for the last warp.
    fn work(&self, warp: usize) -> bool {
        Self::set(&self.results[warp], Self::get(&self.order) + 1 + warp as u32);
        self.warps_left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// The caller's part after the completion.
    fn check(&self, order: u32) {
        for (warp, result) in self.results.iter().enumerate() {
            assert_eq!(Self::get(result), order + 1 + warp as u32);
        }
    }
}

/// Runs `rounds` operations through rings of `depth` entries, with two warps that each do their
/// part of every operation. `submission` and `completion` make the ring words.
fn circulate<W: Words + Clone + Send + 'static>(
    depth: u32,
    rounds: u32,
    submission: impl Fn(Ring) -> W,
    completion: impl Fn(Ring) -> W,
) -> Option<()> {
    let (sq, cq) = (submission(Ring::new(depth as usize)), completion(Ring::new(depth as usize)));
    let (mask, tail) = (depth - 1, SharedTail::new());
    let jobs: Arc<Vec<Job>> = Arc::new((0..depth).map(|_| Job::new()).collect());
    let warps: Vec<_> = (0..2usize)
        .map(|warp| {
            let mut entries = Consumer::new(sq.clone(), mask);
            let done = CompleteProducer::new(cq.clone(), tail.clone(), mask);
            let jobs = jobs.clone();
            thread::spawn(move || {
                for _ in 0..rounds {
                    let Some(id) = look_for(|| entries.take()) else { return };
                    if jobs[id as usize].work(warp) {
                        done.complete(id);
                    }
                }
            })
        })
        .collect();
    let mut issue = SubmitProducer::new(sq, mask);
    let mut completions = Consumer::new(cq, mask);
    let (mut free, mut orders): (Vec<u32>, _) = ((0..depth).collect(), vec![0; depth as usize]);
    let (mut issued, mut completed) = (0, 0);
    while completed < rounds {
        while issued < rounds
            && let Some(id) = free.pop()
        {
            orders[id as usize] = 100 * issued;
            jobs[id as usize].fill(100 * issued);
            issue.publish(id);
            issued += 1;
        }
        let Some(id) = look_for(|| completions.take()) else { break };
        jobs[id as usize].check(orders[id as usize]);
        free.push(id);
        completed += 1;
    }
    for warp in warps {
        warp.join().unwrap();
    }
    (completed == rounds).then_some(())
}

/// Both warps read every entry before its slot is reused, immediately in a ring of one.
#[test]
fn a_ring_of_one_wraps_around() {
    model(2, || circulate(1, 2, |ring| ring, |ring| ring));
}

/// With two in flight, completions arrive in either order, and positions wrap.
#[test]
fn a_ring_of_two_wraps_around() {
    model(2, || circulate(2, 3, |ring| ring, |ring| ring));
}

/// Two warps complete different operations at the same time, without a submission ring.
#[test]
fn two_producers_of_completions() {
    model(3, || {
        let (cq, tail) = (Ring::new(2), SharedTail::new());
        let payload: Arc<[UnsafeCell<u32>; 2]> = Arc::new([UnsafeCell::new(0), UnsafeCell::new(0)]);
        for id in 0..2u32 {
            let done = CompleteProducer::new(cq.clone(), tail.clone(), 1);
            let payload = payload.clone();
            thread::spawn(move || {
                Job::set(&payload[id as usize], 7 + id);
                done.complete(id);
            });
        }
        let mut completions = Consumer::new(cq, 1);
        let first = look_for(|| completions.take())?;
        let second = look_for(|| completions.take())?;
        assert_eq!(first + second, 1, "each of 0 and 1 once");
        for id in [first, second] {
            assert_eq!(Job::get(&payload[id as usize]), 7 + id);
        }
        assert_eq!(completions.take(), None);
        Some(())
    });
}

/// The model detects a publication that is not a release: the same test with one word changed.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_publication_is_found() {
    model(3, || circulate(1, 2, Weakened, |ring| Weakened(ring)));
}

/// The model detects a completion position reserved twice: reservation by load and store.
#[test]
#[should_panic(expected = "the second completion was lost")]
fn a_torn_reservation_is_found() {
    struct Torn(SharedTail);
    impl Tail for Torn {
        fn next(&self, _order: Ordering) -> u32 {
            let position = self.0.0.load(Ordering::Acquire);
            self.0.0.store(position + 1, Ordering::Release);
            position
        }
    }
    model(3, || {
        let (cq, tail) = (Ring::new(2), SharedTail::new());
        let warps = [0, 1].map(|id| {
            let done = CompleteProducer::new(cq.clone(), Torn(tail.clone()), 1);
            thread::spawn(move || done.complete(id))
        });
        for warp in warps {
            warp.join().unwrap();
        }
        let mut completions = Consumer::new(cq, 1);
        assert!(completions.take().is_some());
        assert!(completions.take().is_some(), "the second completion was lost");
        Some(())
    });
}

/// A launch of two warps exits while the host submits. `gio_should_exit` (engine.cuh) and
/// `CudaExecutor::submitted` guarantee that the host launches again or every warp sees the entry.
fn leave(fenced: bool) -> Option<()> {
    let (sq, exited) = (Ring::new(1), Arc::new(AtomicU64::new(0)));
    // Of the relay: the entry that warp 0 copied, and its decision.
    let [relayed, left] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let between = move || {
        if fenced {
            fence(Ordering::SeqCst);
        }
    };
    let decides = {
        let (mut entries, exited) = (Consumer::new(sq.clone(), 0), exited.clone());
        let (relayed, left) = (relayed.clone(), left.clone());
        thread::spawn(move || {
            let seen = entries.take().is_some();
            relayed.store(u64::from(seen), Ordering::Release);
            exited.store(1, Ordering::Relaxed);
            between();
            // It stays with an entry that it finds now.
            if entries.take().is_some() {
                return true;
            }
            left.store(1, Ordering::Release);
            seen
        })
    };
    let follows = thread::spawn(move || {
        // It stays, and finds the entry later, unless it sees the decision.
        if left.load(Ordering::Relaxed) != 1 {
            return true;
        }
        fence(Ordering::Acquire);
        relayed.load(Ordering::Relaxed) == 1
    });
    SubmitProducer::new(sq, 0).publish(0);
    between();
    let launches = exited.load(Ordering::Relaxed) == 1;
    let seen = [decides, follows].map(|warp| warp.join().unwrap());
    assert!(launches || seen == [true; 2], "the submission was lost");
    Some(())
}

/// No submission is lost when the kernel exits while the host believes it still runs.
#[test]
fn a_kernel_that_leaves_loses_nothing() {
    model(3, || leave(true));
}

/// The model detects missing fences.
#[test]
#[should_panic(expected = "the submission was lost")]
fn leaving_without_fences_is_found() {
    model(3, || leave(false));
}
