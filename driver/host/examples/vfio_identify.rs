//! Takes over an NVMe controller behind VFIO, describes it, and tests whether it works.
//!
//! ```text
//! vfio_identify BDF [--write LBA] [--peer BDF BAR] [--hold SECONDS]
//!   --write LBA      write 1 MiB from LBA on, read it back in several ways, restore the old data
//!   --peer BDF BAR   prove that the controller can access that BAR of another function
//!   --hold SECONDS   then wait, and release the function when the host wants it back
//! ```
//!
//! The functions must be bound to vfio-pci. Without `--write` nothing on the drive changes.
#![allow(clippy::print_stdout, reason = "its output is what it is for")]

use std::{error::Error, process::ExitCode, sync::Arc, time::Duration};

use nvme_driver::{
    Bus, Controller, ControllerOptions, DescriptorPreference, DmaSlice, DmaSpace, MonotonicClock,
    WaitMode,
    platform::{
        buffer::Buffer,
        p2p,
        vfio::{BusOptions, PciAddress, PeerBar, SpaceOptions, VfioBus, VfioSpace},
    },
};
use nvme_spec::ids::{Lba, Nsid};

/// Bytes written by `--write`.
const BYTES: usize = 1 << 20;

type Outcome<T> = Result<T, Box<dyn Error>>;

#[derive(Default)]
struct Arguments {
    address: Option<PciAddress>,
    write: Option<u64>,
    peer: Option<(PciAddress, u8)>,
    hold: Option<u64>,
}

fn arguments() -> Outcome<Arguments> {
    let mut found = Arguments::default();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut next = || words.next().ok_or_else(|| format!("{word}: something must follow"));
        match word.as_str() {
            "--write" => found.write = Some(next()?.parse()?),
            "--peer" => found.peer = Some((next()?.parse()?, next()?.parse()?)),
            "--hold" => found.hold = Some(next()?.parse()?),
            address => found.address = Some(address.parse()?),
        }
    }
    Ok(found)
}

fn main() -> ExitCode {
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr);
    log.without_time().with_ansi(false).init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    let arguments = arguments()?;
    let address = arguments.address.ok_or("which function? vfio_identify 0000:65:00.0 ...")?;
    let space = VfioSpace::open("vfio", SpaceOptions::default())?;
    let bus = VfioBus::open(&space, address, &BusOptions::default())?;
    let nsid = identify(&bus)?;
    println!("space: {:?}", space.status());
    if let (Some(lba), Some(nsid)) = (arguments.write, nsid) {
        for descriptors in [DescriptorPreference::Prp, DescriptorPreference::Sgl] {
            for wait in [WaitMode::Poll, WaitMode::Interrupt] {
                round_trip(&bus, nsid, Lba(lba), descriptors, wait)?;
            }
        }
    }
    if let (Some((peer, bar)), Some(nsid)) = (arguments.peer, nsid) {
        prove(&space, &bus, nsid, peer, bar)?;
    }
    if let Some(seconds) = arguments.hold {
        hold(&bus, seconds);
    }
    drop(bus);
    println!("space: {:?}", space.status());
    Ok(())
}

fn attach(bus: &Arc<VfioBus>, options: ControllerOptions) -> Outcome<Controller> {
    Ok(Controller::attach(bus.clone(), Arc::new(MonotonicClock::default()), options)?)
}

/// Prints the controller's identity. Returns its first namespace, if there is one.
fn identify(bus: &Arc<VfioBus>) -> Outcome<Option<Nsid>> {
    let mut controller = attach(bus, ControllerOptions::default())?;
    let info = controller.info();
    println!("{}: {} {} firmware {}", bus.id(), info.model, info.serial, info.firmware);
    println!(
        "  NVMe {}, {} queue pairs of up to {} entries, MDTS {:?}, {:?}, NUMA node {:?}",
        info.version,
        info.io_queues,
        info.entries_max,
        info.mdts_bytes,
        info.descriptor_mode,
        bus.numa_node()
    );
    for namespace in controller.namespaces() {
        println!(
            "  namespace {}: {} LBAs of {} bytes",
            namespace.nsid,
            namespace.lbas,
            namespace.lba_bytes()
        );
    }
    let first = controller.namespaces().first().map(|namespace| namespace.nsid);
    controller.shutdown()?;
    Ok(first)
}

