//! Validation of explicit contexts before submission.

use nvme_driver::DescriptorMode;

use crate::{abi::IoCtx, error::Error, queues::Device};

/// Checks every context; returns the length in bytes of the longest.
pub(crate) fn check(contexts: &[IoCtx], devices: &[Device]) -> Result<u32, Error> {
    let mut bytes_max = 0;
    for (index, context) in contexts.iter().enumerate() {
        let wrong = |problem| Err(Error::Argument(format!("I/O context {index}: {problem}")));
        let IoCtx { iova, lba, bytes, device } = *context;
        let Some(facts) = devices.get(device as usize) else {
            return wrong(format!(
                "device {device} was named; the ring has {} devices, numbered from 0",
                devices.len()
            ));
        };
        let lba_bytes = 1u32 << facts.lba_shift;
        if bytes == 0 || !bytes.is_multiple_of(lba_bytes) {
            return wrong(format!(
                "{bytes} bytes were asked for; device {device} has LBAs of {lba_bytes} bytes, ask \
                 for one or more whole ones"
            ));
        }
        let lbas = u64::from(bytes >> facts.lba_shift);
        if lba.checked_add(lbas).is_none_or(|end| end > facts.lbas) {
            return wrong(format!(
                "{lbas} LBAs from {lba} on were asked for; device {device} has {}",
                facts.lbas
            ));
        }
        let unit = match facts.mode {
            DescriptorMode::Sgl { granularity, .. } => granularity,
            // A PRP entry is a multiple of four bytes.
            DescriptorMode::Prp { .. } => 4,
        };
        if !iova.is_multiple_of(u64::from(unit)) || iova.checked_add(bytes.into()).is_none() {
            return wrong(format!(
                "its memory is at IOVA {iova:#x}; device {device} needs a multiple of {unit} that \
                 does not wrap around"
            ));
        }
        bytes_max = bytes_max.max(bytes);
    }
    Ok(bytes_max)
}
