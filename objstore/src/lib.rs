//! GPU-centric object store for KV cache: layout, index, eviction, layer-wise transfer.

mod error;
mod file_pool;
mod ids;
mod index;
mod key;
mod layout;
mod registration;
mod shape;

pub use error::{LayoutError, RegistrationError};
pub use file_pool::FilePool;
pub use ids::{BlockId, DeviceIndex, FileId, Layer, Row, Slot};
pub use index::{Found, Index, IndexCounts, Position};
pub use key::{BlockKey, KeyChain};
pub use layout::{Geometry, ObjectPlace, Region};
pub use registration::KvPool;
pub use shape::KvShape;
