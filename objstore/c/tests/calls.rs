//! Calls of the C interface in any order, with arguments of any kind.
//!
//! Handles are not used after they were given back, and blocks of a request belong to nobody else:
//! everything else is the fuzzer's choice. No call may panic, or report a fault of a device where
//! there is none. Arguments that make no sense are refused, and blocks that are retrieved have the
//! right bytes.

#![allow(unsafe_code, reason = "calls the C interface as a C program does")]

use std::{
    ffi::{CStr, CString},
    os::unix::ffi::OsStrExt as _,
    ptr::{null, null_mut},
    sync::LazyLock,
};

use bolero::{TypeGenerator, check};
use ripieno_c::*;
use tempfile::TempDir;

/// As in the header.
const LAYERS: u32 = 2;
const OBJECT: usize = 512;
/// Blocks of the pool.
const BLOCKS: u32 = 16;
/// Most keys are stored before long.
const KEYS: u8 = 12;
const TENANTS: u8 = 3;

/// Keys one after the other.
#[derive(Debug, Clone, Copy, TypeGenerator)]
struct Keys {
    first: u8,
    count: u8,
}

/// The argument that makes no sense, if there is one.
#[derive(Debug, Clone, Copy, TypeGenerator)]
struct Wrong(u8);

impl Wrong {
    const HANDLE: u8 = 1;
    const KEYS: u8 = 2;
    const BLOCKS: u8 = 3;
    const OUTPUT: u8 = 4;

    /// Null in place of an argument that is to be wrong.
    fn or_null<T>(self, which: u8, good: *const T) -> *const T {
        if self.0 == which { null() } else { good }
    }

    fn or_null_mut<T>(self, which: u8, good: *mut T) -> *mut T {
        if self.0 == which { null_mut() } else { good }
    }
}

/// Handles are those that exist, counted round.
#[derive(Debug, TypeGenerator)]
enum Call {
    /// Stores blocks as an engine does.
    Put {
        store: u8,
        keys: Keys,
        block: u8,
    },
    /// Retrieves blocks as an engine does, but for the first ones.
    Get {
        store: u8,
        keys: Keys,
        skip: u8,
        block: u8,
    },
    Lookup {
        store: u8,
        keys: Keys,
        wrong: Wrong,
    },
    Release {
        prefix: u8,
    },
    Count {
        store: u8,
        keys: Keys,
        what: u8,
        wrong: Wrong,
    },
    Change {
        store: u8,
        what: u8,
        number: u8,
        wrong: Wrong,
    },
    StoreBegin {
        store: u8,
        keys: Keys,
        block: u8,
        wrong: Wrong,
    },
    RetrieveBegin {
        store: u8,
        prefix: u8,
        first: u8,
        count: u8,
        block: u8,
        wrong: Wrong,
    },
    Start {
        request: u8,
        layer: u8,
    },
    Wait {
        request: u8,
        layer: u8,
        polls: bool,
        wrong: Wrong,
    },
    MoveAll {
        request: u8,
    },
    Commit {
        request: u8,
    },
    End {
        request: u8,
    },
    Report {
        store: u8,
        what: u8,
        size: u8,
        wrong: Wrong,
    },
    Within {
        store: u8,
        tenant: u8,
        wrong: Wrong,
    },
    Close {
        store: u8,
    },
}

#[derive(Debug, TypeGenerator)]
struct Input {
    dram_blocks: u8,
    dram_mode: u8,
    calls: Vec<Call>,
}

/// The engine's memory: one for all runs, so that no device can reach it after it was freed.
static POOL: LazyLock<usize> = LazyLock::new(|| {
    vec![0u8; LAYERS as usize * BLOCKS as usize * OBJECT].leak().as_mut_ptr() as usize
});

/// A home for each process.
static HOME: LazyLock<(TempDir, CString)> = LazyLock::new(|| {
    let place = tempfile::tempdir().unwrap();
    let home = CString::new(place.path().join("home").as_os_str().as_bytes()).unwrap();
    (place, home)
});

fn object(layer: u32, block: u32) -> *mut u8 {
    let at = (layer * BLOCKS + block) as usize * OBJECT;
    (*POOL as *mut u8).wrapping_add(at)
}

/// Returns the contents of a tenant's block.
fn contents(tenant: u8, key: u8, layer: u32) -> [u8; OBJECT] {
    let start = tenant.wrapping_mul(89) ^ key.wrapping_mul(31) ^ (layer as u8).wrapping_mul(7);
    std::array::from_fn(|at| start.wrapping_add(at as u8) ^ (at >> 8) as u8)
}

