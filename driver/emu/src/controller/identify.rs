//! Identify (Base, "Identify command"; NVM, "Identify Namespace").

use nvme_spec::{
    admin::{Cns, Identify},
    identify::{
        ActiveNamespaces, Ctratt, IdentifyController, IdentifyNamespace, LbaFormat, Oacs, Oncs,
        Sgls, Vwc,
    },
    sqe::Sqe,
    status::Status,
};
use zerocopy::IntoBytes;

use super::{namespace::LBA_SHIFTS, registers::VERSION, storage::Storage, transfer::Rules};
use crate::{config::EmuConfig, fault::IdentifyOverrides};

/// Bytes of every identify structure.
pub(super) const PAGE: usize = 4096;
/// Limit of outstanding Asynchronous Event Requests, zero-based (AERL).
pub(super) const AERL_Z: u8 = 3;
/// Limit of outstanding Abort commands, zero-based (ACL).
pub(super) const ACL_Z: u8 = 3;
/// Entries of the error log, zero-based (ELPE).
pub(super) const ELPE_Z: u8 = 63;
/// Warning temperature in kelvins (WCTEMP).
pub(super) const WCTEMP: u16 = 343;
/// Optional asynchronous events: namespace attribute notices.
pub(super) const OAES: u32 = 1 << 8;

/// RTD3 Entry Latency, a host's time limit for a shutdown: the shutdown flushes to the disk of this
/// machine, which may be busy with other work.
const RTD3E_US: u32 = 60_000_000;

/// Constant identify data of the controller.
#[derive(Debug)]
pub(super) struct Identity {
    id: String,
    serial: [u8; 20],
    model: [u8; 40],
    firmware: [u8; 8],
    mdts: u8,
    /// Set if there is a volatile write cache.
    vwc: bool,
    /// Hash of the serial number, for identifiers.
    unique: u64,
}

/// Pads ASCII text with spaces.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    let len = text.len().min(N);
    field[..len].copy_from_slice(&text.as_bytes()[..len]);
    field
}

