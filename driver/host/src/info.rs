//! Validated properties of a controller.

use nvme_spec::{
    identify::{
        Ctratt, IdentifyController, IdentifyNvmController, Oacs, Oncs, SglSupport, Sgls, Vwc,
    },
    reg::{Cap, Crto, Version},
};

use crate::{
    cid::DEPTH_MAX, clock::Nanos, grant::DescriptorMode, options::DescriptorPreference,
    remark::Remark,
};

/// Controller properties from the registers (CAP, VS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The CAP register.
    pub cap: Cap,
    /// NVMe version.
    pub version: Version,
    /// Largest queue depth (MQES + 1), cut to the limit of CIDs with a generation.
    pub entries_max: u32,
    /// Memory page size in use (CC.MPS) in bytes.
    pub page_bytes: u32,
    /// Time limit for CSTS.RDY to follow CC.EN (CAP.TO, CRTO.CRWMT).
    pub ready_timeout: Nanos,
}

impl Capabilities {
    /// Validates the registers.
    ///
    /// # Errors
    /// Returns a sentence that names the implausible or unsupported value.
    pub fn check(cap: Cap, crto: Crto, version: Version, stride: u32) -> Result<Self, String> {
        if cap.mqes_z() == 0 {
            let why = "CAP.MQES is 0, queues have at least 2 entries; a virtual function (SR-IOV) \
                       whose secondary controller is offline answers so: nvme virt-mgmt with \
                       action 9 on its parent";
            return Err(why.into());
        }
        if cap.css() & 1 == 0 {
            return Err(format!("CAP.CSS is {:#x}: it has no NVM command set", cap.css()));
        }
        if cap.mpsmin() > cap.mpsmax() {
            let (min, max) = (cap.mpsmin(), cap.mpsmax());
            return Err(format!("CAP.MPSMIN {min} is larger than CAP.MPSMAX {max}"));
        }
        if cap.mpsmin() > 4 {
            let bytes = 4096u64 << cap.mpsmin();
            return Err(format!("its smallest memory page is {bytes} bytes; 64 KiB is supported"));
        }
        if stride != 4 << cap.dstrd() {
            let said = 4u32 << cap.dstrd();
            return Err(format!(
                "CAP.DSTRD means doorbells {said} bytes apart, the bus maps them {stride} apart"
            ));
        }
        // Both are in units of 500 ms. CRTO overrides CAP.TO if it exceeds that field's range; a
        // timeout of 0 would leave no time at all.
        let units = u64::from(cap.to_500ms().max(1)).max(crto.crwmt_500ms().into());
        let ready_timeout = Nanos::from_millis(units * 500);
        Ok(Self {
            cap,
            version,
            entries_max: (u32::from(cap.mqes_z()) + 1).min(DEPTH_MAX),
            page_bytes: 4096 << cap.mpsmin(),
            ready_timeout,
        })
    }
}

/// Properties of a controller from Identify and the registers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerInfo {
    /// PCI vendor.
    pub vendor: u16,
    /// Model number.
    pub model: String,
    /// Serial number.
    pub serial: String,
    /// Firmware revision.
    pub firmware: String,
    /// Qualified name of its NVM subsystem; empty if it reports none.
    pub subsystem: String,
    /// Set if the subsystem may have other controllers (CMIC).
    pub may_have_peers: bool,
    /// NVMe version.
    pub version: Version,
    /// Largest data transfer of one command in bytes; `None` = no limit.
    pub mdts_bytes: Option<u64>,
    /// SGL support.
    pub sgls: Sgls,
    /// Format of data pointers that this driver uses for it.
    pub descriptor_mode: DescriptorMode,
    /// Set if a volatile write cache is present: writes need a flush or FUA to be durable.
    pub vwc: bool,
    /// Attributes (CTRATT).
    pub attributes: Ctratt,
    /// Optional NVM commands.
    pub nvm_commands: Oncs,
    /// Optional admin commands.
    pub admin_commands: Oacs,
    /// Largest queue depth.
    pub entries_max: u32,
    /// Memory page size in bytes.
    pub page_bytes: u32,
    /// Queue pairs that can be created and granted.
    pub io_queues: u16,
    /// Largest namespace identifier.
    pub nn: u32,
    /// Limit of outstanding asynchronous event requests.
    pub event_limit: u16,
    /// Optional asynchronous events (OAES).
    pub oaes: u32,
    /// Command Retry Delay Times 1 to 3, in units of 100 ms; 0 = none.
    pub crdt: [u16; 3],
    /// Largest Write Zeroes of one command in bytes (WZSL, or MDTS); `None` = no limit.
    pub write_zeroes_bytes: Option<u64>,
    /// Limits of Dataset Management.
    pub dsm: DsmLimits,
    /// Number of entries in the error log.
    pub error_log_entries: u16,
    /// Longest pause (CSTS.PP) that does not count against deadlines: MTFA, or a minute.
    pub pause_max: Nanos,
    /// Time limit of a shutdown, clamped to a sensible range.
    pub shutdown_timeout: Nanos,
    /// Set if it has sanitize operations (SANICAP).
    pub can_sanitize: bool,
    /// Set if it has autonomous power state transitions (APSTA).
    pub has_power_transitions: bool,
    /// Preferred size of a host memory buffer in bytes (HMPRE); 0 = none.
    pub host_memory_bytes: u64,
    /// Remarks for its owner.
    pub remarks: Vec<Remark>,
}

