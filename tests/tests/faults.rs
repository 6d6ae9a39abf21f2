//! Controllers that report false capabilities, vanish at any moment, or fail any one admin command.
//!
//! The driver's blocking calls must return an error or a usable controller, in bounded virtual
//! time, and never panic; and once the controller has no fault, it can be attached.

use std::sync::{Arc, Mutex};

use nvme_driver::{
    Bus, Clock, Controller, ControllerOptions, DmaSpace, DoorbellPage, Error, Gone, Interrupt,
    InterruptError, Nanos, ResetError, State,
};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, FaultAction, FaultPlan, FaultRule, FaultWhen, IdentifyOverrides,
    IdentifyPatch, MemoryMedia, RegisterFaults, SimClock,
};
use nvme_spec::{
    admin::Cns,
    ids::{Lba, Nsid},
    reg,
    status::Status,
};
use proptest::prelude::*;
use ripieno_tests::pattern;

/// Limit of virtual time for attaching, some I/O and a reset, whatever the controller does: a few
/// times CAP.TO, and the maximum number of command timeouts.
const BOUND: Nanos = Nanos::from_millis(200_000);

/// Actual bytes of a block.
const BLOCK: usize = 512;

struct Rig {
    clock: Arc<SimClock>,
    emu: Arc<Emu>,
}

impl Rig {
    fn new(config: EmuConfig) -> Self {
        let clock = SimClock::new(7);
        let media = MemoryMedia::new(16 << 20).unwrap();
        let emu =
            Emu::new(EmuDomain::new("faults"), config.namespace(media, BLOCK as u32)).unwrap();
        clock.drive(emu.clone());
        Self { clock, emu }
    }

    fn attach(&self, bus: Arc<dyn Bus>) -> Result<Controller, Error> {
        let options = ControllerOptions {
            command_timeout: Nanos::from_millis(200),
            admin_timeout: Nanos::from_millis(300),
            abort_grace: Nanos::from_millis(20),
            ..Default::default()
        };
        Controller::attach(bus, self.clock.clone(), options)
    }

    /// Does what an owner does, until the first error.
    fn use_it(&self, bus: Arc<dyn Bus>) -> Result<(), Error> {
        let mut ctrl = self.attach(bus)?;
        let namespaces = ctrl.namespaces().to_vec();
        for ns in namespaces.iter().take(3) {
            let block = 1usize << ns.lba_shift;
            let data = pattern(block.saturating_mul(20).min(1 << 20), 1);
            let data = &data[..data.len() / block * block];
            let mut back = vec![0; data.len()];
            let written = ctrl.write(ns.nsid, Lba(0), data, true);
            let read = ctrl.read(ns.nsid, Lba(0), &mut back);
            match (written, read) {
                // PRPs have no length: a false block size moves any number of bytes.
                (Ok(()), Ok(())) if block != BLOCK => {}
                (Ok(()), Ok(())) => assert!(back == data, "not what was written: {ns:?}"),
                (Err(error), _) | (_, Err(error)) => unless_alive(&ctrl, error)?,
            }
            ctrl.flush(ns.nsid).or_else(|error| unless_alive(&ctrl, error))?;
        }
        ctrl.smart_log().map(drop).or_else(|error| unless_alive(&ctrl, error))?;
        ctrl.error_log().map(drop).or_else(|error| unless_alive(&ctrl, error))?;
        ctrl.poll_events()?;
        ctrl.create_queue_pair(0).map(drop).or_else(|error| unless_alive(&ctrl, error))?;
        ctrl.reset()?;
        ctrl.shutdown()
    }

    /// Same as [`Rig::use_it`], with a time limit.
    fn use_it_in_time(&self, bus: Arc<dyn Bus>, context: &str) -> Result<(), Error> {
        let start = self.clock.now();
        let result = self.use_it(bus);
        let took = self.clock.now() - start;
        assert!(took < BOUND, "{} s of virtual time: {context}", took.0 / 1_000_000_000);
        if let Err(error) = &result {
            assert!(error.to_string().contains("emu0"), "does not say which: {error}");
        }
        result
    }
}

