//! Ends the machine with an exit code.
#![allow(unsafe_code, reason = "port I/O: QEMU's isa-debug-exit has no other door")]

use std::io;

use anyhow::{Context, Result};

/// Port of the device, set in xtask/src/vm/machine.rs.
const PORT: u16 = 0xf4;

/// Ends QEMU with `code << 1 | 1`. Returns only if that fails.
pub fn machine(code: u8) -> Result<()> {
    // Flush the console before the machine stops.
    rustix::termios::tcdrain(io::stdout()).context("the console")?;
    // SAFETY: ioperm takes plain numbers; it gives this thread access to one port.
    let result = unsafe { libc::ioperm(PORT.into(), 1, 1) };
    if result != 0 {
        return Err(io::Error::last_os_error()).context("ioperm");
    }
    // SAFETY: the instruction accesses no memory, and ioperm has allowed it.
    unsafe {
        std::arch::asm!("out dx, al", in("dx") PORT, in("al") code, options(nomem, nostack));
    }
    Ok(())
}
