#![allow(clippy::print_stderr, reason = "what was found, for --nocapture")]

mod crash;
mod damage;
mod history;
mod model;
mod plain;
mod salvage;