fn fill(block: u32, contents: impl Fn(u32) -> [u8; OBJECT]) {
    for layer in 0..LAYERS {
        let from = contents(layer);
        // SAFETY: an object of the pool, in which no request moves anything.
        unsafe { object(layer, block).copy_from_nonoverlapping(from.as_ptr(), OBJECT) };
    }
}

fn tenant(number: u8) -> Namespace {
    static SALTS: [u8; 256] = [7; 256];
    Namespace {
        size: size_of::<Namespace>(),
        weights: [0; 32],
        layout: null(),
        dtype: null(),
        adapter: null(),
        tenant_salt: SALTS.as_ptr(),
        tenant_salt_bytes: number.into(),
        label: null(),
        block_tokens: 16,
        reserved: 0,
    }
}

/// Returns whether a call succeeded. With devices that work it fails for a few reasons only.
fn done(status: Status) -> bool {
    let why = || {
        // SAFETY: good until the next failure of this thread.
        let why = unsafe { CStr::from_ptr(ripieno_last_error()) };
        why.to_str().expect("UTF-8").to_owned()
    };
    let is_right = [Status::Ok, Status::Invalid, Status::Busy, Status::Stale].contains(&status);
    assert!(is_right, "{status:?}: {}", why());
    assert!(status == Status::Ok || !why().is_empty(), "{status:?} without a reason");
    status == Status::Ok
}

struct Found {
    handle: *mut Prefix,
    tenant: u8,
    keys: Vec<u8>,
}

struct Moving {
    handle: *mut Request,
    is_store: bool,
    tenant: u8,
    /// The pool's blocks, and the keys.
    blocks: Vec<(u32, u8)>,
}

impl Moving {
    /// Compares the layers of the blocks that were retrieved.
    fn compare(&self, layers: std::ops::Range<u32>) {
        let pairs = self.blocks.iter().filter(|_| !self.is_store);
        for (&(block, key), layer) in pairs.flat_map(|pair| layers.clone().map(move |l| (pair, l)))
        {
            // SAFETY: an object of the pool, which nothing is moved to any more.
            let found = unsafe { object(layer, block).cast::<[u8; OBJECT]>().read() };
            let wanted = contents(self.tenant, key, layer);
            assert!(found == wanted, "key {key}, layer {layer}: wrong bytes");
        }
    }
}

struct Engine {
    /// With the tenants.
    stores: Vec<(*mut Store, u8)>,
    prefixes: Vec<Found>,
    requests: Vec<Moving>,
    /// Blocks of the pool that no request has.
    free: Vec<u32>,
}

fn pick<T>(from: &[T], number: u8) -> Option<usize> {
    (!from.is_empty()).then(|| usize::from(number) % from.len())
}

impl Keys {
    fn list(self) -> Vec<u8> {
        (0..self.count % 6).map(|at| (self.first % KEYS + at) % KEYS).collect()
    }
}

/// As the interface takes them.
fn bytes(keys: &[u8]) -> Vec<u8> {
    keys.iter().flat_map(|key| [*key; KEY_BYTES]).collect()
}

impl Engine {
    fn open(input: &Input) -> Self {
        let pool = Pool {
            size: size_of::<Pool>(),
            base: (*POOL as *mut u8).cast(),
            bytes: LAYERS as usize * BLOCKS as usize * OBJECT,
            rows: null(),
            rows_count: 0,
            block_stride: 0,
            blocks: BLOCKS,
            reserved: 0,
            release: None,
            release_context: null_mut(),
            file: 0,
            reserved_2: 0,
        };
        let namespace = tenant(0);
        let dram = u64::from(input.dram_blocks % 8) * u64::from(LAYERS) * OBJECT as u64;
        let mode = ["write-through", "read-ahead"][usize::from(input.dram_mode) % 2];
        let pacing = input.dram_mode >> 7 == 1;
        let options = CString::new(format!(
            "capacity = '8MiB'\nlba = 512\ndepth = 16\npacing = {pacing}\ndram = {dram}\n\
             dram_mode = '{mode}'"
        ));
        let options = options.unwrap();
        let config = Config {
            size: size_of::<Config>(),
            path: HOME.1.as_ptr(),
            options: options.as_ptr(),
            shape: Shape { layers: LAYERS, segments: 1, object_bytes: 512, block_tokens: 16 },
            pool: &raw const pool,
            namespace_: &raw const namespace,
            server: null(),
        };
        let mut store = null_mut();
        // SAFETY: all of it is there during the call, and the pool for good.
        assert!(done(unsafe { ripieno_open(&raw const config, &raw mut store) }));
        let free = (0..BLOCKS).collect();
        let (prefixes, requests) = (Vec::new(), Vec::new());
        let mut engine = Self { stores: vec![(store, 0)], prefixes, requests, free };
        engine.forget();
        engine
    }

