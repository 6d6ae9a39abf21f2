//! The proof that a stream moves objects between staging memory and the pool.

use gio_uring::{ScatterGather, Uring};
use nvme_driver::{Clock, Nanos, platform::buffer::Buffer, wait_until};
use nvme_spec::nvm::Direction;

use super::DeviceOnlyMemory;
use kv_catalog::{BlockId, KvShape, Layer, Row};

use crate::{
    config::StoreGpu,
    data_path::Route,
    error::StoreError,
    plane::{
        copier::{Copier, Staging, Until, Uploaded},
        streams::{Refused, Streams},
    },
    registration::KvPool,
};

/// Inputs of the proof.
pub(in crate::plane) struct Proof<'a> {
    pub(in crate::plane) ring: &'a mut Uring,
    pub(in crate::plane) streams: &'a mut Streams,
    pub(in crate::plane) copier: &'a mut Copier,
    pub(in crate::plane) pool: &'a KvPool,
    pub(in crate::plane) shape: &'a KvShape,
    pub(in crate::plane) clock: &'a dyn Clock,
    pub(in crate::plane) timeout: Nanos,
}

/// Proves that the store's own stream moves objects of the first and the last layer to the pool and
/// back: a pattern goes from staging memory to the pool, where copies verify it, and back over
/// different bytes.
pub(in crate::plane) fn prove_scatter_gather(mut proof: Proof<'_>) -> Result<(), StoreError> {
    let gpu = proof.streams.gpu().clone();
    let last = Layer(proof.shape.layers - 1);
    for layer in [Layer(0), last] {
        let moved = proof.layer(&gpu, layer);
        moved.map_err(|why| StoreError::Route {
            path: Route::Staged,
            why: format!("moving objects of layer {layer} on the GPU: {why}"),
        })?;
    }
    Ok(())
}

/// An object of the proof.
struct Object {
    block: BlockId,
    row: Row,
    /// Offset in the staging buffer.
    staged: usize,
    /// Bytes that it must hold.
    pattern: Vec<u8>,
    /// Bytes that the pool held before.
    kept: Vec<u8>,
}

impl Object {
    fn compare(&self, found: &[u8], place: &str) -> Result<(), String> {
        let Self { block, row, pattern, .. } = self;
        match pattern.iter().zip(found).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(format!(
                "in {place}, byte {at} of block {block}, row {row} is {:#04x} instead of {:#04x}",
                found[at], pattern[at]
            )),
        }
    }
}

impl Proof<'_> {
    fn layer(&mut self, gpu: &StoreGpu, layer: Layer) -> Result<(), String> {
        let bytes = self.shape.object_bytes as usize;
        let gpu_memory = DeviceOnlyMemory::new(Some(gpu), self.pool, bytes)?;
        // In reverse order of the pool, so that a move that ignores the table is detected.
        let mut blocks = vec![BlockId(self.pool.blocks() - 1), BlockId(0)];
        blocks.truncate(self.staging()?.slots().min(self.pool.blocks()) as usize);
        let row_bytes = self.staging()?.place(0).1 as usize;
        let objects = self.objects(&gpu_memory, layer, &blocks, row_bytes)?;
        let table = Uploaded::staged(self.ring, blocks.iter().copied());
        let table = table.map_err(|error| error.to_string())?;
        let (pool, staging) = (self.pool, self.staging()?);
        let at = staging.take(None, &table).map_err(|error| error.to_string())?;
        let slice = staging.slice(at, pool).map_err(|error| error.to_string())?;
        let mut staged =
            Buffer::new(slice).ok_or("staging memory is out of this process's reach")?;
        let mut found = vec![0; bytes];
        for object in &objects {
            staged.write(object.staged, &object.pattern).map_err(|error| error.to_string())?;
        }
        self.copy_objects(at, self.copier.staged(at, Direction::Read, layer, &table, None))?;
        for object in &objects {
            gpu_memory.read(self.pool.device(object.block, object.row), &mut found)?;
            object.compare(&found, "the pool")?;
            staged.write(object.staged, &vec![0x5a; bytes]).map_err(|error| error.to_string())?;
        }
        self.copy_objects(at, self.copier.staged(at, Direction::Write, layer, &table, None))?;
        for object in &objects {
            staged.read(object.staged, &mut found).map_err(|error| error.to_string())?;
            object.compare(&found, "staging memory")?;
            gpu_memory.write(self.pool.device(object.block, object.row), &object.kept)?;
        }
        Ok(())
    }

    fn staging(&mut self) -> Result<&mut Staging, String> {
        self.copier.staging.as_mut().ok_or_else(|| "there is no staging memory".to_owned())
    }

    fn objects(
        &self,
        gpu_memory: &DeviceOnlyMemory<'_>,
        layer: Layer,
        blocks: &[BlockId],
        row_bytes: usize,
    ) -> Result<Vec<Object>, String> {
        let (mut objects, bytes) = (Vec::new(), self.shape.object_bytes as usize);
        for (segment, row) in self.shape.layer_rows(layer).map(Row).enumerate() {
            for (position, block) in blocks.iter().enumerate() {
                let mut kept = vec![0; bytes];
                gpu_memory.read(self.pool.device(*block, row), &mut kept)?;
                let salt = u64::from(row.0) << 32 | position as u64;
                objects.push(Object {
                    block: *block,
                    row,
                    staged: segment * row_bytes + position * bytes,
                    pattern: pattern(bytes, salt),
                    kept,
                });
            }
        }
        Ok(objects)
    }

    /// Has the store's own stream move objects, and waits.
    fn copy_objects(&mut self, at: usize, moves: Option<ScatterGather>) -> Result<(), String> {
        let (own, moves) = (self.streams.own(), moves.ok_or("there is no staging memory")?);
        let moved = match self.streams.copy_objects(self.ring, own, [None, None], &moves) {
            Ok(moved) => moved,
            Err(Refused { error, .. }) => return Err(error.to_string()),
        };
        self.staging()?.set_until(at, Until::Reached(moved.clone()));
        if wait_until(self.clock, self.clock.now() + self.timeout, || moved.is_reached()) {
            return Ok(());
        }
        Err(format!("nothing was moved within {} ms", self.timeout.0 / 1_000_000))
    }
}

/// Returns bytes that differ from those of every other object of the proof.
fn pattern(len: usize, salt: u64) -> Vec<u8> {
    let mut state = (salt + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}
