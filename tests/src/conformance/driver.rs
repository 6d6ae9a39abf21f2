//! The real driver on the target.

use std::sync::Arc;

use anyhow::{Context, ensure};
use nvme_driver::{
    Controller, ControllerEvent, ControllerOptions, DescriptorMode, DescriptorPreference, DmaSlice,
    Error, LbaRange, Nanos, platform::ring::Doorbell,
};
use nvme_spec::{
    admin::FormatNvm,
    identify::LbaFormat,
    ids::{Lba, Nsid},
};

use super::{
    Case, Found, driver,
    io::{bytes, fill},
};
use crate::{
    pattern,
    raw::buffer,
    target::{Namespace, Sgls, Target},
};

pub(super) const CASES: &[Case] = &[
    driver("driver: what it finds", |target| {
        let ctrl = attach(target, DescriptorPreference::Auto)?;
        let info = ctrl.info();
        ensure!(info.mdts_bytes == Some(u64::from(target.mdts_bytes)), "{info:?}");
        ensure!(info.entries_max == target.entries_max, "{info:?}");
        let sgls = match info.descriptor_mode {
            DescriptorMode::Prp { .. } => Sgls::None,
            DescriptorMode::Sgl { granularity: 4, .. } => Sgls::Dwords,
            DescriptorMode::Sgl { .. } => Sgls::Bytes,
        };
        ensure!(sgls == target.sgls, "{info:?}");
        ensure!(ctrl.namespaces().len() == target.namespaces.len());
        for (found, ns) in ctrl.namespaces().iter().zip(&target.namespaces) {
            let found = (found.nsid.0, found.lbas, 1u32 << found.lba_shift);
            ensure!(found == (ns.nsid, ns.lbas, ns.lba_bytes), "{found:?}");
        }
        Ok(Found::OK)
    }),
    driver("driver: round trips with SGLs", |target| {
        round_trips(target, DescriptorPreference::Sgl)
    }),
    driver("driver: round trips with PRPs", |target| {
        round_trips(target, DescriptorPreference::Prp)
    }),
    driver("driver: scattered memory with SGLs", scattered),
    driver("driver: scattered pages with PRPs", |target| {
        let mut ctrl = attach(target, DescriptorPreference::Prp)?;
        let pool = memory(target, 1 << 20)?;
        let mut parts = vec![pool.slice(1024, 3072)?];
        for page in 1..100 {
            parts.push(pool.slice(page * 8192, 4096)?);
        }
        parts.push(pool.slice(100 * 8192, 1024)?);
        scatter_round_trip(&mut ctrl, &target.namespaces[0], &parts)
    }),
    driver("driver: flush, deallocate and zeroes", |target| {
        let mut ctrl = attach(target, DescriptorPreference::Auto)?;
        for ns in &target.namespaces {
            let (nsid, block) = (Nsid(ns.nsid), ns.lba_bytes as usize);
            let data = pattern(64 * block, 31);
            ctrl.write(nsid, Lba(0), &data, true)?;
            ctrl.flush(nsid)?;
            let ranges: Vec<_> =
                (0..300).map(|i| LbaRange { lba: Lba(64 + i * 2), lbas: 1 }).collect();
            ctrl.deallocate(nsid, &ranges)?;
            ctrl.write_zeroes(nsid, LbaRange { lba: Lba(1), lbas: 62 }, false)?;
            let mut back = vec![1; data.len()];
            ctrl.read(nsid, Lba(0), &mut back)?;
            let mut wanted = data;
            wanted[block..63 * block].fill(0);
            ensure!(back == wanted, "namespace {nsid}");
        }
        Ok(Found::OK)
    }),
    driver("driver: reset in between", |target| {
        let mut ctrl = attach(target, DescriptorPreference::Auto)?;
        let data = pattern(100 * 512, 41);
        for turn in 0..5 {
            ctrl.write(Nsid(1), Lba(turn), &data, false)?;
            ctrl.reset()?;
            let mut back = vec![0; data.len()];
            ctrl.read(Nsid(1), Lba(turn), &mut back)?;
            ensure!(back == data, "turn {turn}");
        }
        Ok(Found::OK)
    }),
    driver("driver: logs and health", |target| {
        let mut ctrl = attach(target, DescriptorPreference::Auto)?;
        ctrl.error_log()?;
        ensure!(ctrl.smart_log()?.temperature_kelvin() > 0);
        ctrl.firmware_slot_log()?;
        Ok(Found::OK)
    }),
    driver("driver: events", |target| {
        let mut ctrl = attach(target, DescriptorPreference::Auto)?;
        for turn in 1..=8 {
            // The doorbell of a queue that does not exist.
            let bell = Doorbell::new(&target.bus, 2 * 40).ok_or(anyhow::anyhow!("no doorbell"))?;
            bell.ring(turn);
            let mut events = Vec::new();
            let deadline = target.clock.now() + Nanos::from_millis(2_000);
            for idle in 0.. {
                events.extend(ctrl.poll_events()?);
                if !events.is_empty() || target.clock.now() >= deadline {
                    break;
                }
                target.clock.pause(idle, deadline);
            }
            ensure!(events == [ControllerEvent::Error { info: 0 }], "turn {turn}: {events:?}");
        }
        Ok(Found::OK)
    }),
    driver("driver: format", |target| {
        let mut ctrl = attach(target, DescriptorPreference::Auto)?;
        ctrl.write(Nsid(1), Lba(0), &pattern(512, 3), false)?;
        ctrl.format(Nsid(1), FormatNvm::default())?;
        let mut back = [1; 512];
        ctrl.read(Nsid(1), Lba(0), &mut back)?;
        ensure!(back == [0; 512]);
        ensure!(ctrl.namespaces().len() == target.namespaces.len());
        Ok(Found::OK)
    }),
    driver("driver: format to other block sizes and back", other_blocks),
    driver("driver: what does not fit is not sent", |target| {
        let mut ctrl = attach(target, DescriptorPreference::Auto)?;
        let past = Lba(target.namespaces[0].lbas);
        let refused = ctrl.read(Nsid(1), past, &mut [0; 512]);
        ensure!(matches!(refused, Err(Error::Range { .. })));
        let refused = ctrl.read(Nsid(77), Lba(0), &mut [0; 512]);
        ensure!(matches!(refused, Err(Error::Namespace { .. })));
        Ok(Found::OK)
    }),
    driver("driver: shut down and attach again", |target| {
        for _ in 0..3 {
            let mut ctrl = attach(target, DescriptorPreference::Auto)?;
            ctrl.write(Nsid(1), Lba(0), &pattern(512, 5), false)?;
            ctrl.shutdown()?;
        }
        Ok(Found::OK)
    }),
];

