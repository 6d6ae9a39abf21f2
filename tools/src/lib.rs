//! The command line of Ripieno. `ripieno replay` drives LLM serving traffic through the whole
//! stack and checks the bytes that come back.
//!
//! # Architecture
//!
//! Each file uses only files below it in this list: there are no circles.
//!
//! ```text
//!   cli       the commands, their help and exit codes
//!   doctor    tests which routes of the data work here
//!   identify  shows devices
//!   format    makes a store, and can undo that
//!   inspect   shows and checks a store that is not open (survey reads it, salvage what is left of
//!             a damaged one, offline has its devices)
//!   scrub     reads all of a store, and compares checksums
//!   sim       simulates serving, and shows what it found
//!   profile   measures devices, and writes a slack table (measure: batches, alone and mixed)
//!   replay    engine (look up, retrieve, store), verify (what is checked), rate (what is
//!             measured), report (one JSON object, or tables)
//!   stack     store and pool, from what ripieno-stack opens: controllers, drives, GPU, routes
//!   drives    what a replay may overwrite on real drives
//!   pool      the KV memory; the CPU or a GPU fills and checks it
//!   keep      where a store stays, and whether it was there before
//!   media     what is behind the software controllers of a replay
//!   sizing    how large the store and the pool are; whether the machine has that
//!   gpu       the GPU as it is reported
//!   plan      the workload as keys; requests come from trace or synthetic
//!   config    the flags, checked; devices: those that name devices and memory
//!   pace      --pace: layer times, speed of the devices, who decides
//!   model     the shape of a block
//!   contents, file, interrupt, machine, problem, progress, size, table, terminal
//! ```
//!
//! # Invariants
//!
//! - The contents of a block follow from its key, layer and segment (`contents`). No copy of what
//!   was stored is kept, so only the store can bring it back.
//! - What is going to be checked is overwritten before it is retrieved: bytes that were not moved
//!   are found.
//! - Data goes to stdout, everything else to stderr; with `--json`, stdout is one JSON object.
//! - The route of the data that the report names was proven before the store used it; a better one
//!   that is not taken is named with the reason.
//! - Bad input is refused before anything is built, and names what to do.
//!
//! # Not implemented
//!
//! - `--executor cuda` has run over a libcuda without a GPU only, never on a GPU. With
//!   real drives it has not run at all: their doorbells, and queues and KV pool mapped by GDRCopy,
//!   are built from parts that are tested one by one.
//! - A peer's memory (`--memory peer:...`) together with `--executor cuda`.
//! - Software controllers and real drives in one store: their DMA has different address spaces.
//! - `--keep`: the order of uses is not kept when a store is closed, only that of commits. A store
//!   that has to evict hits less often at first after it was opened.
//! - `--pace`: preemption, blocks that stay in the GPU's memory, and checking bytes.
//! - The tokens an engine generates: as in the trace's format, only prompts are stored.

mod cli;
mod config;
mod contents;
mod devices;
mod doctor;
mod drives;
mod file;
mod format;
mod gpu;
mod identify;
mod inspect;
mod interrupt;
mod keep;
mod machine;
mod media;
mod model;
mod offline;
mod pace;
mod plan;
mod pool;
mod problem;
mod profile;
mod progress;
mod replay;
mod salvage;
mod scrub;
mod sim;
mod size;
mod sizing;
mod stack;
mod survey;
mod synthetic;
mod table;
mod terminal;
mod trace;

pub use cli::{command, run};