    /// Drops what an earlier run left in the home.
    fn forget(&mut self) {
        for tenant in 0..TENANTS {
            self.within(0, tenant, Wrong(0));
            let (store, _) = self.stores.pop().expect("a handle");
            // SAFETY: a handle that was not given back, and is not used after the last call.
            let forgotten = unsafe {
                [
                    ripieno_clear(store),
                    ripieno_set_quota(store, u32::MAX),
                    ripieno_set_weight(store, 1),
                    ripieno_close(store),
                ]
            };
            assert_eq!(forgotten, [Status::Ok; 4]);
        }
    }

    fn store(&self, number: u8) -> (*mut Store, u8) {
        self.stores[usize::from(number) % self.stores.len()]
    }

    /// Takes blocks of the pool for a request.
    fn take(&mut self, count: usize, from: u8) -> Vec<u32> {
        let from = pick(&self.free, from).unwrap_or(0);
        self.free.rotate_left(from);
        self.free.drain(..count.min(self.free.len())).collect()
    }

    fn lookup(&mut self, store: u8, keys: Keys, wrong: Wrong) -> Option<usize> {
        let ((store, tenant), mut keys) = (self.store(store), keys.list());
        let (list, mut handle) = (bytes(&keys), null_mut());
        // SAFETY: as the header says; null where an argument is wrong.
        let is_done = done(unsafe {
            ripieno_lookup(
                wrong.or_null(Wrong::HANDLE, store),
                wrong.or_null(Wrong::KEYS, list.as_ptr()),
                keys.len(),
                wrong.or_null_mut(Wrong::OUTPUT, &raw mut handle),
            )
        });
        let is_wrong = [Wrong::HANDLE, Wrong::OUTPUT].contains(&wrong.0)
            || wrong.0 == Wrong::KEYS && !keys.is_empty();
        assert_eq!(is_done, !is_wrong, "{wrong:?}");
        if !is_done {
            return None;
        }
        // SAFETY: a prefix that was not given back.
        keys.truncate(unsafe { ripieno_prefix_blocks(handle) });
        self.prefixes.push(Found { handle, tenant, keys });
        Some(self.prefixes.len() - 1)
    }

    fn release(&mut self, prefix: usize) {
        // SAFETY: a prefix that was not given back, and is not used any more.
        unsafe { ripieno_prefix_release(self.prefixes.swap_remove(prefix).handle) };
    }

    fn store_begin(&mut self, store: u8, keys: Keys, block: u8, wrong: Wrong) -> Option<usize> {
        let ((store, tenant), mut keys) = (self.store(store), keys.list());
        let mut blocks = self.take(keys.len(), block);
        keys.truncate(blocks.len());
        for (block, key) in blocks.iter().zip(&keys) {
            fill(*block, |layer| contents(tenant, *key, layer));
        }
        let (list, mut handle, mut room) = (bytes(&keys), null_mut(), 0);
        let pairs: Vec<_> = blocks.iter().copied().zip(keys.iter().copied()).collect();
        if let (Wrong(Wrong::BLOCKS), Some(last)) = (wrong, blocks.last_mut()) {
            *last += BLOCKS;
        }
        // SAFETY: as the header says; null where an argument is wrong.
        let is_done = done(unsafe {
            ripieno_store_begin(
                wrong.or_null(Wrong::HANDLE, store),
                wrong.or_null(Wrong::KEYS, list.as_ptr()),
                blocks.as_ptr(),
                keys.len(),
                &raw mut handle,
                wrong.or_null_mut(Wrong::OUTPUT, &raw mut room),
            )
        });
        let is_wrong = [Wrong::HANDLE, Wrong::OUTPUT].contains(&wrong.0)
            || [Wrong::KEYS, Wrong::BLOCKS].contains(&wrong.0) && !keys.is_empty();
        assert!(!is_wrong || !is_done, "{wrong:?}");
        if !is_done {
            self.free.extend(pairs.iter().map(|(block, _)| block));
            return None;
        }
        assert!(room <= keys.len(), "room for {room} of {} blocks", keys.len());
        self.requests.push(Moving { handle, is_store: true, tenant, blocks: pairs });
        Some(self.requests.len() - 1)
    }

