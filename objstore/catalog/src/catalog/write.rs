//! New blocks: allocation, reports of the ranks, and commit.

use super::{Catalog, CatalogError, State, pins::Pins};
use crate::{
    ids::{FileId, Lsn, NamespaceId},
    key::BlockKey,
    record::{Record, UseKind},
};

/// Id of a write in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WriteId(pub u64);

/// One key's position in a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The file that holds the key.
    pub file: FileId,
    /// True when this write stores the key; otherwise it was stored or being written already.
    pub own: bool,
}

/// Files allocated for new blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// Id to report on, and to commit or abort.
    pub id: WriteId,
    /// One for each leading key that was accepted. Those that are not the write's own are already
    /// stored or being written, and are referenced.
    pub positions: Vec<Position>,
    /// True when files are short: with more free ones, more keys would have been accepted.
    pub is_short: bool,
}

impl Write {
    /// Returns the files to be written, in order.
    pub fn own(&self) -> impl Iterator<Item = FileId> {
        self.positions.iter().filter(|position| position.own).map(|position| position.file)
    }
}

/// State of a write after a rank has reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reported {
    /// Some ranks have not reported.
    Waiting,
    /// All ranks have written it: it can be committed.
    All,
    /// All ranks have reported, at least one of them a failure: the write has ended and its files
    /// are free.
    Failed,
}

#[derive(Debug)]
pub struct OpenWrite {
    namespace: NamespaceId,
    positions: Vec<Position>,
    own: usize,
    /// By rank.
    reported: Vec<bool>,
    missing: u32,
    failed: bool,
}

