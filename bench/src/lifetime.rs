//! `bench lifetime`: the store's effect on the lifetime of its drive. Measures flash bytes written
//! per host byte written, counted by a simulated flash translation layer below the software
//! controller, while a full store evicts. Runs in virtual time on one thread: results are counts,
//! and reproducible.

mod workload;

use anyhow::{Context as _, Result, ensure};
use nvme_driver::ControllerOptions;
use nvme_emu::{
    EmuConfig, EmuDomain, FtlCounters, FtlMedia, FtlMeter, FtlOptions, MemoryMedia,
    PlacementConfig, SimClock,
};
use objstore::{
    BlockId, Format, KvShape, Layer, Namespace, Store, StoreConfig, StoreDevice, StoreId,
    StoreOptions, StoreStats,
};
use ripieno_testkit::{Drives, KvMemory, inline_executor};

use self::workload::{Requests, Workload};
use crate::report::{Ratio, Report};

const LBA_BYTES: u32 = 4096;
/// Placement handles of drives with Flexible Data Placement.
const HANDLES: u16 = 8;
/// Erase blocks of the drive's capacity.
const ERASE_BLOCKS: u32 = 256;

/// Arguments of `lifetime`.
#[derive(clap::Args, Debug)]
pub struct LifetimeArgs {
    /// Capacity of the drive in MiB; an erase block is a 256th of it
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=16384))]
    drive_mib: u32,
    /// Over-provisioned flash, in percent of the capacity
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(..=100))]
    over_provisioning: u32,
    /// KiB of an object; a file has two
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(4..=1024))]
    object_kib: u32,
    /// Blocks of the longest document; the shortest has an eighth
    #[arg(long, default_value_t = 56, value_parser = clap::value_parser!(u32).range(8..=1024))]
    document_blocks: u32,
    /// Seed of the requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Warm-up before the measurement, in drive writes
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=100))]
    warm_up: u32,
    /// Measurement, in drive writes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    drive_writes: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl LifetimeArgs {
    fn shape(&self) -> KvShape {
        let object_bytes = self.object_kib << 10;
        KvShape { layers: 1, segments: 2, object_bytes, block_tokens: 16 }
    }
}

/// Configuration of a store.
#[derive(Debug, Clone, Copy)]
struct Case {
    workload: Workload,
    deallocate: bool,
    placement: bool,
    /// Files per group; `None` for the format's choice.
    group: Option<u32>,
    /// Percentage of the drive that the store never uses.
    unused: u32,
}

impl Case {
    const fn new(workload: Workload) -> Self {
        Self { workload, deallocate: false, placement: false, group: None, unused: 0 }
    }

    /// Returns all cases. The first one is the baseline.
    fn all(workload: Workload) -> Vec<Self> {
        let mut all = Vec::new();
        for placement in [false, true] {
            all.push(Self { placement, ..Self::new(workload) });
            for group in [None, Some(8), Some(1)] {
                all.push(Self { deallocate: true, placement, group, ..Self::new(workload) });
            }
        }
        all.push(Self { unused: 10, ..Self::new(workload) });
        all
    }

    fn name(&self) -> String {
        let what = match (self.deallocate, self.placement) {
            (false, false) => "neither",
            (true, false) => "deallocation",
            (false, true) => "placement",
            (true, true) => "both",
        };
        let group =
            self.group.map_or(String::new(), |files| format!(", files of a group: {files}"));
        let unused = match self.unused {
            0 => String::new(),
            percent => format!(", {percent} % of the drive unused"),
        };
        format!("{}: {what}{group}{unused}", self.workload.name())
    }
}

