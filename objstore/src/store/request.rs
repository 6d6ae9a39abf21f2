//! Requests: retrieving a prefix, storing new blocks, layer by layer.

use gio_uring::Affine;
use nvme_spec::nvm::Direction;

use super::{Store, Target};
use kv_catalog::{BlockId, BlockKey, FileId, Layer, Position};

use crate::{
    error::StoreError,
    transfer::{Committed, Handle, LayerState, Prefix, Request, RequestId, Transfer, Writing},
};

impl Store {
    /// Prepares to read the prefix into `blocks`, one for each of its positions. This is the only
    /// step whose cost grows with the number of blocks.
    ///
    /// # Errors
    /// [`StoreError::Positions`], [`StoreError::NoSuchBlock`], [`StoreError::DuplicateBlock`] for
    /// blocks that cannot be; [`StoreError::Stale`] when a file was lost since the lookup;
    /// [`StoreError::Staging`] for more blocks than a staging buffer has room for;
    /// [`StoreError::Ring`] without memory for the request ([`crate::StoreOptions::arena_bytes`]);
    /// [`StoreError::Failed`].
    pub fn retrieve(
        &mut self,
        prefix: &Prefix,
        blocks: &[BlockId],
    ) -> Result<Transfer, StoreError> {
        if prefix.len() != blocks.len() {
            let (blocks, positions) = (blocks.len(), prefix.len());
            return Err(StoreError::Positions { blocks, positions, what: "blocks of the prefix" });
        }
        self.retrieve_from(prefix, 0, blocks)
    }