/// Writes, reads back by copy and directly into scattered memory, and restores the old data.
fn round_trip(
    bus: &Arc<VfioBus>,
    nsid: Nsid,
    lba: Lba,
    descriptors: DescriptorPreference,
    wait: WaitMode,
) -> Outcome<()> {
    let interrupts_before = interrupts(bus.id());
    let options = ControllerOptions { descriptors, wait, ..ControllerOptions::default() };
    let mut controller = attach(bus, options)?;
    let mut old = vec![0; BYTES];
    controller.read(nsid, lba, &mut old)?;
    let new: Vec<u8> = (0..BYTES).map(|i| (i / 512 * 31 + i * 7) as u8).collect();
    controller.write(nsid, lba, &new, true)?;
    let mut back = vec![0; BYTES];
    controller.read(nsid, lba, &mut back)?;
    let copied = back == new;
    // Pieces in reverse order, each in separate memory: one list per command.
    let memory = bus.dma().alloc(2 * BYTES)?;
    let piece = 16 << 10;
    let slices = (0..BYTES / piece)
        .map(|i| DmaSlice::new(memory.clone(), 2 * (BYTES - (i + 1) * piece), piece))
        .collect::<Result<Vec<_>, _>>()?;
    controller.read_dma(nsid, lba, &slices)?;
    let mut scattered = true;
    for (slice, expected) in slices.iter().zip(new.chunks(piece)) {
        let mut found = vec![0; piece];
        Buffer::new(slice.clone()).ok_or("no host address")?.read(0, &mut found)?;
        scattered &= found == expected;
    }
    controller.write(nsid, lba, &old, true)?;
    controller.shutdown()?;
    let interrupts = interrupts(bus.id()) - interrupts_before;
    println!(
        "  {descriptors:?} {wait:?}: copied {} scattered {} ({interrupts} interrupts)",
        verdict(copied),
        verdict(scattered)
    );
    if copied && scattered { Ok(()) } else { Err("data differs".into()) }
}

fn verdict(ok: bool) -> &'static str {
    if ok { "ok" } else { "DIFFERS" }
}

/// Returns the number of a function's interrupts that the kernel has seen.
fn interrupts(function: &str) -> u64 {
    let all = std::fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let ours = all.lines().filter(|line| line.contains("vfio") && line.contains(function));
    // "41:  0  17  PCI-MSIX-0000:00:03.0 0-edge vfio-msix[0](0000:00:03.0)": one count per CPU.
    let counts = |line: &str| -> u64 {
        line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum()
    };
    ours.map(counts).sum()
}

/// Tests whether the controller can access main memory and the memory of another function.
fn prove(
    space: &Arc<VfioSpace>,
    bus: &Arc<VfioBus>,
    nsid: Nsid,
    peer: PciAddress,
    bar: u8,
) -> Outcome<()> {
    for descriptors in [DescriptorPreference::Prp, DescriptorPreference::Sgl] {
        let options = ControllerOptions { descriptors, ..ControllerOptions::default() };
        let mut controller = attach(bus, options)?;
        let bytes = p2p::scratch_bytes(&controller);
        let memory = DmaSlice::new(space.alloc(bytes)?, 0, bytes)?;
        println!("{descriptors:?} main memory: {}", p2p::prove(&mut controller, nsid, &memory)?);
        let peer = PeerBar::open(space, peer, bar, None)?;
        let memory = DmaSlice::new(peer.memory().clone(), 0, bytes)?;
        let report = p2p::prove(&mut controller, nsid, &memory)?;
        println!("{descriptors:?} {peer:?}: {report}");
        if let Some(why) = report.why() {
            return Err(why.into());
        }
    }
    Ok(())
}

/// Waits until the host wants the function back, or `seconds` have passed.
fn hold(bus: &VfioBus, seconds: u64) {
    println!("holding {}", bus.id());
    for tenth in 0..seconds * 10 {
        if bus.requested() {
            println!("wanted back after {}.{} s", tenth / 10, tenth % 10);
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("nobody asked");
}
