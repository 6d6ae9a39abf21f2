//! Tests of the program, run as a user would.

mod agreement;
mod bench;
mod bench_table;
mod cli;
mod cuda;
mod failures;
mod format;
mod fsck;
mod inputs;
mod keep;
mod metrics;
mod pace;
mod scrub;
mod serve;
mod sim;
mod store_dir;
mod terminal;
