//! One module per command.

pub mod abi;
pub mod book;
pub mod c;
pub mod ci;
pub mod coverage;
pub mod cpu;
pub mod documented;
pub mod engine;
pub mod gpu;
pub mod lint;
pub mod mutants;
pub mod package;
pub mod peers;
pub mod ptx;
pub mod python;
pub mod sanitize;
pub mod test;
pub mod vm;
