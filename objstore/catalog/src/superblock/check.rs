//! Checks that devices make up a rank of a store.

use super::{DEVICES_MAX, DeviceIdentity, FormatError, OnDevice, State, StoreId, Superblock};
use crate::{codec::Codec, layout::Region, shape::KvShape};

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
    /// The codec of its objects; any if `None`.
    pub codec: Option<Codec>,
}

/// Returns the superblocks of `members` if they are all devices of one rank of one store, in order,
/// and unchanged since formatting. Does no I/O.
///
/// # Errors
/// Returns [`FormatError`], which names the wrong device and gives advice.
pub fn check_set(members: &[Member], expected: &Expected) -> Result<Vec<Superblock>, FormatError> {
    if members.is_empty() {
        return wrong(format!("a rank has 1 to {DEVICES_MAX} devices, and 0 were given"));
    }
    for member in members {
        match &member.found {
            OnDevice::Ours(superblock) if superblock.state == State::Formatting => {
                let device = &member.name;
                return wrong(format!(
                    "{device}: formatting was interrupted; format the store again"
                ));
            }
            _ => {}
        }
    }
    let mut superblocks = Vec::with_capacity(members.len());
    for member in members {
        let device = &member.name;
        match &member.found {
            OnDevice::Ours(superblock) => superblocks.push((**superblock).clone()),
            OnDevice::Blank => {
                return wrong(format!(
                    "{device}: there is no store on it; name the device of this store, or format \
                     all of them again, which loses what is stored"
                ));
            }
            OnDevice::Foreign(what) => {
                return wrong(format!(
                    "{device}: it holds {what} and no store; name another device, or format this \
                     one"
                ));
            }
        }
    }
    let first = &superblocks[0];
    let (store, by) = match expected.store {
        Some(store) => (store, "the configuration"),
        None => (first.store, members[0].name.as_str()),
    };
    let each = || members.iter().zip(&superblocks);
    for (member, superblock) in each() {
        let device = &member.name;
        if superblock.store != store {
            let found = superblock.store;
            return wrong(format!(
                "{device}: it belongs to store {found}, and {store} was asked for ({by})"
            ));
        }
        let (found, ranks, wanted) = (superblock.rank, superblock.ranks, expected.rank);
        if found != wanted {
            return wrong(format!(
                "{device}: it belongs to rank {found} of {ranks}, and rank {wanted} was asked for"
            ));
        }
        if common(superblock) != common(first) {
            let other = &members[0].name;
            return wrong(format!(
                "{device} and {other} do not agree on the store's layout; format the store again"
            ));
        }
    }
    places(members, &superblocks)?;
    for (member, superblock) in each() {
        unchanged(member, superblock)?;
    }
    shape(first, expected)?;
    Ok(superblocks)
}

fn wrong<T>(why: String) -> Result<T, FormatError> {
    Err(FormatError::Devices(why))
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
            let [device, other] = [other, given].map(|at: usize| &members[at].name);
            return wrong(format!(
                "{device} and {other} both say that they are device {position}: give each device \
                 once"
            ));
        }
    }
    if let Some(position) = by_place.iter().position(Option::is_none) {
        let (identity, rank) = (&first.devices[position], first.rank);
        return wrong(format!(
            "device {position} of the {devices} of rank {rank} is missing: {identity}; attach and \
             name it, in this place"
        ));
    }
    for (given, superblock) in superblocks.iter().enumerate() {
        let (found, given) = (superblock.device.0, given as u32);
        if found != given {
            let names = by_place.iter().flatten().map(|at| members[*at].name.as_str());
            let order = names.collect::<Vec<_>>().join(", ");
            let device = &members[given as usize].name;
            return wrong(format!(
                "{device}: it is device {found} of the store and was given as device {given}; the \
                 order is {order}"
            ));
        }
    }
    Ok(())
}

/// Checks that the device is the one that was formatted, and no smaller.
fn unchanged(member: &Member, superblock: &Superblock) -> Result<(), FormatError> {
    let device = &member.name;
    let (then, now) = (&superblock.devices[superblock.device.0 as usize], &member.identity);
    if !then.is_same(now) {
        return wrong(format!(
            "{device}: its superblock was written on another device ({then}), and this one is \
             {now}; a copied device is not opened: attach the original"
        ));
    }
    if then.lba_bytes != now.lba_bytes {
        let (formatted, found) = (then.lba_bytes, now.lba_bytes);
        return wrong(format!(
            "{device}: it was formatted as a store with LBAs of {formatted} bytes and has LBAs of \
             {found} now; go back to that LBA format, or format the store again"
        ));
    }
    let (old, new) = (superblock.region, member.region);
    for (what, formatted, found) in [
        ("its namespace", then.namespace_lbas, now.namespace_lbas),
        ("the store's region", old.lbas, new.lbas),
    ] {
        if found < formatted {
            return wrong(format!(
                "{device}: {what} had {formatted} LBAs when the store was formatted and has \
                 {found} now; give it its size back, or format the store again"
            ));
        }
    }
    if old.first != new.first {
        let (formatted, found) = (old.first.0, new.first.0);
        return wrong(format!(
            "{device}: the store's region begins at LBA {formatted}, and LBA {found} was given; \
             give the region that was formatted"
        ));
    }
    Ok(())
}

fn shape(superblock: &Superblock, expected: &Expected) -> Result<(), FormatError> {
    let found = superblock.layout.codec;
    if let Some(asked) = expected.codec.filter(|asked| *asked != found) {
        return wrong(format!(
            "the store was made with codec {found}, and codec {asked} was asked for; leave it out, \
             or format the store again"
        ));
    }
    let Some(asked) = expected.shape else { return Ok(()) };
    let formatted = superblock.layout.shape;
    if formatted != asked {
        return wrong(format!(
            "the store was made for blocks of another shape ({formatted}), and this one was given: \
             {asked}; give the shape of the model that it was made for, or format it again"
        ));
    }
    Ok(())
}
