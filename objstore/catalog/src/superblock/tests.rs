use nvme_spec::ids::Lba;

use super::*;
use crate::{
    block_io::tests::{Faults, Medium},
    format::{Plan, format_devices},
};

mod foreign;
mod format;
mod plan;
mod set;
mod wire;

const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };

/// Makes the device with this number and this many LBAs.
fn device(number: u8, lba_bytes: u32, lbas: u64) -> (DeviceIdentity, Region) {
    let mut serial = [b' '; 20];
    serial[..2].copy_from_slice(&[b'S', b'0' + number]);
    let mut model = [b' '; 40];
    model[..5].copy_from_slice(b"model");
    let (nguid, eui64) = ([0; 16], [0; 8]);
    let identity =
        DeviceIdentity { model, serial, nsid: 1, nguid, eui64, lba_bytes, namespace_lbas: lbas };
    let lba_shift = lba_bytes.trailing_zeros() as u8;
    (identity, Region { first: Lba(0), lbas, lba_shift })
}

fn plan(devices: &[(DeviceIdentity, Region)]) -> Plan<'_> {
    Plan {
        store: StoreId([7; 16]),
        rank: 0,
        ranks: 1,
        devices,
        shape: SHAPE,
        codec: Codec::None,
        catalog: true,
        data: true,
        checksums: true,
        namespaces_max: 16,
        files_max: None,
        capacity_bytes: None,
        group: None,
    }
}

/// Formats `count` devices; returns their media and superblocks.
fn formatted(count: u8) -> (Vec<Medium>, Vec<Superblock>) {
    let devices: Vec<_> = (0..count).map(|number| device(number, 512, 8 << 11)).collect();
    let mut superblocks = plan(&devices).superblocks().unwrap();
    let media: Vec<Medium> = (0..count).map(medium).collect();
    write(&media, &mut superblocks).unwrap();
    (media, superblocks)
}

fn medium(number: u8) -> Medium {
    Medium::new(&format!("sim{number}"), 8 << 20, 512)
}

fn write(media: &[Medium], superblocks: &mut [Superblock]) -> Result<(), FormatError> {
    let mut media = media.to_vec();
    let mut devices: Vec<&mut dyn BlockIo> = Vec::new();
    devices.extend(media.iter_mut().map(|medium| medium as &mut dyn BlockIo));
    format_devices(&mut devices, superblocks)
}

fn read(medium: &Medium) -> Result<OnDevice, FormatError> {
    Superblock::read(&mut medium.clone())
}
