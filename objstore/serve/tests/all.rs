//! Servers and clients in one process.

mod engine;
mod rig;
mod serve;