    fn retrieve_begin(
        &mut self,
        (store, prefix): (u8, usize),
        (first, count): (u8, u8),
        block: u8,
        wrong: Wrong,
    ) -> Option<usize> {
        let (store, first) = (self.store(store).0, usize::from(first % 8));
        let mut blocks = self.take(usize::from(count % 6), block);
        blocks.iter().for_each(|block| fill(*block, |_| [0xee; OBJECT]));
        let taken = blocks.clone();
        if let (Wrong(Wrong::BLOCKS), [.., before, last]) = (wrong, &mut blocks[..]) {
            *last = *before;
        }
        let Found { handle: found, tenant, ref keys } = self.prefixes[prefix];
        let mut handle = null_mut();
        // SAFETY: as the header says; null where an argument is wrong.
        let is_done = done(unsafe {
            ripieno_retrieve_begin(
                wrong.or_null(Wrong::HANDLE, store),
                wrong.or_null(Wrong::KEYS, found),
                first,
                blocks.as_ptr(),
                blocks.len(),
                wrong.or_null_mut(Wrong::OUTPUT, &raw mut handle),
            )
        });
        let is_wrong = [Wrong::HANDLE, Wrong::KEYS, Wrong::OUTPUT].contains(&wrong.0)
            || wrong.0 == Wrong::BLOCKS && blocks.len() > 1
            || first + blocks.len() > keys.len();
        assert!(!is_wrong || !is_done, "{wrong:?}, from {first} of {}", keys.len());
        if !is_done {
            self.free.extend(taken);
            return None;
        }
        let blocks = taken.into_iter().zip(keys[first..].iter().copied()).collect();
        self.requests.push(Moving { handle, is_store: false, tenant, blocks });
        Some(self.requests.len() - 1)
    }

    fn move_all(&mut self, request: usize) -> bool {
        let request = &self.requests[request];
        // SAFETY: a request that was not given back.
        let is_done = done(unsafe { ripieno_move_all(request.handle) });
        if is_done {
            request.compare(0..LAYERS);
        }
        is_done
    }

    fn wait(&mut self, request: usize, layer: u8, polls: bool, wrong: Wrong) {
        let (request, layer) = (&self.requests[request], u32::from(layer % 4));
        let handle = wrong.or_null(Wrong::HANDLE, request.handle);
        let mut ended = !polls;
        let to = wrong.or_null_mut(Wrong::OUTPUT, &raw mut ended);
        // SAFETY: a request that was not given back; null where an argument is wrong.
        let is_done = done(unsafe {
            match polls {
                true => ripieno_layer_poll(handle, layer, to),
                false => ripieno_layer_wait(handle, layer),
            }
        });
        if is_done && ended {
            assert!(layer < LAYERS && !handle.is_null(), "there is no layer {layer}");
            request.compare(layer..layer + 1);
        }
    }

    /// Ends a request, with a commit or without.
    fn end(&mut self, request: usize, commits: bool) -> bool {
        let Moving { handle, is_store, blocks, .. } = self.requests.swap_remove(request);
        // SAFETY: a request that was not given back, and is not used any more.
        let is_done = unsafe {
            match commits {
                true => done(ripieno_commit(handle)),
                false => {
                    ripieno_request_end(handle);
                    false
                }
            }
        };
        assert!(is_store || !is_done, "a retrieval was committed");
        self.free.extend(blocks.iter().map(|(block, _)| block));
        is_done
    }

    fn peek(&self, store: u8, keys: &[u8]) -> usize {
        let (list, mut found) = (bytes(keys), 0);
        let store = self.store(store).0;
        // SAFETY: as the header says.
        assert!(done(unsafe { ripieno_peek(store, list.as_ptr(), keys.len(), &raw mut found) }));
        found
    }

    fn put(&mut self, store: u8, keys: Keys, block: u8) {
        // A key that another request is storing is found only after the commit of that request.
        let is_quiet = self.requests.is_empty();
        let Some(request) = self.store_begin(store, keys, block, Wrong(0)) else { return };
        let stored: Vec<u8> = self.requests[request].blocks.iter().map(|(_, key)| *key).collect();
        let usage = self.usage(store);
        let is_whole = self.move_all(request) && self.end(request, true);
        if is_quiet && is_whole && usage.quota == u32::MAX {
            assert_eq!(self.peek(store, &stored), stored.len(), "committed and not found");
        }
    }