/// Limits of one Dataset Management command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DsmLimits {
    /// Number of ranges (DMRL), at most 256.
    pub ranges: usize,
    /// Number of LBAs per range (DMRSL).
    pub range_lbas: u32,
    /// Total number of LBAs (DMSL).
    pub lbas: u64,
}

/// Larger MDTS values exceed 65,536 LBAs of 64 KiB.
const MDTS_MAX: u8 = 20;

impl ControllerInfo {
    /// Validates Identify Controller data. `io_queues` is filled in later.
    ///
    /// # Errors
    /// Returns a sentence that names the implausible or unsupported value.
    pub fn check(
        data: &IdentifyController,
        caps: &Capabilities,
        preference: DescriptorPreference,
    ) -> Result<Self, String> {
        entry_size("submission", data.sqes, 6)?;
        entry_size("completion", data.cqes, 4)?;
        if data.mdts > MDTS_MAX {
            return Err(format!(
                "MDTS {} (2^MDTS pages); at most {MDTS_MAX} makes sense",
                data.mdts
            ));
        }
        if data.cntrltype > 1 {
            let kind = data.cntrltype;
            return Err(format!("controller type {kind}: it is not an I/O controller"));
        }
        let page_min = 4096u64 << caps.cap.mpsmin();
        // RTD3E of 0 means "not reported".
        let shutdown_ms = match u64::from(data.rtd3e) / 1000 {
            0 => 10_000,
            ms => ms.clamp(10_000, 60_000),
        };
        let pause_ms = match u64::from(data.mtfa) * 100 {
            0 => 60_000,
            ms => ms,
        };
        let mdts_bytes = (data.mdts != 0).then(|| page_min << data.mdts);
        Ok(Self {
            vendor: data.vid,
            model: data.model().to_owned(),
            serial: data.serial().to_owned(),
            firmware: data.firmware().to_owned(),
            subsystem: data.subsystem().to_owned(),
            may_have_peers: data.may_have_peers(),
            version: caps.version,
            mdts_bytes,
            sgls: data.sgls,
            descriptor_mode: descriptor_mode(data.sgls, caps.page_bytes, preference)?,
            vwc: data.write_cache().contains(Vwc::PRESENT),
            attributes: data.attributes(),
            nvm_commands: data.nvm_commands(),
            admin_commands: data.admin_commands(),
            entries_max: caps.entries_max,
            page_bytes: caps.page_bytes,
            io_queues: 0,
            nn: data.nn,
            event_limit: u16::from(data.aerl_z) + 1,
            oaes: data.oaes,
            crdt: data.crdt,
            // MDTS does not apply to commands without data, but controllers without a separate
            // limit have been seen to apply it.
            write_zeroes_bytes: mdts_bytes,
            dsm: DsmLimits { ranges: 256, range_lbas: u32::MAX, lbas: u64::MAX },
            error_log_entries: u16::from(data.elpe_z) + 1,
            pause_max: Nanos::from_millis(pause_ms),
            shutdown_timeout: Nanos::from_millis(shutdown_ms),
            can_sanitize: data.sanicap & 7 != 0,
            has_power_transitions: data.apsta & 1 != 0,
            host_memory_bytes: u64::from(data.hmpre) << 12,
            remarks: Vec::new(),
        })
    }
}

impl ControllerInfo {
    /// Applies the limits of individual commands (Identify CNS 06h); 0 means none.
    pub(crate) fn limit(&mut self, data: &IdentifyNvmController, caps: &Capabilities) {
        let page_min = 4096u64 << caps.cap.mpsmin();
        // More than 2^32 pages is no limit: the LBAs of a command are counted in 16 bits.
        let wzsl = u32::from(data.wzsl);
        self.write_zeroes_bytes = (1..=32).contains(&wzsl).then(|| page_min << wzsl);
        let or = |value: u64, none: u64| if value == 0 { none } else { value };
        self.dsm = DsmLimits {
            ranges: or(data.dmrl.into(), 256) as usize,
            range_lbas: or(data.dmrsl.into(), u32::MAX.into()) as u32,
            lbas: or(data.dmsl, u64::MAX),
        };
    }
}

fn entry_size(queue: &str, field: u8, log2: u8) -> Result<(), String> {
    let (required, maximum) = (field & 0xF, field >> 4);
    if required > log2 || maximum < log2 {
        return Err(format!(
            "{queue} queue entries of 2^{required} to 2^{maximum} bytes; 2^{log2} is the standard"
        ));
    }
    Ok(())
}

fn descriptor_mode(
    sgls: Sgls,
    page_bytes: u32,
    preference: DescriptorPreference,
) -> Result<DescriptorMode, String> {
    let prp = DescriptorMode::Prp { page_bytes };
    let granularity = match sgls.support() {
        SglSupport::BYTE => Some(1),
        SglSupport::DWORD => Some(4),
        _ => None,
    };
    let sgl = granularity
        .map(|granularity| DescriptorMode::Sgl { bit_bucket: sgls.bit_bucket(), granularity });
    match preference {
        DescriptorPreference::Prp => Ok(prp),
        DescriptorPreference::Auto => Ok(sgl.unwrap_or(prp)),
        DescriptorPreference::Sgl => sgl.ok_or_else(|| {
            format!("SGLS {:#x}: it has no SGLs, which were asked for; use Auto or Prp", sgls.0)
        }),
    }
}

#[cfg(test)]
mod tests;