impl Identity {
    pub(super) fn new(config: &EmuConfig) -> Self {
        // FNV-1a: it only has to give different serial numbers different identifiers.
        let unique = config.serial.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        Self {
            id: config.id.clone(),
            serial: padded(&config.serial),
            model: padded(&config.model),
            firmware: padded(&config.firmware),
            mdts: config.mdts_bytes.map_or(0, |bytes| (bytes / 4096).trailing_zeros() as u8),
            vwc: config.vwc,
            unique,
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn firmware(&self) -> [u8; 8] {
        self.firmware
    }

    fn nguid(&self, nsid: u32) -> [u8; 16] {
        let mut nguid = [0; 16];
        nguid[..8].copy_from_slice(&self.unique.to_be_bytes());
        nguid[12..].copy_from_slice(&nsid.to_be_bytes());
        nguid
    }

    fn eui64(&self, nsid: u32) -> [u8; 8] {
        (self.unique ^ u64::from(nsid)).to_be_bytes()
    }

    /// Returns the data that an Identify asks for, as the `faults` change it.
    pub(super) fn page(
        &self,
        sqe: &Sqe,
        storage: &Storage,
        rules: &Rules,
        faults: &IdentifyOverrides,
    ) -> Result<[u8; PAGE], Status> {
        let command = Identify::from_sqe(sqe);
        let mut page = match command.cns {
            Cns::NAMESPACE => self.namespace(sqe.nsid, storage, faults)?,
            Cns::CONTROLLER => self.controller(storage, rules, faults),
            Cns::ACTIVE_NAMESPACES => active_namespaces(sqe.nsid, storage)?,
            // No limits by default; faults may patch some in.
            Cns::COMMAND_SET_CONTROLLER if command.csi == 0 => [0; PAGE],
            // Neither protection information nor other extended formats.
            Cns::COMMAND_SET_NAMESPACE if command.csi == 0 => {
                storage.active(sqe.nsid).map(|_| [0; PAGE])?
            }
            Cns::INDEPENDENT_NAMESPACE => independent(sqe.nsid, storage)?,
            Cns::NAMESPACE_DESCRIPTORS => self.descriptors(sqe.nsid, storage)?,
            _ => return Err(Status::INVALID_FIELD),
        };
        faults.patch(command.cns.0, &mut page);
        Ok(page)
    }

    fn controller(
        &self,
        storage: &Storage,
        rules: &Rules,
        faults: &IdentifyOverrides,
    ) -> [u8; PAGE] {
        let vwc = if self.vwc { Vwc::PRESENT } else { Vwc::empty() };
        let attributes = match storage.placement {
            Some(_) => Ctratt::ENDURANCE_GROUPS | Ctratt::FLEXIBLE_DATA_PLACEMENT,
            None => Ctratt::empty(),
        };
        let optional = Oncs::DATASET_MANAGEMENT | Oncs::WRITE_ZEROES | Oncs::FEATURE_SAVE;
        let mut data = IdentifyController {
            vid: 0x1af4,
            ssvid: 0x1af4,
            sn: self.serial,
            mn: self.model,
            fr: self.firmware,
            rab: 3,
            ieee: [0x00, 0x54, 0x52],
            mdts: faults.mdts.unwrap_or(self.mdts),
            ver: VERSION.0,
            rtd3e: RTD3E_US,
            oaes: OAES,
            ctratt: attributes.bits(),
            endgidmax: storage.endurance_group(),
            cntrltype: 1,
            oacs: Oacs::FORMAT.bits(),
            acl_z: ACL_Z,
            aerl_z: AERL_Z,
            // One firmware slot, read-only; log pages: effects, extended data, supported pages.
            frmw: 0b0000_0011,
            lpa: 1 << 1 | 1 << 2 | 1 << 5,
            elpe_z: ELPE_Z,
            wctemp: WCTEMP,
            cctemp: WCTEMP + 15,
            apsta: faults.apst.into(),
            sanicap: faults.sanitize.is_some().into(),
            sqes: faults.sqes.unwrap_or(0x66),
            cqes: 0x44,
            nn: storage.namespaces.len() as u32,
            oncs: optional.bits(),
            vwc: (vwc | Vwc::FLUSH_ALL | Vwc::FLUSH_ALL_KNOWN).bits(),
            awun_z: 0,
            awupf_z: 0,
            sgls: faults.sgls.map_or(rules.sgls(), Sgls),
            ..IdentifyController::default()
        };
        let serial = std::str::from_utf8(&self.serial).unwrap_or("").trim();
        let nqn = format!("nqn.2024-01.io.ripieno:nvme-emu:{serial}");
        data.subnqn[..nqn.len()].copy_from_slice(nqn.as_bytes());
        data.psd[0][..2].copy_from_slice(&2500u16.to_le_bytes());
        copy(data.as_bytes())
    }

    fn namespace(
        &self,
        nsid: u32,
        storage: &Storage,
        faults: &IdentifyOverrides,
    ) -> Result<[u8; PAGE], Status> {
        // Without Namespace Management there is no common data to report for FFFFFFFFh, and
        // identifiers above NN are invalid.
        let namespace = storage.active(nsid)?;
        let lbas = faults.nsze.unwrap_or(namespace.lbas);
        let index = LBA_SHIFTS.iter().position(|shift| *shift == namespace.lba_shift);
        // Preferred Deallocate Granularity and Alignment, zero-based. Writes have no preference.
        let advice = namespace.deallocate_bytes.map(|bytes| (bytes >> namespace.lba_shift) - 1);
        let advice_z = advice.unwrap_or(0) as u16;
        let mut data = IdentifyNamespace {
            nsfeat: if advice.is_some() { IdentifyNamespace::OPTPERF } else { 0 },
            npdg_z: advice_z,
            npda_z: advice_z,
            endgid: storage.endurance_group(),
            nsze: lbas,
            ncap: lbas,
            nuse: lbas,
            nlbaf_z: LBA_SHIFTS.len() as u8 - 1,
            flbas: index.unwrap_or(0) as u8,
            // Deallocated blocks read as zeroes; Write Zeroes may deallocate.
            dlfeat: 0b1001,
            nvmcap: u128::from(namespace.bytes()).to_le_bytes(),
            nguid: self.nguid(nsid),
            eui64: self.eui64(nsid),
            ..IdentifyNamespace::default()
        };
        for (format, shift) in data.lbaf.iter_mut().zip(LBA_SHIFTS) {
            // Size 0 marks an unavailable format.
            let lbads = if namespace.can_format(shift) { shift } else { 0 };
            *format = LbaFormat::new(faults.lbads.unwrap_or(lbads), 0);
        }
        Ok(copy(data.as_bytes()))
    }

    fn descriptors(&self, nsid: u32, storage: &Storage) -> Result<[u8; PAGE], Status> {
        storage.active(nsid)?;
        let mut page = [0; PAGE];
        let mut at = 0;
        // "Namespace Identification Descriptor": type, length, two reserved bytes, identifier.
        let mut put = |kind: u8, id: &[u8]| {
            page[at..at + 2].copy_from_slice(&[kind, id.len() as u8]);
            page[at + 4..at + 4 + id.len()].copy_from_slice(id);
            at += 4 + id.len();
        };
        put(1, &self.eui64(nsid));
        put(2, &self.nguid(nsid));
        put(4, &[0]);
        Ok(page)
    }
}

fn active_namespaces(above: u32, storage: &Storage) -> Result<[u8; PAGE], Status> {
    // "Active Namespace ID list": no identifier can follow these two.
    if above >= 0xffff_fffe {
        return Err(Status::INVALID_NAMESPACE);
    }
    let mut list = ActiveNamespaces::default();
    let last = storage.first - 1 + storage.namespaces.len() as u32;
    let nsids = storage.first.max(above + 1)..=last;
    for (place, nsid) in list.nsids.iter_mut().zip(nsids) {
        *place = nsid;
    }
    Ok(copy(list.as_bytes()))
}

/// "I/O Command Set Independent Identify Namespace", which NVMe 2.0 requires: the endurance group,
/// and that it is ready.
fn independent(nsid: u32, storage: &Storage) -> Result<[u8; PAGE], Status> {
    storage.active(nsid)?;
    let mut page = [0; PAGE];
    page[12..14].copy_from_slice(&storage.endurance_group().to_le_bytes());
    page[14] = 1;
    Ok(page)
}

fn copy(bytes: &[u8]) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    page.copy_from_slice(bytes);
    page
}