    fn get(&mut self, store: u8, keys: Keys, skip: u8, block: u8) {
        let Some(prefix) = self.lookup(store, keys, Wrong(0)) else { return };
        let found = self.prefixes[prefix].keys.len() as u8;
        let skip = skip.checked_rem(found).unwrap_or(0);
        let request = self.retrieve_begin((store, prefix), (skip, found - skip), block, Wrong(0));
        let request = request.expect("blocks that were just found");
        self.move_all(request);
        self.end(request, false);
        self.release(prefix);
    }

    fn usage(&self, store: u8) -> Usage {
        // SAFETY: numbers.
        let mut usage: Usage = unsafe { std::mem::zeroed() };
        usage.size = size_of::<Usage>();
        // SAFETY: a handle that was not given back.
        assert!(done(unsafe { ripieno_get_usage(self.store(store).0, &raw mut usage) }));
        usage
    }

    fn count(&self, store: u8, keys: Keys, what: u8, wrong: Wrong) {
        let (keys, mut size, mut number) = (keys.list(), 0, 0);
        let (list, count) = (bytes(&keys), keys.len());
        let mut flags = vec![false; count.max(1)];
        let store = wrong.or_null(Wrong::HANDLE, self.store(store).0);
        let list = wrong.or_null(Wrong::KEYS, list.as_ptr());
        let to_size = wrong.or_null_mut(Wrong::OUTPUT, &raw mut size);
        let to_number = wrong.or_null_mut(Wrong::OUTPUT, &raw mut number);
        let to_flags = wrong.or_null_mut(Wrong::OUTPUT, flags.as_mut_ptr());
        // SAFETY: as the header says; null where an argument is wrong.
        let is_done = done(unsafe {
            match what % 5 {
                0 => ripieno_peek(store, list, count, to_size),
                4 => ripieno_are_stored(store, list, count, to_flags),
                1 => ripieno_prefetch(store, list, count, 1000, to_size),
                2 => {
                    let mut pin = 0;
                    let pinned = ripieno_pin_for(store, list, count, 60, &raw mut pin, to_size);
                    // A pin that ends leaves no trace.
                    assert!(pin == 0 || done(ripieno_pin_end(store, pin)));
                    pinned
                }
                _ => ripieno_remove(store, list, count, to_number),
            }
        });
        let is_wrong = [Wrong::HANDLE, Wrong::OUTPUT].contains(&wrong.0)
            || wrong.0 == Wrong::KEYS && count > 0;
        assert!(!is_wrong || !is_done, "{wrong:?}");
        assert!(size.max(number as usize) <= count, "more than were asked for");
    }

    fn change(&self, store: u8, what: u8, number: u8, wrong: Wrong) {
        let (mut evicted, mut epoch) = (0, 0);
        let store = wrong.or_null(Wrong::HANDLE, self.store(store).0);
        let number = u32::from(number);
        // SAFETY: as the header says; null where an argument is wrong.
        let is_done = done(unsafe {
            match what % 6 {
                0 => ripieno_clear(store),
                1 => ripieno_evict(store, number, &raw mut evicted),
                2 => ripieno_bump_epoch(store, &raw mut epoch),
                3 => ripieno_set_quota(store, if number > 16 { u32::MAX } else { number }),
                4 => ripieno_set_weight(store, number),
                _ => ripieno_sync(store),
            }
        });
        assert!(wrong.0 != Wrong::HANDLE || !is_done);
        assert!(evicted <= number);
    }

    fn report(&self, store: u8, what: u8, size: u8, wrong: Wrong) {
        let store = wrong.or_null(Wrong::HANDLE, self.store(store).0);
        // As long as any size says, and aligned as all of the structs are.
        let (mut report, mut events, mut stat) = ([0u64; 64], 0, 0.0);
        report[0] = size.into();
        let to = wrong.or_null_mut(Wrong::OUTPUT, report.as_mut_ptr());
        // SAFETY: as the header says; null where an argument is wrong.
        let is_done = done(unsafe {
            match what % 3 {
                0 => ripieno_get_usage(store, to.cast()),
                1 => {
                    // A name, or none of them.
                    let names = [c"lookups_total", c"healthy", c"", c"\xFF"];
                    let value = wrong.or_null_mut(Wrong::OUTPUT, &raw mut stat);
                    ripieno_get_stat(store, names[usize::from(size % 4)].as_ptr(), value)
                }
                _ => ripieno_poll_events(store, wrong.or_null_mut(Wrong::OUTPUT, &raw mut events)),
            }
        });
        assert!(![Wrong::HANDLE, Wrong::OUTPUT].contains(&wrong.0) || !is_done);
        let behind = usize::from(size).div_ceil(8).max(1);
        assert!(report[behind..].iter().all(|word| *word == 0), "behind the caller's struct");
        assert_eq!(events, 0, "of a device that works");
    }

