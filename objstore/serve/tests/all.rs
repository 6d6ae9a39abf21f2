//! Servers and clients in one process.

mod control;
mod engine;
mod hostile;
mod openapi;
mod paced;
mod rig;
mod serve;
