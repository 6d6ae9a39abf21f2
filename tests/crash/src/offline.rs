//! Operations on a closed store: format, damage, repair. Each may be interrupted.

use anyhow::{Result, bail};
use kv_catalog::{JournalError, OnDevice, Superblock, rewrite_journal};
use objstore::{Format, Store, StoreDevice, StoreError, StoreId};
use rand::Rng as _;
use ripieno_testkit::KvMemory;

use crate::{history::History, machine::Powered, model::Model, outcome::Outcome};

/// Offsets of the superblock's copies.
const COPIES: [u64; 2] = [0, 512 << 10];
/// Bytes damaged at the start of the target.
const DAMAGED_BYTES: u64 = 64;

/// Differences of the devices' contents from those of an intact store.
#[derive(Default)]
pub struct Offline {
    /// True if formatting was acknowledged.
    pub is_formatted: bool,
    /// True if formatting was started.
    is_begun: bool,
    /// The previous store, before that format.
    before: Option<Box<(Format, Model)>>,
    /// Damage to do before the next process opens the store.
    damage: Option<Damage>,
    /// True if the journal was damaged, and may be empty by now.
    is_reset: bool,
}

#[derive(Debug, Clone, Copy)]
enum Damage {
    Superblock,
    Journal,
}

impl History {
    /// Draws the operations on the closed store.
    pub fn plan_offline(&mut self, may_damage: bool) {
        let is_whole = self.offline.is_formatted && !self.offline.is_reset && !self.lies;
        if !is_whole || !may_damage {
            return;
        }
        match self.rng.random_range(0..30) {
            0 => {
                let mut model = self.model.clone();
                model.empty();
                let format = Format { store: StoreId(self.rng.random()), ..self.format.clone() };
                let format = std::mem::replace(&mut self.format, format);
                let model = std::mem::replace(&mut self.model, model);
                self.offline = Offline { is_begun: true, ..Offline::default() };
                self.offline.before = Some(Box::new((format, model)));
            }
            1..3 => self.offline.damage = Some(Damage::Superblock),
            3 => self.offline.damage = Some(Damage::Journal),
            _ => {}
        }
    }

    /// Formats devices without a store, and does the planned damage.
    pub fn prepare(&mut self, powered: &mut Powered, outcome: &mut Outcome) -> Result<()> {
        if self.offline.is_formatted {
            let Some(damage) = self.offline.damage.take() else { return Ok(()) };
            outcome.offline += 1;
            return self.damage(damage, &powered.attach()?);
        }
        // An interrupted format may be complete, or have had no effect.
        if self.offline.is_begun && self.rng.random_bool(0.5) {
            let kv = KvMemory::new(&*powered.domain, self.format.shape, 1);
            match self.open_store(powered, &kv) {
                Ok(_) => return Ok(()),
                Err(StoreError::Format(_)) => {}
                Err(error) if powered.power.is_cut() || powered.faults().any() => {
                    return Err(error.into());
                }
                Err(error) => bail!("after a formatting that was cut short: {error}"),
            }
        }
        outcome.offline += 1;
        self.offline.is_begun = true;
        Store::format(&powered.attach()?, &self.format)?;
        self.offline = Offline { is_formatted: true, ..Offline::default() };
        Ok(())
    }

    /// Records which store was opened, after an interrupted format.
    pub fn opened(&mut self, store: &Store) -> Result<()> {
        let found = store.superblock().store;
        if found != self.format.store {
            let before = self.offline.before.take();
            let Some(before) = before.filter(|before| before.0.store == found) else {
                bail!("store {found} was opened, and {} is there", self.format.store);
            };
            (self.format, self.model) = *before;
        }
        self.offline = Offline { is_formatted: true, ..Offline::default() };
        Ok(())
    }

    fn damage(&mut self, damage: Damage, devices: &[StoreDevice]) -> Result<()> {
        let at = match damage {
            Damage::Superblock => self.rng.random_range(0..devices.len()),
            Damage::Journal => 0,
        };
        let mut media = Store::media(devices)?;
        let io = &mut *media[at].io;
        let copies = Superblock::read_copies(io)?;
        let [Ok(a), Ok(b)] = &copies else { return Ok(()) };
        if a.sequence != b.sequence {
            // A second fault would exceed the redundancy.
            return Ok(());
        }
        let copy = self.rng.random_range(0..2);
        let offset = match (damage, a.journal) {
            (Damage::Superblock, _) => COPIES[copy],
            (Damage::Journal, Some(area)) => match area.active {
                kv_catalog::Half::A => area.offset,
                kv_catalog::Half::B => area.offset + area.half_bytes,
            },
            (Damage::Journal, None) => return Ok(()),
        };
        self.machine.bytes[at].rot(offset, DAMAGED_BYTES, self.rng.random())?;
        if let (Damage::Superblock, true) = (damage, self.rng.random_bool(0.5)) {
            // As fsck does it. Opening the store does it, too.
            if Superblock::read_copies(io)?[copy].is_err() {
                a.write_copy(io, copy)?;
            }
        }
        self.offline.is_reset |= matches!(damage, Damage::Journal);
        Ok(())
    }

    /// Empties a damaged journal, and opens the store.
    pub fn repair(
        &mut self,
        powered: &mut Powered,
        kv: &KvMemory,
        error: StoreError,
        outcome: &mut Outcome,
    ) -> Result<Store> {
        // A device that failed is no damage, which may be in padding, where nobody sees it.
        let has_failed = matches!(error, StoreError::Journal(JournalError::Block(_)));
        if !self.offline.is_reset || has_failed || !matches!(error, StoreError::Journal(_)) {
            return Err(error.into());
        }
        outcome.offline += 1;
        // From here on the store is unchanged or empty.
        self.model.empty();
        let mut media = Store::media(&powered.attach()?)?;
        let OnDevice::Ours(mut superblock) = Superblock::read(&mut *media[0].io)? else {
            bail!("the superblock is gone");
        };
        rewrite_journal(&mut *media[0].io, &mut superblock, |_| false)?;
        drop(media);
        Ok(self.open_store(powered, kv)?)
    }
}
