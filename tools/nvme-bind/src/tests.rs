//! Tests on machines that are folders: nothing here reads or writes the machine they run on.

mod bind;
mod doctor;
mod fixture;
mod kernel;
mod list;
mod persist;
mod recovery;
mod usage;