fn attach(target: &Target, descriptors: DescriptorPreference) -> anyhow::Result<Controller> {
    let options = ControllerOptions { descriptors, ..Default::default() };
    Ok(Controller::attach(target.bus.clone(), target.clock.clone(), options)?)
}

fn memory(target: &Target, bytes: usize) -> anyhow::Result<DmaSlice> {
    let memory: Arc<dyn nvme_driver::DmaMemory> = target.bus.dma().alloc(bytes)?;
    Ok(DmaSlice::whole(memory)?)
}

/// Returns true if the driver refuses to use SGLs, as it must on a controller without them.
fn refuses_sgls(target: &Target) -> bool {
    let options =
        ControllerOptions { descriptors: DescriptorPreference::Sgl, ..Default::default() };
    let refused = Controller::attach(target.bus.clone(), target.clock.clone(), options);
    refused
        .is_err_and(|error| matches!(error, Error::Implausible { .. } | Error::Unsupported { .. }))
}

fn round_trips(target: &Target, descriptors: DescriptorPreference) -> anyhow::Result<Found> {
    if (descriptors, target.sgls) == (DescriptorPreference::Sgl, Sgls::None) {
        return Ok(Found::wrong_unless(refuses_sgls(target), "SGLs are not refused"));
    }
    let mut ctrl = attach(target, descriptors)?;
    for ns in &target.namespaces {
        for (index, blocks) in [1, 2, 7, 8, 9, 64, 300, 1025].into_iter().enumerate() {
            let data = pattern(blocks * ns.lba_bytes as usize, index as u64);
            let lba = Lba(index as u64 * 3);
            ctrl.write(Nsid(ns.nsid), lba, &data, index % 2 == 0)?;
            let mut back = vec![0; data.len()];
            ctrl.read(Nsid(ns.nsid), lba, &mut back)?;
            ensure!(back == data, "namespace {}, {blocks} blocks", ns.nsid);
        }
    }
    Ok(Found::OK)
}

