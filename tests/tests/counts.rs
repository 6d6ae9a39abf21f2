//! Counts of the work that a store takes, against `tests/counts.toml`: none may grow. Times are not
//! measured. One thread in virtual time gives the same counts on every machine.

#![allow(unsafe_code, reason = "counts allocations: an allocator's methods are unsafe")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    path::Path,
    process::Command,
    sync::Arc,
};

use nvme_driver::{Clock, ControllerOptions, Nanos};
use nvme_emu::{EmuDomain, SimClock};
use objstore::{BlockKey, Format, KvShape, Layer, Order, StoreError, StoreOptions, Ticket};
use ripieno_testkit::{Drives, blocks, keys, memory_drives};
use ripieno_tests::store::{Plan, Rig};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/counts.toml");
/// Set to `update` to write the file instead of comparing with it.
const UPDATE: &str = "RIPIENO_COUNTS";
/// Set in a process that only runs the workload whose instructions valgrind counts.
const COUNTED: &str = "RIPIENO_COUNTED";
/// Name of the table of bytes.
const COPIED: &str = "bytes copied by the CPU";
const HEADER: &str = "\
# Counts that may not grow; tests/tests/counts.rs measures them. A change that raises one gives the
# reason in its message. To write this file:
#   RIPIENO_COUNTS=update cargo test -p ripieno-tests --test counts
#
# Llama-3-8B: one request of 32 blocks of 16 tokens, on 3 devices. Merged: commands of up to 256
# KiB. Instructions are those of the I/O kernel on a CPU, of 4 KiB objects, compiled by gcc 12.
# Other compilers differ, so 10 % more are accepted. Bytes copied are those of memcpy and its like,
# of 4 KiB objects, without the copies of software controllers, which are the DMA of drives.
";
/// Llama-3-8B.
const LLAMA: KvShape =
    KvShape { layers: 32, segments: 2, object_bytes: 32 << 10, block_tokens: 16 };
const SMALL: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 4 << 10, block_tokens: 16 };
const BLOCKS: u32 = 32;

type Counts = BTreeMap<String, BTreeMap<String, u64>>;

