//! Tests of stores over software controllers, and over a model of a GPU.

mod ahead;
mod clusters;
mod dram;
mod dram_gpu;
mod durable;
mod events;
mod faults;
mod flush;
mod gpu;
mod journal;
mod lifetime;
mod model;
mod paced;
mod paced_gpu;
mod pools;
mod rank_flush;
mod rig;
mod routes;
mod runs;
mod schedule;
mod shelf;
mod stack;
mod store;
mod stream_faults;
mod streams;
mod threads;