/// Ignores an error of a command, but not a failed controller.
fn unless_alive(ctrl: &Controller, error: Error) -> Result<(), Error> {
    if ctrl.state() == State::Ready { Ok(()) } else { Err(error) }
}

/// Callback of a [`HookedBus`] for a register access.
type Hook = Box<dyn FnMut(u32, Option<u32>) -> Result<Option<u32>, Gone> + Send>;

/// A bus that intercepts register accesses. The callback gets the offset and the value read (`None`
/// for a write), and returns the value to replace it.
struct HookedBus {
    bus: Arc<dyn Bus>,
    hook: Mutex<Hook>,
}

impl HookedBus {
    fn bus(
        bus: Arc<dyn Bus>,
        hook: impl FnMut(u32, Option<u32>) -> Result<Option<u32>, Gone> + Send + 'static,
    ) -> Arc<dyn Bus> {
        Arc::new(Self { bus, hook: Mutex::new(Box::new(hook)) })
    }
}

impl std::fmt::Debug for HookedBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HookedBus({:?})", self.bus)
    }
}

impl Bus for HookedBus {
    fn id(&self) -> &str {
        self.bus.id()
    }
    fn read32(&self, offset: u32) -> Result<u32, Gone> {
        let value = self.bus.read32(offset)?;
        Ok((self.hook.lock().unwrap())(offset, Some(value))?.unwrap_or(value))
    }
    fn write32(&self, offset: u32, value: u32) -> Result<(), Gone> {
        (self.hook.lock().unwrap())(offset, None)?;
        self.bus.write32(offset, value)
    }
    fn doorbells(&self) -> DoorbellPage {
        self.bus.doorbells()
    }
    fn dma(&self) -> &Arc<dyn DmaSpace> {
        self.bus.dma()
    }
    fn pci_id(&self) -> Option<(u16, u16)> {
        self.bus.pci_id()
    }
    fn numa_node(&self) -> Option<u32> {
        self.bus.numa_node()
    }
    fn requested(&self) -> bool {
        self.bus.requested()
    }
    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError> {
        self.bus.interrupt(vector)
    }
    fn reset(&self) -> Result<(), ResetError> {
        self.bus.reset()
    }
    fn pcie_error(&self) -> bool {
        self.bus.pcie_error()
    }
}

#[test]
fn a_good_controller_is_used_to_the_end() {
    let rig = Rig::new(EmuConfig::new("emu0"));
    let accesses = Arc::new(Mutex::new(0));
    let count = accesses.clone();
    let bus = HookedBus::bus(rig.emu.bus(), move |_, _| {
        *count.lock().unwrap() += 1;
        Ok(None)
    });
    rig.use_it_in_time(bus, "nothing wrong").unwrap();
    // Otherwise the next test would prove nothing.
    let accesses = *accesses.lock().unwrap();
    assert!((30..400).contains(&accesses), "{accesses} register accesses");
}

#[test]
fn a_controller_may_vanish_at_any_register_access() {
    for at in 1.. {
        // Once as a bus that reports it, once as a function that reads as all ones.
        let mut vanished = false;
        for knows in [true, false] {
            let rig = Rig::new(EmuConfig::new("emu0"));
            let (emu, mut accesses) = (rig.emu.clone(), 0);
            let bus = HookedBus::bus(rig.emu.bus(), move |_, read| {
                accesses += 1;
                match accesses {
                    before if before < at => Ok(None),
                    _ if knows => Err(Gone),
                    _ => {
                        emu.unplug();
                        Ok(read.map(|_| reg::ALL_ONES))
                    }
                }
            });
            let context = format!("gone at access {at}, bus knows: {knows}");
            match rig.use_it_in_time(bus, &context) {
                Ok(()) => {}
                Err(Error::Gone { .. }) => vanished = true,
                // CAP is read in two halves, and all ones in one half is implausible.
                Err(Error::Implausible { .. }) if at <= 3 => vanished = true,
                Err(error) => panic!("{error}: {context}"),
            }
        }
        if !vanished {
            assert!(at > 30, "only {at} accesses");
            break;
        }
    }
}

