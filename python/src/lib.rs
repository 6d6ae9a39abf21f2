//! The Python package of Ripieno: `ripieno._ripieno`, which `ripieno` shows under its own name.
//!
//! # Architecture
//! - [`Catalog`]: what an engine's scheduler has; [`Plane`]: what each of its workers has;
//!   [`Store`]: both, for an engine of one process. What passes between a catalog and its planes is
//!   numbers and bytes.
//! - `arguments.rs`: what callers give; `error.rs`: the exceptions of `ripieno/errors.py`;
//!   `events.rs`: from `tracing` to Python's `logging`; `own.rs`: what a forked process leaves
//!   alone.
//!
//! # Invariants
//! - Whatever may wait for a device, a disk or a lock that is held during I/O does so without the
//!   GIL.
//! - No thread of ours takes the GIL: whoever holds it may be waiting for that thread.
//! - The owner of registered memory is kept until no device reaches it.
//!
//! # Not implemented
//! - Drives: a `Store`'s home is a directory.
//! - Use in a process that was forked: what is open there belongs to the other one.

mod arguments;
mod catalog;
mod error;
mod events;
mod own;
mod plane;
mod store;

use pyo3::prelude::*;

pub use catalog::{Catalog, Reference, Write};
pub use plane::{Plane, Report};
pub use store::{Request, Store};

#[pymodule]
mod _ripieno {
    use pyo3::{Bound, PyResult, types::PyModule};

    #[pymodule_export]
    use super::events::{end_events, set_event_level, take_events};
    #[pymodule_export]
    use super::{Catalog, Plane, Reference, Report, Request, Store, Write, catalog::prepare};

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::events::install();
        Ok(())
    }
}