thread_local! {
    /// Allocations of this thread; `None` while they do not count.
    static ALLOCATIONS: Cell<Option<u64>> = const { Cell::new(None) };
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: all calls are the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get().map(|count| count + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// A clock in whose pauses the controllers run, which may allocate.
#[derive(Debug)]
struct Uncounted(Arc<SimClock>);

impl Clock for Uncounted {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn pause(&self, idle: u32, until: Nanos) {
        let count = ALLOCATIONS.replace(None);
        self.0.pause(idle, until);
        ALLOCATIONS.set(count);
    }
}

struct Workload {
    rig: Rig,
    keys: Vec<BlockKey>,
}

impl Workload {
    fn new(shape: KvShape, blocks: u32, checksums: bool, merged: bool) -> Self {
        let sim = SimClock::new(1);
        let bytes = shape.block_bytes() * u64::from(blocks);
        let drives = memory_drives(3, bytes.max(64 << 20), 4096);
        let drives = Drives::simulated(EmuDomain::new("counts"), drives, &sim);
        let run_bytes = if merged { 256 << 10 } else { shape.object_bytes };
        let plan = Plan {
            shape,
            blocks,
            driver: ControllerOptions::default(),
            format: Format { checksums, ..ripieno_testkit::format(shape) },
            store: StoreOptions { run_bytes, self_test: false, ..StoreOptions::default() },
        };
        let clock = Arc::new(Uncounted(sim));
        let rig = Rig::open(&drives.buses(), clock, &plan).expect("a store");
        Self { rig, keys: keys(0..blocks) }
    }

    /// Starts all layers, waits for them, and returns the counts.
    fn count(&self, start: impl Fn(Layer) -> Result<Ticket, StoreError>) -> BTreeMap<String, u64> {
        let before = self.rig.store.stats().expect("counters").plane.ring.total;
        let allocations = self.move_layers(start);
        let after = self.rig.store.stats().expect("counters").plane.ring.total;
        let counts = [
            ("allocations", allocations),
            ("commands", after.commands - before.commands),
            ("cq_doorbells", after.cq_doorbells - before.cq_doorbells),
            ("sq_doorbells", after.sq_doorbells - before.sq_doorbells),
        ];
        counts.map(|(name, count)| (name.to_owned(), count)).into()
    }

    /// Starts all layers and waits for them. Returns the allocations. Profiles find it by its name:
    /// nothing else, such as reading the counters, is in it.
    #[inline(never)]
    fn move_layers(&self, start: impl Fn(Layer) -> Result<Ticket, StoreError>) -> u64 {
        let mut tickets = Vec::with_capacity(self.rig.kv.shape.layers as usize);
        ALLOCATIONS.set(Some(0));
        for layer in 0..self.rig.kv.shape.layers {
            tickets.push(start(Layer(layer)).expect("started"));
        }
        for ticket in &tickets {
            self.rig.store.wait(*ticket).expect("moved");
        }
        ALLOCATIONS.replace(None).expect("counted")
    }

    /// Stores all blocks and retrieves them.
    fn run(&self) -> [BTreeMap<String, u64>; 2] {
        let (store, blocks) = (&self.rig.store, blocks(0, self.keys.len()));
        let save = store.allocate(&self.keys, &blocks).expect("room");
        let stored = self.count(|layer| store.start(&save, layer, Order::Unordered));
        store.commit(save).expect("stored");
        let prefix = store.lookup(&self.keys).expect("found");
        let load = store.retrieve(&prefix, &blocks).expect("files");
        [stored, self.count(|layer| store.start(&load, layer, Order::Unordered))]
    }
}

fn measured() -> Counts {
    let mut all = Counts::new();
    for (checksums, merged) in [(true, true), (true, false), (false, true), (false, false)] {
        let [stored, retrieved] = Workload::new(LLAMA, BLOCKS, checksums, merged).run();
        let sums = if checksums { "with checksums" } else { "without checksums" };
        let runs = if merged { "merged" } else { "not merged" };
        all.insert(format!("llama-3-8b, store, {sums}, {runs}"), stored);
        all.insert(format!("llama-3-8b, retrieve, {sums}, {runs}"), retrieved);
    }
    all
}

/// Runs the small workload, with and without checksums, in valgrind with these arguments. Returns
/// what `count` finds in valgrind's output, for each object that is stored and retrieved, or the
/// reason that it cannot be counted.
fn in_valgrind(
    arguments: &[&str],
    out: &str,
    count: impl Fn(&str) -> u64,
) -> Result<BTreeMap<String, u64>, String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("the counts are those of x86-64".into());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut all = BTreeMap::new();
    for checksums in ["with", "without"] {
        let path = folder.path().join(checksums);
        let mut valgrind = Command::new("valgrind");
        valgrind.args(arguments).arg(format!("{out}={}", path.display()));
        valgrind.arg(std::env::current_exe().expect("this program"));
        valgrind.args(["--exact", "no_count_grows"]).env(COUNTED, checksums);
        let ran = valgrind.output().map_err(|error| format!("valgrind: {error}"))?;
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let text = fs::read_to_string(&path).expect("valgrind's output");
        let objects = u64::from(SMALL.rows() * BLOCKS * 2);
        all.insert(format!("an object, {checksums} checksums"), count(&text) / objects);
    }
    Ok(all)
}

/// Returns the instructions of the I/O kernel.
fn instructions() -> Result<BTreeMap<String, u64>, String> {
    let tool = ["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=gio_host_run"];
    in_valgrind(&tool, "--callgrind-out-file", |text| {
        let total = text.lines().find_map(|line| line.strip_prefix("totals: ")?.parse().ok());
        total.expect("a line of totals")
    })
}

/// Returns the bytes that `memcpy` and its like copy while layers are moved, without those of the
/// software controllers, whose copies are the DMA of drives.
fn copied() -> Result<BTreeMap<String, u64>, String> {
    #[derive(serde::Deserialize)]
    struct Profile {
        pps: Vec<Place>,
        ftbl: Vec<String>,
    }
    #[derive(serde::Deserialize)]
    struct Place {
        tb: u64,
        fs: Vec<usize>,
    }
    let tool = ["--tool=dhat", "--mode=copy", "--num-callers=64"];
    in_valgrind(&tool, "--dhat-out-file", |text| {
        let Profile { pps, ftbl } = serde_json::from_str(text).expect("dhat's JSON");
        let (mut ours, mut drives) = (0, 0);
        for place in pps {
            let has = |name| place.fs.iter().any(|frame| ftbl[*frame].contains(name));
            if has("Workload::move_layers") {
                *(if has("nvme_emu") { &mut drives } else { &mut ours }) += place.tb;
            }
        }
        let moved = 2 * SMALL.block_bytes() * u64::from(BLOCKS);
        assert!(drives >= moved, "{drives} bytes of copies were seen, and {moved} were moved");
        ours
    })
}

/// Returns the counts as the text of the file.
fn text(counts: &Counts) -> String {
    let mut text = HEADER.to_owned();
    for (workload, counts) in counts {
        let _ = write!(text, "\n[\"{workload}\"]\n");
        for (name, count) in counts {
            let _ = writeln!(text, "\"{name}\" = {count}");
        }
    }
    text
}

/// Prints a line that libtest does not capture.
fn say(line: &str) {
    writeln!(io::stdout(), "{line}").expect("stdout");
}

#[test]
fn no_count_grows() {
    if let Ok(checksums) = std::env::var(COUNTED) {
        Workload::new(SMALL, BLOCKS, checksums == "with", false).run();
        return;
    }
    let file = fs::read_to_string(Path::new(FILE)).expect("tests/counts.toml");
    let wanted: Counts = basic_toml::from_str(&file).expect("tables of counts");
    let mut found = measured();
    for (name, counted) in [("instructions", instructions()), (COPIED, copied())] {
        match counted {
            Ok(counts) => drop(found.insert(name.into(), counts)),
            Err(why) => {
                say(&format!("SKIPPED counts::{name}: {why}"));
                found.extend(wanted.get_key_value(name).map(|(k, v)| (k.clone(), v.clone())));
            }
        }
    }
    if std::env::var(UPDATE).is_ok_and(|value| value == "update") {
        fs::write(FILE, text(&found)).expect("written");
        return;
    }
    let mut worse = Vec::new();
    for (workload, counts) in &found {
        for (name, found) in counts {
            let wanted = wanted.get(workload).and_then(|counts| counts.get(name)).copied();
            let slack = if workload == "instructions" || workload == COPIED { 10 } else { 0 };
            let most = wanted.map(|wanted| wanted + wanted * slack / 100);
            if most.is_none_or(|most| *found > most) {
                worse.push(format!("{workload}: {name}: {found}, and the file has {wanted:?}"));
            } else if wanted.is_some_and(|wanted| *found * 100 < wanted * (97 - slack)) {
                say(&format!(
                    "{workload}: {name}: {found} is better than {wanted:?}: {UPDATE}=update"
                ));
            }
        }
    }
    assert!(worse.is_empty(), "{}\nhint: {UPDATE}=update writes the file", worse.join("\n"));
}
