//! Which file is evicted next: one seam, several answers.

mod lru;

use crate::ids::FileId;

pub use lru::Lru;

/// Decides the order of eviction within each namespace. It never sees keys, references or pins:
/// the catalog asks it for a victim and says which files may go.
pub trait Policy: std::fmt::Debug + Send {
    /// The policy's name, for reports.
    fn name(&self) -> &'static str;

    /// There is one more namespace; the first call makes number 0.
    fn add_namespace(&mut self);

    /// `file` holds a block now. The blocks of a request come tail first.
    fn insert(&mut self, namespace: u32, file: FileId);

    /// `file` was used. The blocks of a request come tail first.
    fn touch(&mut self, namespace: u32, file: FileId);

    /// `file` holds no block any more, or must not be evicted for now.
    fn remove(&mut self, namespace: u32, file: FileId);

    /// Forgets all files of a namespace.
    fn clear(&mut self, namespace: u32);

    /// Takes out the file to be evicted next among those that `may_go`. The catalog asks only if
    /// there is one.
    fn evict(&mut self, namespace: u32, may_go: &dyn Fn(FileId) -> bool) -> Option<FileId>;
}
