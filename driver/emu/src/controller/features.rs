//! Features (Base, "Get Features command", "Set Features command").

use nvme_spec::{
    admin::{
        FdpMode, FeatureCapabilities, FeatureId, FeatureSelect, GetFeatures, NumberOfQueues,
        SetFeatures,
    },
    ids::Nsid,
    sqe::Sqe,
    status::Status,
};

use super::{
    identify::{OAES, WCTEMP},
    placement::ENDURANCE_GROUP,
};
use crate::config::EmuConfig;

/// Composite temperature of the device, in kelvins. Constant; only thresholds change.
pub(super) const TEMPERATURE: u16 = 310;
/// Asynchronous Event Configuration: SMART critical warnings.
const SMART_WARNINGS: u32 = 0xff;
/// Event configuration bit of the SMART temperature warning.
const TEMPERATURE_WARNING: u32 = 1 << 1;
/// Interrupt Vector Configuration: coalescing disabled.
const COALESCING_DISABLED: u32 = 1 << 16;

/// A value with its default and its saved value.
#[derive(Debug, Clone, Copy)]
struct Value {
    default: u32,
    saved: Option<u32>,
    current: u32,
}

impl Value {
    fn new(default: u32) -> Self {
        Self { default, saved: None, current: default }
    }

    fn reset(&mut self) {
        self.current = self.saved.unwrap_or(self.default);
    }
}

/// Attributes of a feature.
#[derive(Debug, Clone, Copy)]
struct Traits {
    /// Bits in use.
    mask: u32,
    saveable: bool,
    changeable: bool,
    /// Set if the feature is per namespace.
    namespace: bool,
}

/// Values of all features.
#[derive(Debug)]
pub(super) struct Features {
    arbitration: Value,
    power: Value,
    over_temperature: Value,
    under_temperature: Value,
    error_recovery: Value,
    write_cache: Value,
    queues: Value,
    coalescing: Value,
    /// One value per vector.
    vectors: Vec<Value>,
    write_atomicity: Value,
    events: Value,
    /// `None` for a drive without them.
    power_transitions: Option<Value>,
    placement: Value,
    queues_max: u16,
    has_write_cache: bool,
    has_placement: bool,
}

impl Features {
    pub(super) fn new(config: &EmuConfig) -> Self {
        let last = config.io_queues_max - 1;
        let vector = |index| Value::new(if index == 0 { COALESCING_DISABLED } else { 0 });
        Self {
            // 8 commands per queue and turn, as RAB recommends.
            arbitration: Value::new(3),
            power: Value::new(0),
            over_temperature: Value::new(WCTEMP.into()),
            under_temperature: Value::new(0),
            error_recovery: Value::new(0),
            write_cache: Value::new(1),
            queues: Value::new(NumberOfQueues { nsq_z: last, ncq_z: last }.to_dword()),
            coalescing: Value::new(0),
            vectors: (0..config.vectors).map(vector).collect(),
            write_atomicity: Value::new(0),
            events: Value::new(0),
            power_transitions: config.faults.identify.apst.then(|| Value::new(1)),
            // Configuration 0, enabled.
            placement: Value::new(FdpMode { enabled: true, configuration: 0 }.to_dword()),
            queues_max: config.io_queues_max,
            has_write_cache: config.vwc,
            has_placement: config.placement.is_some(),
        }
    }

    /// Returns the number of commands to fetch from a queue per turn.
    pub(super) fn burst(&self) -> u32 {
        match self.arbitration.current & 7 {
            7 => u32::MAX,
            log2 => 1 << log2,
        }
    }

    pub(super) fn submission_queues(&self) -> u16 {
        NumberOfQueues::from_dword(self.queues.current).nsq_z + 1
    }

    pub(super) fn completion_queues(&self) -> u16 {
        NumberOfQueues::from_dword(self.queues.current).ncq_z + 1
    }

    pub(super) fn wants_temperature_events(&self) -> bool {
        self.events.current & TEMPERATURE_WARNING != 0
    }

    pub(super) fn wants_namespace_notices(&self) -> bool {
        self.events.current & OAES != 0
    }

