//! The command line of Ripieno. `ripieno replay` drives LLM serving traffic through the whole stack
//! and checks the data that comes back.
//!
//! # Architecture
//!
//! Each file uses only files below it in this list, so there are no cycles.
//!
//! ```text
//!   cli       the commands, their help and exit codes
//!   doctor    tests which routes of the data work here
//!   identify  shows devices
//!   bench     measures devices, without a store (load: commands in flight; check: of each
//!             measurement; report) and with one (contexts: stores and retrieves whole ones; table:
//!             writes a slack table; measure: batches, alone and mixed; session: the store; rows)
//!   format    makes a store, and can undo that
//!   inspect   shows and checks a closed store (survey reads it, salvage recovers a damaged one,
//!             offline has its devices)
//!   scrub     reads all of a store, and compares checksums
//!   sim       simulates serving, and shows the results
//!   serve     shares a store with other processes; ctl asks and controls it
//!   top       shows a running store (scrape: reads its metrics; figures: of a second)
//!   pace      serves requests at their arrival times, in virtual time (tiers: the store below the
//!             simulator's engine; sweep: by hit rate)
//!   replay    engine (look up, retrieve, store), verify (checks), rate (bandwidth),
//!             report (one JSON object, or tables)
//!   stack     store and pool, on top of ripieno-stack: controllers, drives, GPU, routes
//!   drives    checks of real drives before a replay overwrites them
//!   pool      the KV memory; the CPU or a GPU fills and checks it
//!   keep      the location of a kept store
//!   media     the media of a replay's software controllers
//!   sizing    sizes of the store and the pool, checked against the machine
//!   gpu       the report on the GPU
//!   plan      the workload as keys; requests come from trace or synthetic
//!   config    validated flags; devices: the flags for devices and memory
//!   timing    layer times, bandwidth of the devices, I/O policy
//!   layer_times  layer times that an engine wrote
//!   model     shapes of blocks
//!   manual    manual pages and completion scripts
//!   outcome   named values of a result: its JSON and its tables
//!   contents, file, fio, interrupt, machine, problem, progress, size, table, terminal
//! ```
//!
//! # Invariants
//!
//! - The contents of a block follow from its key, layer and segment (`contents`). No copy is kept,
//!   so only the store can return them.
//! - Memory that is going to be checked is overwritten before the retrieve, so that bytes that were
//!   not moved are detected.
//! - Data goes to stdout, everything else to stderr; with `--json`, stdout is one JSON object.
//! - The route in the report was tested before the store used it; a better route that is not taken
//!   is listed with the reason.
//! - Bad input is rejected before anything is built, with a hint.
//!
//! # Not implemented
//!
//! - `--executor cuda` ran on an H100 with software controllers. With real drives
//!   it has not run at all: their doorbells, and queues and KV pool mapped by GDRCopy, are built
//!   from parts that are tested one by one.
//! - A peer's memory (`--memory peer:...`) together with `--executor cuda`.
//! - Software controllers and real drives in one store: their DMA uses different address spaces.
//! - `--keep`: closing a store preserves the order of commits, not the order of uses. A store that
//!   has to evict has a lower hit rate at first after it is reopened.
//! - `ripieno pace`: preemption, blocks that stay in the GPU's memory, and checking bytes.
//! - Tokens that an engine generates: as in the trace format, only prompts are stored.

mod bench;
mod cli;
mod config;
mod contents;
mod ctl;
mod devices;
mod doctor;
mod drives;
mod file;
pub mod fio;
mod format;
mod gpu;
mod identify;
mod inspect;
mod interrupt;
mod keep;
mod layer_times;
mod machine;
mod manual;
mod media;
mod model;
mod offline;
mod options;
mod outcome;
mod pace;
mod plan;
mod pool;
mod problem;
mod progress;
mod replay;
mod salvage;
mod scrub;
mod serve;
mod sim;
mod size;
mod sizing;
mod stack;
mod survey;
mod synthetic;
mod table;
mod terminal;
#[cfg(test)]
mod tests;
mod timing;
mod top;
pub mod trace;

pub use cli::{command, run};
pub use problem::Problem;