fn scattered(target: &Target) -> anyhow::Result<Found> {
    let odd = match target.sgls {
        Sgls::None => {
            return Ok(Found::wrong_unless(refuses_sgls(target), "SGLs are not refused"));
        }
        Sgls::Bytes => 1,
        Sgls::Dwords => 0,
    };
    let mut ctrl = attach(target, DescriptorPreference::Sgl)?;
    let pool = memory(target, 1 << 20)?;
    // More descriptors than fit into one segment of 4096 bytes, so that segments are chained.
    let mut parts = Vec::new();
    for index in 0..400 {
        parts.push(pool.slice(index * 2000 + odd, 1020 + odd)?);
    }
    parts.push(pool.slice(900_000, 800 * 512 - 400 * (1020 + odd))?);
    scatter_round_trip(&mut ctrl, &target.namespaces[0], &parts)
}

/// Formats the first namespace with the second one's block size, then with its own again.
fn other_blocks(target: &Target) -> anyhow::Result<Found> {
    let mut ctrl = attach(target, DescriptorPreference::Auto)?;
    let sizes = [target.namespaces[1].lba_bytes, target.namespaces[0].lba_bytes];
    for lba_bytes in sizes {
        let formats = &ctrl.namespaces()[0].formats;
        let fits = |format: &LbaFormat| 1 << format.lbads() == lba_bytes && format.ms() == 0;
        let index = formats.iter().position(fits).context("no such format")?;
        ctrl.format(Nsid(1), FormatNvm { lbaf: index as u8, ..Default::default() })?;
        let found = &ctrl.namespaces()[0];
        ensure!(found.lba_bytes() == u64::from(lba_bytes), "{found:?}");
        let data = pattern(40 * lba_bytes as usize, 51);
        ctrl.write(Nsid(1), Lba(7), &data, false)?;
        let mut back = vec![0; data.len()];
        ctrl.read(Nsid(1), Lba(7), &mut back)?;
        ensure!(back == data, "blocks of {lba_bytes} bytes");
    }
    Ok(Found::OK)
}

fn scatter_round_trip(
    ctrl: &mut Controller,
    ns: &Namespace,
    parts: &[DmaSlice],
) -> anyhow::Result<Found> {
    let len: usize = parts.iter().map(DmaSlice::len).sum();
    let (nsid, data) = (Nsid(ns.nsid), pattern(len, 11));
    let mut left = &data[..];
    for part in parts {
        let (now, later) = left.split_at(part.len());
        fill(&buffer(part.clone())?, 0, now)?;
        left = later;
    }
    ctrl.write_dma(nsid, Lba(100), parts, false)?;
    let mut back = vec![0; len];
    ctrl.read(nsid, Lba(100), &mut back)?;
    ensure!(back == data, "written");
    for part in parts {
        fill(&buffer(part.clone())?, 0, &vec![0; part.len()])?;
    }
    ctrl.read_dma(nsid, Lba(100), parts)?;
    let mut found = Vec::new();
    for part in parts {
        found.extend(bytes(&buffer(part.clone())?, 0, part.len())?);
    }
    ensure!(found == data, "read");
    Ok(Found::OK)
}