    /// Returns whether the temperature is outside its thresholds.
    pub(super) fn temperature_alarm(&self) -> bool {
        let temperature = u32::from(TEMPERATURE);
        temperature >= self.over_temperature.current
            || temperature <= self.under_temperature.current
    }

    /// Resets all values: to the saved ones, else to the defaults.
    pub(super) fn reset(&mut self) {
        let values = [
            &mut self.arbitration,
            &mut self.power,
            &mut self.over_temperature,
            &mut self.under_temperature,
            &mut self.error_recovery,
            &mut self.write_cache,
            &mut self.queues,
            &mut self.coalescing,
            &mut self.write_atomicity,
            &mut self.events,
        ];
        let others = self.vectors.iter_mut().chain(&mut self.power_transitions);
        values.into_iter().chain(others).for_each(Value::reset);
    }

    fn traits(&self, fid: FeatureId) -> Result<Traits, Status> {
        let fixed = Traits { mask: !0, saveable: false, changeable: true, namespace: false };
        Ok(match fid {
            FeatureId::ARBITRATION => Traits { mask: 0xffff_ff07, saveable: true, ..fixed },
            // There is one power state, and it is active.
            FeatureId::POWER_MANAGEMENT => Traits { mask: 0x1f, ..fixed },
            FeatureId::TEMPERATURE_THRESHOLD => Traits { mask: 0xffff, saveable: true, ..fixed },
            FeatureId::ERROR_RECOVERY => Traits { mask: 0xffff, namespace: true, ..fixed },
            FeatureId::VOLATILE_WRITE_CACHE if self.has_write_cache => {
                Traits { mask: 1, saveable: true, ..fixed }
            }
            FeatureId::NUMBER_OF_QUEUES => fixed,
            FeatureId::INTERRUPT_COALESCING => Traits { mask: 0xffff, saveable: true, ..fixed },
            FeatureId::INTERRUPT_VECTOR_CONFIG => Traits { mask: COALESCING_DISABLED, ..fixed },
            FeatureId::WRITE_ATOMICITY => Traits { mask: 1, ..fixed },
            FeatureId::ASYNC_EVENT_CONFIG => Traits { mask: SMART_WARNINGS | OAES, ..fixed },
            FeatureId::AUTONOMOUS_POWER_STATE_TRANSITION if self.power_transitions.is_some() => {
                Traits { mask: 1, saveable: true, ..fixed }
            }
            FeatureId::FLEXIBLE_DATA_PLACEMENT if self.has_placement => fixed,
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    /// Returns the value that `dword` (CDW11) selects.
    fn value(&mut self, fid: FeatureId, dword: u32) -> Result<&mut Value, Status> {
        Ok(match fid {
            FeatureId::ARBITRATION => &mut self.arbitration,
            FeatureId::POWER_MANAGEMENT => &mut self.power,
            FeatureId::TEMPERATURE_THRESHOLD => match (dword >> 16 & 0xf, dword >> 20 & 3) {
                // TMPSEL: the composite temperature is the only sensor; Fh selects all.
                (0 | 0xf, 0) => &mut self.over_temperature,
                (0 | 0xf, 1) => &mut self.under_temperature,
                _ => return Err(Status::INVALID_FIELD),
            },
            FeatureId::ERROR_RECOVERY => &mut self.error_recovery,
            FeatureId::VOLATILE_WRITE_CACHE => &mut self.write_cache,
            FeatureId::NUMBER_OF_QUEUES => &mut self.queues,
            FeatureId::INTERRUPT_COALESCING => &mut self.coalescing,
            FeatureId::INTERRUPT_VECTOR_CONFIG => {
                let vector = dword as u16;
                self.vectors.get_mut(usize::from(vector)).ok_or(Status::INVALID_FIELD)?
            }
            FeatureId::WRITE_ATOMICITY => &mut self.write_atomicity,
            FeatureId::ASYNC_EVENT_CONFIG => &mut self.events,
            FeatureId::AUTONOMOUS_POWER_STATE_TRANSITION => {
                self.power_transitions.as_mut().ok_or(Status::INVALID_FIELD)?
            }
            FeatureId::FLEXIBLE_DATA_PLACEMENT if dword as u16 == ENDURANCE_GROUP => {
                &mut self.placement
            }
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    /// Returns the number of queues granted for a request.
    fn grant(&self, dword: u32) -> Result<u32, Status> {
        let NumberOfQueues { nsq_z, ncq_z } = NumberOfQueues::from_dword(dword);
        // "Number of Queues": 65,535 is an invalid value for these zero-based fields.
        if nsq_z == u16::MAX || ncq_z == u16::MAX {
            return Err(Status::INVALID_FIELD);
        }
        let last = self.queues_max - 1;
        Ok(NumberOfQueues { nsq_z: nsq_z.min(last), ncq_z: ncq_z.min(last) }.to_dword())
    }

    /// Executes a Get Features of a controller with `namespaces`. Returns completion dword 0.
    pub(super) fn get(&mut self, sqe: &Sqe, namespaces: usize) -> Result<u32, Status> {
        let GetFeatures { fid, select } = GetFeatures::from_sqe(sqe);
        let traits = self.traits(fid)?;
        // "Get Features command": the broadcast identifier is invalid for a per-namespace value.
        if traits.namespace && !exists(sqe.nsid, namespaces) {
            return Err(Status::INVALID_NAMESPACE);
        }
        let value = *self.value(fid, sqe.cdw11)?;
        Ok(match select {
            FeatureSelect::CURRENT => value.current,
            FeatureSelect::DEFAULT => value.default,
            // "Select": without a saved value, a reset restores the default.
            FeatureSelect::SAVED => value.saved.unwrap_or(value.default),
            FeatureSelect::SUPPORTED => FeatureCapabilities {
                saveable: traits.saveable,
                namespace_specific: traits.namespace,
                changeable: traits.changeable,
            }
            .to_dword(),
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    /// Executes a Set Features of a controller with `namespaces`; `queues` is set if it has I/O
    /// queues. Returns completion dword 0.
    pub(super) fn set(
        &mut self,
        sqe: &Sqe,
        namespaces: usize,
        queues: bool,
    ) -> Result<u32, Status> {
        let SetFeatures { fid, save, value } = SetFeatures::from_sqe(sqe);
        let traits = self.traits(fid)?;
        if save && !traits.saveable {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        let everywhere = sqe.nsid == 0 || sqe.nsid() == Nsid::ALL;
        if !everywhere && !traits.namespace {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
        }
        if traits.namespace && sqe.nsid() != Nsid::ALL && !exists(sqe.nsid, namespaces) {
            return Err(Status::INVALID_NAMESPACE);
        }
        let mut dw0 = 0;
        let mut new = value & traits.mask;
        match fid {
            // "Number of Queues": only before the first I/O queue is created.
            FeatureId::NUMBER_OF_QUEUES if queues => return Err(Status::COMMAND_SEQUENCE_ERROR),
            FeatureId::NUMBER_OF_QUEUES => {
                new = self.grant(value)?;
                dw0 = new;
            }
            // "Flexible Data Placement": only while the endurance group has no namespaces.
            FeatureId::FLEXIBLE_DATA_PLACEMENT => return Err(Status::COMMAND_SEQUENCE_ERROR),
            FeatureId::POWER_MANAGEMENT if new != 0 => return Err(Status::INVALID_FIELD),
            // DULBE (bit 16) needs NSFEAT bit 2.
            FeatureId::ERROR_RECOVERY if value & 1 << 16 != 0 => {
                return Err(Status::INVALID_FIELD);
            }
            _ => {}
        }
        let slot = self.value(fid, value)?;
        slot.current = new;
        if save {
            slot.saved = Some(new);
        }
        Ok(dw0)
    }

    /// Returns whether a write completes only when it is durable: there is no enabled volatile
    /// cache.
    #[inline]
    pub(super) fn write_through(&self) -> bool {
        !self.has_write_cache || self.write_cache.current & 1 == 0
    }
}

fn exists(nsid: u32, namespaces: usize) -> bool {
    (1..=namespaces as u64).contains(&u64::from(nsid))
}