impl Catalog {
    /// Allocates files for as many leading `keys` as possible, evicting by policy. Pass the whole
    /// prefix, including its stored part: stored blocks are referenced until the write ends, and
    /// are kept longer than the blocks behind them.
    ///
    /// A key that is stored, being written, or earlier in `keys` gets no second file. Fewer
    /// positions than keys mean that files are short: all in use, the namespace at its quota with
    /// all of its files in use, or evicted ones waiting for the journal
    /// ([`CatalogCounts::limbo`](super::CatalogCounts::limbo)); in the last case write the journal,
    /// abort and begin again. Or the policy refused a key that is worth less than what would be
    /// evicted for it, or the write budget is used up ([`Catalog::advance`]).
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] or [`CatalogError::Recovering`].
    pub fn begin(
        &mut self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<Write, CatalogError> {
        self.check_recovered()?;
        let space = self.index.tenants.get(namespace)?.space;
        // References stored blocks first: making room must not evict them.
        let found: Vec<Option<FileId>> = self.index.find_all(space, keys).collect();
        found.iter().flatten().for_each(|file| self.index.refer(*file));
        let without = keys.iter().zip(&found).filter(|(_, file)| file.is_none());
        let missing: Vec<BlockKey> = without.map(|(key, _)| *key).collect();
        let (fresh, is_short) = self.take_files(namespace, &missing);
        let mut fresh = fresh.into_iter();
        let mut positions = Vec::with_capacity(keys.len());
        let mut own = 0;
        for (key, file) in keys.iter().zip(&found) {
            let position = if let Some(file) = *file {
                Position { file, own: false }
            } else if let Some(earlier) = self.index.find(space, key) {
                // A duplicate key within the request.
                self.index.refer(earlier);
                Position { file: earlier, own: false }
            } else if let Some(file) = fresh.next() {
                self.index.insert(file, space, *key, State::Writing);
                own += 1;
                if let Some(bucket) = &mut self.bucket {
                    bucket.take_file();
                }
                Position { file, own: true }
            } else {
                break;
            };
            positions.push(position);
        }
        found[positions.len()..].iter().flatten().for_each(|file| self.let_go(*file));
        fresh.for_each(|file| self.pool.free(file));
        let ranks = self.config.ranks;
        let id = self.writes.insert(OpenWrite {
            namespace,
            positions: positions.clone(),
            own,
            reported: vec![false; ranks as usize],
            missing: ranks,
            failed: false,
        });
        Ok(Write { id: WriteId(id), positions, is_short })
    }

    /// Takes files from the pool for as many leading keys as policy, write budget and quota allow.
    /// Returns them, and whether files are short.
    fn take_files(&mut self, namespace: NamespaceId, missing: &[BlockKey]) -> (Vec<FileId>, bool) {
        let wanted = missing.len() as u32;
        let mut admitted = self.admit(namespace, missing);
        if let Some(bucket) = &self.bucket {
            admitted = admitted.min(bucket.files());
        }
        let tenant = self.index.tenants.get_mut(namespace);
        tenant.refused += u64::from(wanted - admitted);
        let mut allowed = admitted;
        for (slots, limit) in self.limits_of(namespace) {
            let held = self.held_in(&slots);
            self.evict_in(slots.iter().copied(), (held + allowed).saturating_sub(limit));
            allowed = allowed.min(limit.saturating_sub(self.held_in(&slots)));
        }
        self.make_room(allowed);
        let mut files = Vec::with_capacity(allowed as usize);
        self.pool.allocate(allowed, &mut files);
        let is_short = files.len() < admitted as usize;
        (files, is_short)
    }

    /// Returns how many leading keys are worth more than what is evicted for them.
    fn admit(&mut self, namespace: NamespaceId, missing: &[BlockKey]) -> u32 {
        let wanted = missing.len() as u32;
        let tenant = self.index.tenants.get(namespace).expect("the caller checked it");
        let space = tenant.space;
        let limits = self.limits_of(namespace).into_iter().map(|(slots, limit)| {
            let room = limit.saturating_sub(self.held_in(&slots));
            (room, slots)
        });
        let tightest = limits.min();
        let own = tightest.as_ref().map_or(u32::MAX, |(room, _)| *room);
        let room = self.spare_files(wanted).min(own);
        if room >= wanted {
            return wanted;
        }
        let victim = match tightest {
            Some((own, slots)) if own < wanted => self.least_valuable(slots),
            _ => self.least_valuable(0..self.index.tenants.all.len() as u32),
        };
        victim.map_or(wanted, |it| self.index.admit(space, missing, room, it.candidate) as u32)
    }

    /// Reports that `rank` has written its part of all own files, and flushed it (or used FUA).
    /// `checksums` are those of its objects: all rows of the first own file, then of the next.
    ///
    /// # Errors
    /// Returns [`CatalogError::Write`], or [`CatalogError::Refused`] if the other arguments do not
    /// match the write.
    pub fn written(
        &mut self,
        id: WriteId,
        rank: u32,
        checksums: &[u32],
    ) -> Result<Reported, CatalogError> {
        let rows = (self.config.words_per_file / self.config.ranks) as usize;
        let write = self.unreported(id, rank)?;
        let expected = write.own * rows;
        if checksums.len() != expected {
            let found = checksums.len();
            return Err(CatalogError::Refused(format!(
                "{found} checksums were given for {expected} objects of one rank"
            )));
        }
        if rows > 0 {
            let write = self.writes.get(id.0).expect("checked above");
            let own = write.positions.iter().filter(|position| position.own);
            for (position, words) in own.zip(checksums.chunks_exact(rows)) {
                let all = self.index.checksums_mut(position.file);
                all[rank as usize * rows..][..rows].copy_from_slice(words);
            }
        }
        Ok(self.report(id, rank, false))
    }

    /// Returns the files that a write in progress stores itself; none if it has ended.
    #[must_use]
    pub fn own_files(&self, id: WriteId) -> Vec<FileId> {
        let positions = self.writes.get(id.0).into_iter().flat_map(|write| &write.positions);
        positions.filter(|position| position.own).map(|position| position.file).collect()
    }

    /// Reports that `rank` failed to write its part, and none of its devices still writes to it.
    /// The write ends when the last rank has reported: until then another may write to the files.
    ///
    /// # Errors
    /// Returns [`CatalogError::Write`] or [`CatalogError::Refused`].
    pub fn failed(&mut self, id: WriteId, rank: u32) -> Result<Reported, CatalogError> {
        self.unreported(id, rank)?;
        Ok(self.report(id, rank, true))
    }

    /// Makes the blocks of a write visible to lookups, except those dropped or lost meanwhile.
    /// Returns the journal position from which on they survive a crash.
    ///
    /// # Errors
    /// Returns [`CatalogError::Write`] if the write is unknown; [`CatalogError::Unreported`] or
    /// [`CatalogError::Refused`] if a rank has failed, which do not end the write.
    pub fn commit(&mut self, id: WriteId) -> Result<Lsn, CatalogError> {
        let write = self.writes.get(id.0).ok_or(CatalogError::Write { id })?;
        if write.failed {
            let why = "a rank failed to write its part; abort the write".to_owned();
            return Err(CatalogError::Refused(why));
        }
        if write.missing > 0 {
            let (missing, ranks) = (write.missing, self.config.ranks);
            return Err(CatalogError::Unreported { missing, ranks });
        }
        let write = self.writes.remove(id.0).expect("it was there");
        let namespace = write.namespace;
        // Tail first: the order of eviction.
        let head = write.positions.iter().take_while(|position| !position.own).count();
        for (at, Position { file, own }) in write.positions.into_iter().enumerate().rev() {
            if !own {
                if self.is_stored(file) {
                    // A block behind the head was not reachable before; now it is.
                    let how = if at < head { UseKind::Refreshed } else { UseKind::Touched };
                    self.use_file(namespace, file, how);
                }
                self.let_go(file);
            } else if !self.unfit.remove(&file)
                && self.index.tenants.is_current(self.index.entry(file).space)
            {
                self.index.store(namespace, file);
                self.index.tenants.get_mut(namespace).committed += 1;
                let key = self.index.entry(file).key;
                let checksums = self.index.checksums(file).into();
                self.log.push(&Record::Commit { file, namespace, key, checksums });
            } else {
                self.give_up(file);
            }
        }
        self.with_pins(Pins::complete);
        Ok(self.log.last())
    }

    /// Ends a write without a commit. Call it only when no rank's devices still write to its files:
    /// they are freed immediately.
    ///
    /// # Errors
    /// Returns [`CatalogError::Write`] if the write is unknown.
    pub fn abort(&mut self, id: WriteId) -> Result<(), CatalogError> {
        let write = self.writes.remove(id.0).ok_or(CatalogError::Write { id })?;
        for Position { file, own } in write.positions.into_iter().rev() {
            if own { self.give_up(file) } else { self.let_go(file) }
        }
        Ok(())
    }

    /// Drops a file of an aborted write. No record names it, so it need not wait for the journal;
    /// but another write may have found its key here and may reference it.
    fn give_up(&mut self, file: FileId) {
        self.unfit.remove(&file);
        self.index.doom(file);
        if self.index.entry(file).refs == 0 {
            self.index.reset(file);
            self.pool.free(file);
        }
    }

    fn unreported(&self, id: WriteId, rank: u32) -> Result<&OpenWrite, CatalogError> {
        let write = self.writes.get(id.0).ok_or(CatalogError::Write { id })?;
        match write.reported.get(rank as usize) {
            None => Err(CatalogError::Refused(format!(
                "rank {rank} reported, but the catalog has {}",
                self.config.ranks
            ))),
            Some(true) => {
                Err(CatalogError::Refused(format!("rank {rank} has reported on this write before")))
            }
            Some(false) => Ok(write),
        }
    }

    fn report(&mut self, id: WriteId, rank: u32, failed: bool) -> Reported {
        let write = self.writes.get_mut(id.0).expect("the caller found it");
        write.reported[rank as usize] = true;
        write.missing -= 1;
        write.failed |= failed;
        match (write.missing, write.failed) {
            (0, false) => Reported::All,
            (0, true) => {
                self.abort(id).expect("it was there");
                Reported::Failed
            }
            _ => Reported::Waiting,
        }
    }
}
