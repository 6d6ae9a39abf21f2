//! Tests on machines that are directories: nothing here touches the machine they run on.

mod bind;
mod doctor;
mod fixture;
mod kernel;
mod list;
mod persist;
mod recovery;
mod usage;
