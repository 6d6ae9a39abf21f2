//! Checks that devices make up a rank of a store.

use super::{DeviceIdentity, FormatError, OnDevice, State, StoreId, Superblock};
use crate::{layout::Region, shape::KvShape};

/// A device and its contents.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its name, for error messages.
    pub name: String,
    /// Its identity.
    pub identity: DeviceIdentity,
    /// The region that was given.
    pub region: Region,
    /// The result of [`Superblock::read`].
    pub found: OnDevice,
}

/// Expected properties of the devices.
#[derive(Debug, Clone, Copy, Default)]
pub struct Expected {
    /// The store; any if `None`.
    pub store: Option<StoreId>,
    /// The rank.
    pub rank: u32,
    /// The shape of a KV block on this rank; any if `None`.
    pub shape: Option<KvShape>,
}

/// Returns the superblocks of `members` if they are all devices of one rank of one store, in order,
/// and unchanged since formatting. Does no I/O.
///
/// # Errors
/// Returns [`FormatError`], which names the wrong device and gives advice.
pub fn check_set(members: &[Member], expected: &Expected) -> Result<Vec<Superblock>, FormatError> {
    if members.is_empty() {
        return Err(FormatError::Devices { devices: 0 });
    }
    for member in members {
        match &member.found {
            OnDevice::Ours(superblock) if superblock.state == State::Formatting => {
                return Err(FormatError::HalfFormatted { device: member.name.clone() });
            }
            _ => {}
        }
    }
    let mut superblocks = Vec::with_capacity(members.len());
    for member in members {
        let device = member.name.clone();
        match &member.found {
            OnDevice::Ours(superblock) => superblocks.push((**superblock).clone()),
            OnDevice::Blank => return Err(FormatError::Blank { device }),
            OnDevice::Foreign(what) => return Err(FormatError::Foreign { device, what }),
        }
    }
    let first = &superblocks[0];
    let (store, by) = match expected.store {
        Some(store) => (store, "the configuration"),
        None => (first.store, members[0].name.as_str()),
    };
    let each = || members.iter().zip(&superblocks);
    for (member, superblock) in each() {
        let device = member.name.clone();
        if superblock.store != store {
            let (found, by) = (superblock.store, by.to_owned());
            return Err(FormatError::OtherStore { device, found, wanted: store, by });
        }
        let (found, ranks, wanted) = (superblock.rank, superblock.ranks, expected.rank);
        if found != wanted {
            return Err(FormatError::OtherRank { device, found, ranks, wanted });
        }
        if common(superblock) != common(first) {
            return Err(FormatError::Disagree { device, other: members[0].name.clone() });
        }
    }
    places(members, &superblocks)?;
    for (member, superblock) in each() {
        unchanged(member, superblock)?;
    }
    shape(first, expected)?;
    Ok(superblocks)
}

/// The fields that all devices of a rank share.
fn common(superblock: &Superblock) -> impl PartialEq + '_ {
    let Superblock { ranks, devices, layout, data, .. } = superblock;
    (ranks, devices, layout, data)
}

/// Checks that all devices are there, each once, in order.
fn places(members: &[Member], superblocks: &[Superblock]) -> Result<(), FormatError> {
    let first = &superblocks[0];
    let devices = first.devices.len();
    let mut by_place = vec![None; devices];
    for (given, superblock) in superblocks.iter().enumerate() {
        // Decoding has checked that a superblock's own index is in its list.
        let place = &mut by_place[superblock.device.0 as usize];
        if let Some(other) = place.replace(given) {
            let position = superblock.device.0;
            let [device, other] = [other, given].map(|at: usize| members[at].name.clone());
            return Err(FormatError::Twice { device, other, position });
        }
    }
    if let Some(position) = by_place.iter().position(Option::is_none) {
        let identity = first.devices[position].to_string();
        let (position, rank) = (position as u32, first.rank);
        return Err(FormatError::Missing { position, devices, rank, identity });
    }
    for (given, superblock) in superblocks.iter().enumerate() {
        let (found, given) = (superblock.device.0, given as u32);
        if found != given {
            let names = by_place.iter().flatten().map(|at| members[*at].name.as_str());
            let order = names.collect::<Vec<_>>().join(", ");
            let device = members[given as usize].name.clone();
            return Err(FormatError::Order { device, found, given, order });
        }
    }
    Ok(())
}

/// Checks that the device is the one that was formatted, and no smaller.
fn unchanged(member: &Member, superblock: &Superblock) -> Result<(), FormatError> {
    let device = member.name.clone();
    let (then, now) = (&superblock.devices[superblock.device.0 as usize], &member.identity);
    if !then.is_same(now) {
        let (identity, written_on) = (now.to_string(), then.to_string());
        return Err(FormatError::OtherDevice { device, identity, written_on });
    }
    if then.lba_bytes != now.lba_bytes {
        let (formatted, found) = (then.lba_bytes, now.lba_bytes);
        return Err(FormatError::LbaBytes { device, formatted, found });
    }
    let (old, new) = (superblock.region, member.region);
    for (what, formatted, found) in [
        ("its namespace", then.namespace_lbas, now.namespace_lbas),
        ("the store's region", old.lbas, new.lbas),
    ] {
        if found < formatted {
            return Err(FormatError::Shrunk { device, what, formatted, found });
        }
    }
    if old.first != new.first {
        let (formatted, found) = (old.first.0, new.first.0);
        return Err(FormatError::Moved { device, formatted, found });
    }
    Ok(())
}

fn shape(superblock: &Superblock, expected: &Expected) -> Result<(), FormatError> {
    let Some(asked) = expected.shape else { return Ok(()) };
    let formatted = superblock.layout.shape;
    for (field, formatted, asked) in [
        ("layers", formatted.layers, asked.layers),
        ("segments a layer", formatted.segments, asked.segments),
        ("bytes an object", formatted.object_bytes, asked.object_bytes),
        ("tokens a block", formatted.block_tokens, asked.block_tokens),
    ] {
        if formatted != asked {
            return Err(FormatError::Shape { field, formatted, asked });
        }
    }
    Ok(())
}
