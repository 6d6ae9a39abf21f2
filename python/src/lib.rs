//! The Python package of Ripieno: `ripieno._ripieno`, which `ripieno` re-exports.
//!
//! # Architecture
//! - [`Catalog`] is for an engine's scheduler, [`Plane`] for each worker; [`Store`] is both, for
//!   an engine of one process. A catalog and its planes exchange numbers and bytes.
//!   [`ServedCatalog`] and [`ServedPlane`] have the same calls over a server's socket.
//! - `arguments.rs`: arguments of callers; `error.rs`: the exceptions of `ripieno/errors.py`;
//!   `events.rs`: from `tracing` to Python's `logging`.
//!
//! # Invariants
//! - Calls that may wait for a device, a disk or a lock held during I/O release the GIL.
//! - No thread of ours takes the GIL: its holder may be waiting for that thread.
//! - The owner of registered memory is kept until no device can reach it.
//! - What a handle needs lives as long as the handle: requests and holds keep their store open.
//! - In a forked process every handle is as if it were closed ([`ripieno_stack::Own`]).
//!
//! # Not implemented
//! - Drives for a `Store`: it is always in a directory.
//! - Use of open objects in a forked process: they belong to the parent.

mod arguments;
mod catalog;
mod error;
mod events;
mod plane;
mod served;
mod store;

use pyo3::prelude::*;

pub use catalog::{Catalog, Reference, Write};
pub use plane::{Plane, Report};
pub use served::{ServedCatalog, ServedPlane};
pub use store::{Held, Request, Store};

#[pymodule]
mod _ripieno {
    use pyo3::{Bound, PyResult, prelude::PyModuleMethods as _, types::PyModule};

    #[pymodule_export]
    use super::events::{end_events, set_event_level, take_events};
    #[pymodule_export]
    use super::{
        Catalog, Held, Plane, Reference, Report, Request, ServedCatalog, ServedPlane, Store, Write,
    };
    #[pymodule_export]
    use super::{
        arguments::{check_options, parse_size},
        catalog::prepare,
        served::server_shape,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::events::install();
        let named = ripieno_stack::METRICS.iter();
        let metrics = named.map(|metric| (metric.name, metric.kind.name(), metric.help));
        module.add("METRICS", metrics.collect::<Vec<_>>())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