#[test]
fn any_one_admin_command_may_go_wrong() {
    let status = |status: Status| FaultAction::Status { code: status.0, dnr: true };
    let actions = [
        FaultAction::Drop,
        FaultAction::Delay { ns: 250_000_000 },
        FaultAction::Delay { ns: 5_000_000_000 },
        FaultAction::Duplicate,
        FaultAction::WrongCid,
        FaultAction::WrongPhase,
        FaultAction::WrongSqhd,
        FaultAction::WrongSqid,
        FaultAction::FatalStatus,
        FaultAction::PowerLoss,
        FaultAction::Gone,
        status(Status::INTERNAL_ERROR),
        status(Status::INVALID_FIELD),
        status(Status::NAMESPACE_NOT_READY),
    ];
    for action in actions {
        let mut errors = 0;
        for nth in 1..=24 {
            let when = FaultWhen { admin: Some(true), nth: Some(nth), ..Default::default() };
            let rules = vec![FaultRule::new(when, action)];
            let rig = Rig::new(EmuConfig::new("emu0"));
            rig.emu.set_faults(FaultPlan { seed: nth, rules, ..Default::default() });
            let context = format!("{action:?} of admin command {nth}");
            errors += u32::from(rig.use_it_in_time(rig.emu.bus(), &context).is_err());
            if action == FaultAction::Gone {
                continue;
            }
            rig.emu.set_faults(FaultPlan::default());
            let again = rig.use_it_in_time(rig.emu.bus(), &context);
            again.unwrap_or_else(|error| panic!("{error}: {context}, then well again"));
        }
        // A single fault during setup is tolerated. In use, an untrustworthy controller fails, and
        // its owner decides.
        let fails = matches!(
            action,
            FaultAction::Duplicate
                | FaultAction::WrongCid
                | FaultAction::WrongSqhd
                | FaultAction::WrongSqid
                | FaultAction::FatalStatus
                | FaultAction::Gone
        );
        assert_eq!(errors > 0, fails, "{action:?}: {errors} errors");
    }
}

#[test]
fn waiting_for_ready_ends_with_cap_to() {
    for half_seconds in [1, 4, 60] {
        let given = Nanos::from_millis(half_seconds * 500);
        for (registers, after_enabling) in [
            (RegisterFaults { stuck_rdy: true, ..Default::default() }, false),
            (
                RegisterFaults {
                    rdy_never_clears: true,
                    no_function_reset: true,
                    ..Default::default()
                },
                true,
            ),
        ] {
            let rig = Rig::new(EmuConfig { ready_timeout: given, ..EmuConfig::new("emu0") });
            let ctrl = after_enabling.then(|| rig.attach(rig.emu.bus()).unwrap());
            rig.emu.set_faults(FaultPlan { registers, ..FaultPlan::default() });
            let start = rig.clock.now();
            let error = match ctrl {
                Some(mut ctrl) => ctrl.reset().unwrap_err(),
                None => rig.attach(rig.emu.bus()).unwrap_err(),
            };
            assert!(matches!(error, Error::NotReady { .. }), "{error}");
            let took = rig.clock.now() - start;
            // Three attempts, each of which may wait before and after CC.EN = 0, and the drop.
            let late = Nanos(given.0 * 8);
            assert!((given..late).contains(&took), "{took:?} of {given:?}");
        }
        // A controller just within the limit is accepted.
        let slow_rdy_ns = Some(given.0 - 1_000_000);
        let registers = RegisterFaults { slow_rdy_ns, ..Default::default() };
        let faults = FaultPlan { registers, ..FaultPlan::default() };
        let rig = Rig::new(EmuConfig { ready_timeout: given, faults, ..EmuConfig::new("emu0") });
        rig.attach(rig.emu.bus()).unwrap();
    }
}