/// Measures and prints.
///
/// # Errors
/// Returns an error if a part of the stack fails.
pub fn run(args: &LifetimeArgs) -> Result<()> {
    let mut report = Report::new("lifetime");
    for workload in Workload::ALL {
        let mut first = None;
        for case in Case::all(workload) {
            let name = case.name();
            report.progress(&name);
            let found = Rig::new(args, case)?.measure(args).context(name.clone())?;
            let factor = found.ftl.write_amplification();
            let told = if first.is_none() { 4 } else { 2 };
            let against = *first.get_or_insert(factor);
            report.ratios.push(Ratio::new(name.clone(), "bytes a byte", factor, against));
            for (what, value) in &found.counts()[..told] {
                report.counts.push((format!("{what}, {name}"), *value));
            }
        }
    }
    report.notes.push(
        "bytes of flash written for each byte that the drive was given to write, against neither \
         deallocation nor placement"
            .into(),
    );
    report.print(args.json)
}

/// A store on one drive.
struct Rig {
    case: Case,
    /// One store handle per namespace.
    stores: Vec<Store>,
    meter: FtlMeter,
    drive_bytes: u64,
    requests: Requests,
    /// Number of epochs started so far.
    epochs: usize,
    _kv: KvMemory,
}

/// Counters after the warm-up.
struct Found {
    object_bytes: u32,
    ftl: FtlCounters,
    before: StoreStats,
    after: StoreStats,
}

impl Found {
    /// Returns the results. The first two depend on the configuration, the others on the workload.
    fn counts(&self) -> [(&'static str, f64); 4] {
        let since = |of: fn(&StoreStats) -> u64| (of(&self.after) - of(&self.before)) as f64;
        let stored = since(|stats| stats.stored_bytes);
        let objects = stored / f64::from(self.object_bytes);
        let deallocated = since(|stats| stats.deallocated_bytes);
        let hits = since(|stats| stats.blocks_hit) / since(|stats| stats.blocks_looked_up);
        [
            ("deallocated, % of bytes stored", deallocated / stored * 100.0),
            ("objects a command", objects / since(|stats| stats.commands)),
            ("journal, % of bytes stored", since(|stats| stats.journal_bytes) / stored * 100.0),
            ("found, % of blocks asked for", hits * 100.0),
        ]
    }
}

impl Rig {
    fn new(args: &LifetimeArgs, case: Case) -> Result<Self> {
        let shape = args.shape();
        let drive_bytes = u64::from(args.drive_mib) << 20;
        let block_bytes = (drive_bytes / u64::from(ERASE_BLOCKS)) as u32;
        let flash = FtlOptions {
            over_provisioning_percent: args.over_provisioning,
            block_bytes,
            handles: HANDLES,
        };
        let media = FtlMedia::new(MemoryMedia::new(drive_bytes)?, flash);
        let meter = media.meter();
        let placement =
            Some(PlacementConfig { handles: HANDLES, reclaim_unit_bytes: block_bytes.into() });
        let config = EmuConfig { placement, ..EmuConfig::new("emu0") }.namespace(media, LBA_BYTES);
        let clock = SimClock::new(1);
        let drives = Drives::simulated(EmuDomain::new("bench"), vec![config], &clock);
        let controllers = drives.attach(&ControllerOptions::default());
        let kv = KvMemory::new(&*drives.domain, shape, args.document_blocks);
        let options = StoreOptions {
            deallocate: case.deallocate,
            placement: case.placement,
            virtual_time: true,
            // At most 16 objects of 8 KiB per command.
            run_bytes: 128 << 10,
            ..StoreOptions::default()
        };
        let config = StoreConfig {
            devices: controllers.into_iter().map(StoreDevice::new).collect(),
            clock: clock.clone(),
            executor: inline_executor(clock),
            shape,
            pool: kv.pool.clone(),
            gpu: None,
            options,
            namespace: Namespace::default(),
        };
        let capacity = drive_bytes / 100 * u64::from(100 - case.unused);
        let format = Format {
            // No other store was on this drive.
            store: StoreId([1; 16]),
            group: case.group,
            capacity_bytes: (case.unused > 0).then_some(capacity),
            ..ripieno_testkit::format(shape)
        };
        let store = Store::create(config, &format).context("opening the store")?;
        let (stores, files) = within(&store, case.workload)?;
        let requests = Requests::new(case.workload, files, args.document_blocks, args.seed);
        Ok(Self { case, stores, meter, drive_bytes, requests, epochs: 0, _kv: kv })
    }

