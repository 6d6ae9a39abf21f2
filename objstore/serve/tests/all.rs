//! Servers and clients in one process.

mod control;
mod engine;
mod hostile;
mod openapi;
mod rig;
mod serve;
