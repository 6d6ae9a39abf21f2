//! Clusters of KV entries that attention activates together, spread over several drives (Swarm).
//!
//! # Architecture
//! - [`Profile`]: which [`Entry`]s were activated in the last steps; the [distance] of two entries
//!   (section 5.1, steps 1 and 2).
//! - [`Clusters`]: clusters around medoids, by density and radius. An entry is in as many as it is
//!   activated with (section 5.1, steps 3 and 4). [`Clusters::select`]: the index, the best
//!   clusters by a score of their medoids (section 5.2).
//! - [`Placement`]: places of all copies on the drives, round robin (section 5.2, equation 7).
//! - [`retrieve`]: the reads of several clusters, as one batch for each drive (section 6.1).
//! - [`Window`]: assigns new entries to clusters, once their activations are known (section 6.2).
//! - [`Cache`]: the clusters in host memory, by cost-effectiveness (equation 6, section 6.2).
//!
//! # Invariants
//! - No I/O, threads, clock or randomness: the same calls give the same decisions.
//! - Every profiled entry is in a cluster, and each member was within the radius of the medoid when
//!   it came.
//! - A retrieval reads each wanted entry that is not resident once, from a place that has it.
//! - Copies of a cluster differ by one at most between drives.
//! - The cache never has more entries than its capacity.
//!
//! # Not implemented
//! - I/O: a store has the copies as files (`objstore::ClusterCopies`).
//! - Removal of clusters, and their reorganization while serving.
//!
//! [distance]: Profile::distance

mod cache;
mod cluster;
mod placement;
mod profile;
mod retrieval;
mod window;

pub use cache::{Cache, CacheConfig};
pub use cluster::{Cluster, ClusterId, Clusters};
pub use placement::{Drive, Place, Placement};
pub use profile::{Entry, Profile};
pub use retrieval::{Read, retrieve};
pub use window::{Joined, Window};

#[cfg(test)]
mod tests;
