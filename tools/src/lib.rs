//! The command line of Ripieno. `ripieno replay` drives LLM serving traffic through the whole
//! stack and checks the bytes that come back.
//!
//! # Architecture
//!
//! ```text
//!   cli      raw flags -> checked arguments, or a message with a hint and exit code 2
//!   trace, synthetic   -> requests        model -> shape of a block
//!   replay   plan (requests as keys) -> engine (look up, retrieve, store) -> report
//!            pool (the KV memory, and who makes and checks what is in it), verify (what is
//!            checked), rate (what is measured)
//!   drives   real drives and the memory they use; what is on them is not lost by accident
//!   gpu      the GPU, opened once
//!   stack    controllers, driver, pool and store, by the first route of the data that works: the
//!            only place that knows how to build them
//!   identify what a device says about itself
//!   doctor   which routes of the data work here, tried one by one
//!   report   one JSON object, or tables
//! ```
//!
//! # Invariants
//!
//! - The contents of a block follow from its key, layer and segment (`contents`). Nothing that
//!   was stored is remembered, so nothing but the store can bring it back.
//! - What is going to be checked is overwritten before it is retrieved: bytes that nobody moved are
//!   found.
//! - Data goes to stdout, everything else to stderr; with `--json`, stdout is one JSON object.
//! - The route of the data that the report names was proven before the store used it; a better one
//!   that is not taken is named with the reason.
//! - Bad input is refused before anything is built, and names what to do.
//!
//! # Not implemented
//!
//! - `--executor cuda` has run over a libcuda without a GPU only: nobody has seen it on one. With
//!   real drives it has not run at all: their doorbells, and queues and KV pool mapped by GDRCopy,
//!   are built from parts that are tested one by one.
//! - A peer's memory (`--memory peer:...`) together with `--executor cuda`.
//! - Software controllers and real drives in one store: their DMA has different address spaces.
//! - The pace of a trace: requests follow each other at once, one at a time.
//! - The tokens an engine generates: as in the trace's format, only prompts are stored.

mod cli;
mod contents;
mod doctor;
mod drives;
mod gpu;
mod identify;
mod interrupt;
mod machine;
mod memory;
mod model;
mod problem;
mod progress;
mod replay;
mod report;
mod size;
mod stack;
mod synthetic;
mod table;
mod trace;

pub use cli::run;