    fn within(&mut self, store: u8, tenant: u8, wrong: Wrong) {
        let (namespace, mut handle) = (self::tenant(tenant % TENANTS), null_mut());
        // SAFETY: as the header says; null where an argument is wrong.
        let is_done = done(unsafe {
            ripieno_within(
                wrong.or_null(Wrong::HANDLE, self.store(store).0),
                wrong.or_null(Wrong::KEYS, &raw const namespace),
                wrong.or_null_mut(Wrong::OUTPUT, &raw mut handle),
            )
        });
        if is_done {
            self.stores.push((handle, tenant % TENANTS));
        }
    }

    fn call(&mut self, call: &Call) {
        match *call {
            Call::Put { store, keys, block } => self.put(store, keys, block),
            Call::Get { store, keys, skip, block } => self.get(store, keys, skip, block),
            Call::Lookup { store, keys, wrong } => drop(self.lookup(store, keys, wrong)),
            Call::Release { prefix } => {
                if let Some(prefix) = pick(&self.prefixes, prefix) {
                    self.release(prefix);
                }
            }
            Call::Count { store, keys, what, wrong } => self.count(store, keys, what, wrong),
            Call::Change { store, what, number, wrong } => self.change(store, what, number, wrong),
            Call::StoreBegin { store, keys, block, wrong } => {
                self.store_begin(store, keys, block, wrong);
            }
            Call::RetrieveBegin { store, prefix, first, count, block, wrong } => {
                if let Some(prefix) = pick(&self.prefixes, prefix) {
                    self.retrieve_begin((store, prefix), (first, count), block, wrong);
                }
            }
            Call::Report { store, what, size, wrong } => self.report(store, what, size, wrong),
            Call::Within { store, tenant, wrong } => self.within(store, tenant, wrong),
            Call::Close { store } if self.stores.len() > 1 => {
                let (store, _) = self.stores.swap_remove(usize::from(store) % self.stores.len());
                // SAFETY: a handle that was not given back, and is not used any more.
                assert!(done(unsafe { ripieno_close(store) }));
            }
            Call::Close { .. } => {}
            Call::Start { request, .. }
            | Call::Wait { request, .. }
            | Call::MoveAll { request }
            | Call::Commit { request }
            | Call::End { request } => {
                if let Some(request) = pick(&self.requests, request) {
                    self.call_of(request, call);
                }
            }
        }
    }

    fn call_of(&mut self, request: usize, call: &Call) {
        match *call {
            Call::Start { layer, .. } => {
                let (handle, layer) = (self.requests[request].handle, u32::from(layer % 4));
                // SAFETY: a request that was not given back.
                let is_done = done(unsafe { ripieno_layer_start(handle, layer) });
                assert!(!is_done || layer < LAYERS, "there is no layer {layer}");
            }
            Call::Wait { layer, polls, wrong, .. } => self.wait(request, layer, polls, wrong),
            Call::MoveAll { .. } => drop(self.move_all(request)),
            Call::Commit { .. } => drop(self.end(request, true)),
            _ => drop(self.end(request, false)),
        }
    }
}

/// Gives everything back, also after a failure: the next run opens the same home.
impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: handles that were not given back, and are not used any more.
        unsafe {
            self.requests.drain(..).for_each(|request| ripieno_request_end(request.handle));
            self.prefixes.drain(..).for_each(|prefix| ripieno_prefix_release(prefix.handle));
            for (store, _) in self.stores.drain(..) {
                let closed = ripieno_close(store);
                assert!(closed == Status::Ok || std::thread::panicking(), "{closed:?}");
            }
        }
    }
}

#[test]
fn calls() {
    check!(name = "calls").with_type::<Input>().with_iterations(20).for_each(|input| {
        let mut engine = Engine::open(input);
        input.calls.iter().for_each(|call| engine.call(call));
    });
}