    fn measure(mut self, args: &LifetimeArgs) -> Result<Found> {
        self.replay(args.warm_up)?;
        let (ftl, before) = (self.meter.counters(), self.stores[0].stats()?);
        self.replay(args.drive_writes)?;
        let after = self.stores[0].stats()?;
        ensure!(after.deallocations_failed == 0, "the drive refused to deallocate");
        let object_bytes = args.shape().object_bytes;
        Ok(Found { object_bytes, ftl: self.meter.counters().since(ftl), before, after })
    }

    /// Serves requests until `drive_writes` capacities of the drive were written.
    fn replay(&mut self, drive_writes: u32) -> Result<()> {
        for _ in 0..drive_writes {
            if self.case.workload == Workload::Turnover {
                self.stores[self.epochs % self.stores.len()].bump_epoch()?;
                self.epochs += 1;
            }
            let end = self.meter.counters().host_bytes + self.drive_bytes;
            while self.meter.counters().host_bytes < end {
                let request = self.requests.next();
                serve(&self.stores[request.namespace], &request.keys)?;
            }
        }
        Ok(())
    }
}

/// Returns the handles of a workload's namespaces, and the number of files.
fn within(store: &Store, workload: Workload) -> Result<(Vec<Store>, u32)> {
    let files = store.stats()?.files;
    let count = workload.namespaces();
    let mut stores = vec![store.clone()];
    for number in 1..count as u8 {
        let namespace = Namespace { tenant_salt: vec![number], ..Namespace::default() };
        stores.push(store.within(&namespace)?);
    }
    if count > 1 {
        stores.iter().try_for_each(|store| store.set_quota(Some(files / count as u32)))?;
    }
    Ok((stores, files))
}

/// Looks the blocks up, and stores the missing ones.
fn serve(store: &Store, keys: &[objstore::BlockKey]) -> Result<()> {
    let prefix = store.lookup(keys)?;
    let missing = &keys[prefix.len()..];
    if missing.is_empty() {
        return Ok(());
    }
    let blocks: Vec<BlockId> = (0..missing.len() as u32).map(BlockId).collect();
    let writing = store.allocate(missing, &blocks)?;
    let mut tickets = Vec::new();
    for layer in (0..store.shape().layers).map(Layer) {
        tickets.push(store.store_layer(&writing, layer)?);
    }
    for ticket in tickets {
        store.wait(ticket)?;
    }
    let accepted = store.commit(writing)?.accepted;
    ensure!(accepted == missing.len(), "{accepted} of {} blocks were stored", missing.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(case: Case) -> Found {
        let args = LifetimeArgs {
            drive_mib: 64,
            over_provisioning: 7,
            object_kib: 8,
            document_blocks: 56,
            seed: 1,
            warm_up: 2,
            drive_writes: 4,
            json: false,
        };
        Rig::new(&args, case).unwrap().measure(&args).unwrap()
    }

    #[test]
    fn what_ends_together_lets_a_drive_write_less() {
        let neither = Case::new(Workload::Turnover);
        let [neither, both] =
            [neither, Case { deallocate: true, placement: true, ..neither }].map(found);
        let [factor, fewer] = [&neither, &both].map(|found| found.ftl.write_amplification());
        // 1.61 and 1.31: the parts above 1 are the drive's own writes.
        assert!(fewer - 1.0 < 0.6 * (factor - 1.0), "{fewer} with, {factor} without");
        assert_eq!(neither.after.deallocated_bytes, 0);
        assert!(both.after.deallocated_bytes > 0);
    }

    /// All freed space is reused.
    #[test]
    fn a_full_store_deallocates_nothing_and_a_run_repeats() {
        let without = Case::new(Workload::Steady);
        let [without, with] = [without, Case { deallocate: true, ..without }].map(found);
        assert_eq!(with.after.deallocated_bytes, with.before.deallocated_bytes);
        assert_eq!(without.ftl, with.ftl);
        assert!(with.after.evictions > with.before.evictions);
    }
}