/// Returns patches to an identify page: random bytes, or any value in one relevant field.
fn patch() -> impl Strategy<Value = IdentifyPatch> {
    let cns = prop::sample::select(vec![Cns::NAMESPACE.0, Cns::CONTROLLER.0, 2, 3]);
    // Controller: cntlid, ver, oacs, acl, lpa, elpe, mdts, sqes, cqes, nn, oncs, vwc, sgls.
    // Namespace: nsze, ncap, nlbaf, flbas, mc, dps, the first LBA formats.
    let fields = vec![0u16, 8, 25, 26, 27, 29, 77, 78, 80, 128, 130, 132, 136, 256, 258, 262];
    let more = vec![512u16, 513, 516, 520, 525, 526, 536, 539];
    let offset = prop_oneof![
        4 => prop::sample::select([fields, more].concat()),
        1 => 0u16..4096,
    ];
    let byte = prop_oneof![Just(0u8), Just(0xff), Just(0x80), any::<u8>()];
    let bytes = prop_oneof![
        4 => prop::collection::vec(byte.clone(), 1..9),
        1 => prop::collection::vec(byte, 4096),
    ];
    (cns, offset, bytes).prop_map(|(cns, offset, bytes)| IdentifyPatch { cns, offset, bytes })
}

fn cases(number: u32) -> ProptestConfig {
    // The failing case is printed; a seed file would be written to the source tree.
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(number) }
}

proptest! {
    #![proptest_config(cases(400))]

    /// Random identify data: an error, or a controller whose data is right.
    #[test]
    fn any_identify_data_is_an_error_or_usable(
        patches in prop::collection::vec(patch(), 1..5),
        seed in any::<u64>(),
    ) {
        let identify = IdentifyOverrides { patches, ..Default::default() };
        let context = format!("{identify:?}");
        let faults = FaultPlan { seed, identify, ..FaultPlan::default() };
        let rig = Rig::new(EmuConfig { faults, ..EmuConfig::new("emu0") });
        let _ = rig.use_it_in_time(rig.emu.bus(), &context);
        rig.emu.set_faults(FaultPlan::default());
        let again = rig.use_it_in_time(rig.emu.bus(), &context);
        prop_assert!(again.is_ok(), "{again:?}, once it told the truth");
    }

    /// Random capability registers, and a status register that changes at a random time.
    #[test]
    fn any_capabilities_are_an_error_or_usable(
        low in any::<u32>(),
        high in any::<u32>(),
        mask in prop::sample::select(vec![0u32, 0xff, 0xff00, 0xffff, 0xff00_0000, u32::MAX]),
        high_mask in prop::sample::select(vec![0u32, 0xf, 0x1fe0, 0x00ff_0000, u32::MAX]),
        version in prop::option::of(any::<u32>()),
        csts in prop::option::of((1u32..200, any::<u32>())),
    ) {
        let rig = Rig::new(EmuConfig::new("emu0"));
        let mut reads = 0;
        let bus = HookedBus::bus(rig.emu.bus(), move |offset, read| {
            let Some(value) = read else { return Ok(None) };
            reads += 1;
            Ok(match (offset, csts) {
                (reg::CAP, _) => Some(value & !mask | low & mask),
                (4, _) => Some(value & !high_mask | high & high_mask),
                (reg::VS, _) => version,
                (reg::CSTS, Some((at, lie))) if reads >= at && reads < at + 3 => Some(lie),
                _ => None,
            })
        });
        let start = rig.clock.now();
        let _ = rig.use_it(bus);
        // CAP.TO is random as well, up to 127.5 s, for each of a few waits.
        prop_assert!(rig.clock.now() - start < Nanos::from_millis(1_200_000));
        let again = rig.use_it_in_time(rig.emu.bus(), "well again");
        prop_assert!(again.is_ok(), "{again:?}, once it told the truth");
    }
}

/// The driver finds the namespace of these tests.
#[test]
fn the_truth_is_one_namespace() {
    let rig = Rig::new(EmuConfig::new("emu0"));
    let ctrl = rig.attach(rig.emu.bus()).unwrap();
    assert_eq!(ctrl.namespaces().len(), 1);
    assert_eq!((ctrl.namespaces()[0].nsid, ctrl.namespaces()[0].lbas), (Nsid(1), 32 << 10));
}