    /// As [`Store::retrieve`], but only the `blocks.len()` positions from `first` on: where the
    /// engine has the others already, or wants them in parts.
    ///
    /// # Errors
    /// As for [`Store::retrieve`].
    pub fn retrieve_from(
        &mut self,
        prefix: &Prefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<Transfer, StoreError> {
        self.sync()?;
        if prefix.releases.store != self.releases.store {
            return Err(StoreError::Foreign { what: "prefix" });
        }
        let Some(files) = prefix.files.get(first..first.saturating_add(blocks.len())) else {
            let (blocks, positions) = (blocks.len(), prefix.len().saturating_sub(first));
            return Err(StoreError::Positions { blocks, positions, what: "blocks of the prefix" });
        };
        if let Some(at) = files.iter().position(|file| !self.index.is_stored(*file)) {
            return Err(StoreError::Stale { position: first + at, file: files[at] });
        }
        let id = self.new_id();
        self.check_blocks(blocks)?;
        self.check_distinct(id, blocks)?;
        self.check_room(blocks.len())?;
        let mut request = Request::new(Direction::Read, self.shape.layers);
        for (at, file) in files.iter().enumerate() {
            request.entries.push(((first + at) as u32, *file));
            request.positions.push(Position { file: *file, own: false });
        }
        self.scratch.map.clear();
        let pairs = files.iter().zip(blocks);
        self.scratch.map.extend(pairs.map(|(file, block)| affine(*block, *file)));
        self.upload(&mut request)?;
        for file in files {
            self.index.reference(*file);
        }
        self.requests.insert(id, request);
        Ok(Transfer {
            handle: Handle { id, releases: self.releases.clone() },
            blocks: blocks.len(),
        })
    }

    /// Makes room for the blocks with these keys, evicting what was unused for longest, and takes
    /// as many leading ones as can be had: [`Writing::accepted`] says how many, which may be none.
    ///
    /// A key that is stored already, is being stored by another writing, or occurs earlier in
    /// `keys` is not stored again: it is accepted, and its block is not read. (Should that other
    /// writing fail, the key stays a miss.)
    ///
    /// # Errors
    /// [`StoreError::Positions`] and [`StoreError::NoSuchBlock`] for blocks that cannot be;
    /// [`StoreError::ReadOnly`]; [`StoreError::Staging`] when more blocks are to be written than a
    /// staging buffer has room for; [`StoreError::Ring`] without memory for the request
    /// ([`crate::StoreOptions::arena_bytes`]); [`StoreError::Failed`].
    pub fn allocate(
        &mut self,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<Writing, StoreError> {
        self.sync()?;
        self.check_writable()?;
        if keys.len() != blocks.len() {
            let (blocks, positions) = (blocks.len(), keys.len());
            return Err(StoreError::Positions { blocks, positions, what: "keys" });
        }
        self.check_blocks(blocks)?;
        let mut request = Request::new(Direction::Write, self.shape.layers);
        self.place(keys, &mut request);
        self.scratch.map.clear();
        for (position, file) in &request.entries {
            self.scratch.map.push(affine(blocks[*position as usize], *file));
        }
        let room = self.check_room(request.entries.len());
        if let Err(error) = room.and_then(|()| self.upload(&mut request)) {
            self.index.abandon(&request.positions, &mut self.scratch.freed);
            self.free();
            return Err(error);
        }
        let id = self.new_id();
        let (accepted, written) = (request.positions.len(), request.entries.len());
        self.requests.insert(id, request);
        Ok(Writing { handle: Handle { id, releases: self.releases.clone() }, accepted, written })
    }

    /// Waits for the layers in flight and, if all of all layers was stored, makes the blocks
    /// visible. Otherwise nothing becomes visible and the files are free again.
    ///
    /// # Errors
    /// [`StoreError::Transfer`] when a layer failed, [`StoreError::Incomplete`] when one was never
    /// started, [`StoreError::Foreign`], [`StoreError::Failed`].
    pub fn commit(&mut self, writing: Writing) -> Result<Committed, StoreError> {
        self.check()?;
        if writing.handle.releases.store != self.releases.store {
            return Err(StoreError::Foreign { what: "writing" });
        }
        let id = writing.handle.id;
        for layer in 0..self.shape.layers {
            self.settle_layer(id, Layer(layer))?;
        }
        let Some(request) = self.requests.remove(&id) else {
            return Err(StoreError::Ended { layer: Layer(0) });
        };
        let verdict = verdict(&request);
        match verdict {
            Ok(()) => self.index.settle(&request.positions, &mut self.scratch.freed),
            Err(_) => self.index.abandon(&request.positions, &mut self.scratch.freed),
        }
        self.free();
        verdict.map(|()| Committed { accepted: writing.accepted, written: writing.written })
    }

    /// Gives up on a writing. Its files are free as soon as nothing of it is in flight. The same as
    /// dropping it, but at once.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn abort(&mut self, writing: Writing) -> Result<(), StoreError> {
        drop(writing);
        self.sync()
    }

    fn new_id(&mut self) -> RequestId {
        self.requests_ever += 1;
        RequestId(self.requests_ever)
    }

    fn check_blocks(&self, blocks: &[BlockId]) -> Result<(), StoreError> {
        let there_are = self.pool.blocks();
        match blocks.iter().find(|block| block.0 >= there_are) {
            Some(block) => Err(StoreError::NoSuchBlock { block: *block, blocks: there_are }),
            None => Ok(()),
        }
    }

    /// Two blocks read into the same place would leave a mixture.
    fn check_distinct(&mut self, id: RequestId, blocks: &[BlockId]) -> Result<(), StoreError> {
        for block in blocks {
            let used = &mut self.scratch.used[block.0 as usize];
            if std::mem::replace(used, id.0) == id.0 {
                return Err(StoreError::DuplicateBlock { block: *block });
            }
        }
        Ok(())
    }

    /// Finds or makes a file for as many leading keys as possible.
    fn place(&mut self, keys: &[BlockKey], request: &mut Request) {
        // What is there already is referenced first: making room must not take it away.
        let found: Vec<Option<FileId>> = keys
            .iter()
            .map(|key| {
                let file = self.index.find(*key)?.file();
                self.index.reference(file);
                Some(file)
            })
            .collect();
        let missing = found.iter().filter(|found| found.is_none()).count();
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        self.make_room(missing.saturating_sub(self.files.free_files()));
        let mut fresh = Vec::with_capacity(missing as usize);
        self.files.allocate(missing, &mut fresh);
        let mut fresh = fresh.into_iter();
        let mut placed = 0;
        for (key, found) in keys.iter().zip(&found) {
            let position = if let Some(file) = *found {
                Position { file, own: false }
            } else if let Some(earlier) = self.index.find(*key) {
                // Twice in one request.
                self.index.reference(earlier.file());
                Position { file: earlier.file(), own: false }
            } else if let Some(file) = fresh.next() {
                self.index.begin(*key, file);
                request.entries.push((placed, file));
                Position { file, own: true }
            } else {
                break;
            };
            request.positions.push(position);
            placed += 1;
        }
        let beyond: Vec<FileId> = found[placed as usize..].iter().flatten().copied().collect();
        self.index.release(&beyond, &mut self.scratch.freed);
        self.scratch.freed.extend(fresh);
        self.free();
    }

    /// A request has to fit into a staging buffer.
    fn check_room(&self, blocks: usize) -> Result<(), StoreError> {
        match &self.target {
            Target::Staged(staging) if blocks > staging.slots() as usize => {
                Err(StoreError::Staging { blocks, slots: staging.slots() })
            }
            _ => Ok(()),
        }
    }

    /// Uploads the map in the scratch memory; an empty one needs none.
    fn upload(&mut self, request: &mut Request) -> Result<(), StoreError> {
        if self.scratch.map.is_empty() {
            return Ok(());
        }
        let devices = self.geometry.devices();
        let mut map = std::mem::take(&mut self.scratch.map);
        let uploaded = self.upload_parts(&mut map, devices, request);
        self.scratch.map = map;
        uploaded
    }

    fn upload_parts(
        &mut self,
        map: &mut [Affine],
        devices: u32,
        request: &mut Request,
    ) -> Result<(), StoreError> {
        let staged = matches!(self.target, Target::Staged(_));
        let ring = self.ring()?;
        if staged {
            // The move needs the blocks; for the devices, objects lie by position.
            request.blocks = Some(ring.upload(map.iter().map(|entry| entry.block))?);
            map.iter_mut().zip(0..).for_each(|(entry, position)| entry.block = position);
        }
        request.map = Some(ring.upload_map(map, devices)?);
        Ok(())
    }
}

fn affine(block: BlockId, file: FileId) -> Affine {
    Affine { block: block.0, file: file.0 }
}

/// Whether everything of a writing was stored.
fn verdict(request: &Request) -> Result<(), StoreError> {
    if let Some(failure) = request.failure {
        return Err(StoreError::Transfer { failure });
    }
    if request.map.is_none() {
        return Ok(());
    }
    match request.layers.iter().position(|state| !matches!(state, LayerState::Ended(Ok(_)))) {
        Some(layer) => Err(StoreError::Incomplete { layer: Layer(layer as u32) }),
        None => Ok(()),
    }
}
