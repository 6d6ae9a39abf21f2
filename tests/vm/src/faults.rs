//! Faults of real machines: stray DMA, lost queues, media errors, commands that never complete,
//! killed processes, pulled drives.

mod dma;
mod media;
mod owners;
mod removal;
mod timeouts;

use std::fs;

use anyhow::Result;
use nvme_driver::{Controller, Error};

use crate::runner::{SECONDS_MAX, Suite, tests, until};

use dma::{
    a_lost_completion_queue_is_recovered, a_lost_submission_queue_is_recovered,
    freed_memory_is_out_of_reach, stray_reads_are_stopped, stray_writes_are_stopped,
};
use media::{an_lba_that_cannot_be_read, an_lba_that_cannot_be_written};
use owners::{
    a_killed_process_leaves_a_usable_drive, a_lock_limit_is_explained,
    a_user_without_rights_drives_a_drive, one_drive_has_one_owner,
};
use removal::{a_lost_link_ends_in_an_error, a_pulled_drive, wanted_back_by_its_driver};
use timeouts::{
    a_held_command_is_aborted, a_slow_command_costs_its_queue, an_abandoned_command_stays_away,
};

pub use owners::{hammer, hold, read_one};

pub const SUITE: Suite = Suite {
    name: "faults",
    seconds_max: SECONDS_MAX,
    tests: tests![
        stray_reads_are_stopped,
        stray_writes_are_stopped,
        freed_memory_is_out_of_reach,
        a_lost_completion_queue_is_recovered,
        a_lost_submission_queue_is_recovered,
        an_lba_that_cannot_be_read,
        an_lba_that_cannot_be_written,
        a_held_command_is_aborted,
        an_abandoned_command_stays_away,
        a_slow_command_costs_its_queue,
        one_drive_has_one_owner,
        a_user_without_rights_drives_a_drive,
        a_lock_limit_is_explained,
        a_killed_process_leaves_a_usable_drive,
        wanted_back_by_its_driver,
        a_lost_link_ends_in_an_error,
        // Must be last: the drive is gone afterwards.
        a_pulled_drive,
    ],
};

/// Waits until the controller reports a fatal error.
fn wait_until_fatal(drive: &mut Controller) -> Result<()> {
    until("the drive says that it failed", || match drive.poll_events() {
        Err(Error::Fatal { .. }) => Ok(true),
        Err(other) => Err(other.into()),
        Ok(_) => Ok(false),
    })
}

/// Waits for a file that another process creates.
fn wait_for_file(path: &str) -> Result<()> {
    until("somebody has made the file", || Ok(fs::metadata(path).is_ok()))
}
