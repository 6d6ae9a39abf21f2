//! Address of a PCI function: `0000:65:00.0`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Address of a PCI function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct PciAddress {
    /// Domain (segment). Domains of Intel VMD need more than 16 bits.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, below 32.
    pub device: u8,
    /// Function, below 8.
    pub function: u8,
}

/// Error for a text that is not the address of a PCI function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not the address of a PCI function: {why}; expected something like 0000:65:00.0 \
     or 65:00.0 (hexadecimal, as lspci -D prints it)"
)]
pub struct AddressError {
    /// The text.
    pub text: String,
    /// The reason.
    pub why: &'static str,
}

impl FromStr for PciAddress {
    type Err = AddressError;

    /// Parses `domain:bus:device.function` or, in domain 0, `bus:device.function`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|why| AddressError { text: text.to_owned(), why })
    }
}

fn parse(text: &str) -> Result<PciAddress, &'static str> {
    let (rest, function) = text.rsplit_once('.').ok_or("there is no function after a dot")?;
    let (rest, device) = rest.rsplit_once(':').ok_or("there is no bus before a colon")?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    Ok(PciAddress {
        domain: hex(domain, 8, u32::MAX, "the domain is not up to 8 hexadecimal digits")?,
        bus: hex(bus, 2, 0xFF, "the bus is not up to 2 hexadecimal digits")? as u8,
        device: hex(device, 2, 0x1F, "the device is not a hexadecimal number up to 1f")? as u8,
        function: hex(function, 1, 7, "the function is not a digit up to 7")? as u8,
    })
}

/// Parses a number of at most `digits` digits, at most `max`. Refuses a sign, which
/// `from_str_radix` would accept.
fn hex(text: &str, digits: usize, max: u32, why: &'static str) -> Result<u32, &'static str> {
    if text.len() > digits || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(why);
    }
    u32::from_str_radix(text, 16).ok().filter(|value| *value <= max).ok_or(why)
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for PciAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests;
