//! LBAs that fail, injected by blkdebug on the host.

use anyhow::{Result, ensure};
use nvme_driver::Error;
use nvme_spec::ids::Lba;
use nvme_spec::status::Status;

use crate::drive::{FIRST, alone, options, pattern, same};
use crate::hardware::{BAD_READ_LBA, BAD_WRITE_LBA, DRIVE_A};

/// Checks that an error names the command, the LBAs and the drive's status.
fn names(error: Result<(), Error>, what: &str, status: Status, lba: u64, lbas: u64) -> Result<()> {
    let Err(error) = error else { anyhow::bail!("{what} of LBA {lba} succeeded") };
    ensure!(error.status().map(Status::code) == Some(status), "{error}");
    let command = error.command().ok_or_else(|| anyhow::anyhow!("no command in: {error}"))?;
    ensure!(command.range == Some((Lba(lba), lbas)), "{error}");
    ensure!(command.nsid == FIRST && command.what == what, "{error}");
    let text = error.to_string();
    ensure!(text.contains(&lba.to_string()) && text.contains(DRIVE_A), "{text}");
    Ok(())
}

pub fn an_lba_that_cannot_be_read() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let (bad, mut block) = (BAD_READ_LBA, [0; 512]);
    let status = Status::UNRECOVERED_READ_ERROR;
    for _ in 0..3 {
        names(drive.read(FIRST, Lba(bad), &mut block), "read", status, bad, 1)?;
        drive.read(FIRST, Lba(bad - 1), &mut block)?;
        drive.read(FIRST, Lba(bad + 1), &mut block)?;
    }
    // A long read of several commands: the error names the failed one.
    let mut many = vec![0; 1 << 20];
    let Err(error) = drive.read(FIRST, Lba(bad - 700), &mut many) else {
        anyhow::bail!("a long read over LBA {bad} succeeded");
    };
    let (lba, lbas) = error.command().and_then(|c| c.range).unwrap_or((Lba(0), 0));
    ensure!((lba.0..lba.0 + lbas).contains(&bad), "{error}");
    // The LBAs around it have the written data.
    let expected = pattern(5, 512 * 700);
    drive.write(FIRST, Lba(bad - 700), &expected, false)?;
    let mut found = vec![0; expected.len()];
    drive.read(FIRST, Lba(bad - 700), &mut found)?;
    same("up to the bad LBA", &found, &expected)
}

pub fn an_lba_that_cannot_be_written() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let (bad, block) = (BAD_WRITE_LBA, pattern(6, 512));
    let status = Status::WRITE_FAULT;
    for _ in 0..3 {
        names(drive.write(FIRST, Lba(bad), &block, false), "write", status, bad, 1)?;
        drive.write(FIRST, Lba(bad + 1), &block, false)?;
    }
    let mut found = [0; 512];
    drive.read(FIRST, Lba(bad), &mut found)?;
    ensure!(found == [0; 512], "a write that failed changed the medium");
    drive.read(FIRST, Lba(bad + 1), &mut found)?;
    same("beside the bad LBA", &found, &block)
}
