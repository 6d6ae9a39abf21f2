//! Commands inside the controller.

use nvme_driver::Nanos;
use nvme_spec::{admin::AdminOpcode, nvm::NvmOpcode, sqe::Sqe, status::Status};

use crate::media::MediaError;

/// Command fields needed for its completion.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket {
    pub sqid: u16,
    pub cid: u16,
    pub nsid: u32,
    pub opcode: u8,
    /// Fault of the completion entry.
    pub cqe_fault: CqeFault,
    /// Set if the command is in the queue's set of outstanding commands; false for one with a
    /// duplicate identifier.
    pub tracked: bool,
}

impl Ticket {
    /// Returns whether the command is the admin command `which`.
    pub(super) fn is_admin(&self, which: AdminOpcode) -> bool {
        self.sqid == 0 && AdminOpcode(self.opcode) == which
    }

    /// Returns whether the command can change the medium, so that a crash before it differs from
    /// one after it: any command that does not only return data (bits 1:0 of the opcode 10b).
    #[inline]
    pub(super) fn changes_medium(&self) -> bool {
        self.sqid != 0 && self.opcode & 3 != 2
    }
}

/// Faults of a completion entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum CqeFault {
    #[default]
    None,
    Duplicate,
    Cid,
    Phase,
    Sqhd,
    Sqid,
}

/// Result of a command.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome {
    pub status: Status,
    /// Completion dword 0.
    pub dw0: u32,
    /// Bytes transferred to or from the host.
    pub bytes: u64,
}

impl Outcome {
    pub(super) const OK: Self = Self { status: Status::SUCCESS, dw0: 0, bytes: 0 };

    pub(super) const fn dw0(dw0: u32) -> Self {
        Self { dw0, ..Self::OK }
    }

    pub(super) const fn failed(status: Status) -> Self {
        Self { status, ..Self::OK }
    }
}

/// Returns the status of a command whose medium failed.
pub(super) fn status_of(opcode: u8, error: &MediaError) -> Status {
    let reads = matches!(NvmOpcode(opcode), NvmOpcode::READ | NvmOpcode::COMPARE);
    match error {
        MediaError::Os { errno, .. } => {
            nvme_driver::status_of(&std::io::Error::from_raw_os_error(*errno), reads)
        }
        MediaError::Drive { status, .. } => *status,
        MediaError::Failed { .. } if reads => Status::UNRECOVERED_READ_ERROR.with_dnr(),
        MediaError::Failed { .. } => Status::WRITE_FAULT.with_dnr(),
        // Base, "Data Transfer Error": the data could not be copied to or from GPU memory.
        MediaError::Copy(_) | MediaError::GpuLost(_) => Status::DATA_TRANSFER_ERROR,
        _ => Status::INTERNAL_ERROR,
    }
}

/// Result of executing a command.
#[derive(Debug)]
pub(super) enum Flow {
    /// The command is finished.
    Done(Outcome),
    /// The command waits among the [`Commands`].
    Wait(Wait),
    /// The command is held elsewhere, and completes later.
    Held,
}

impl From<Result<Flow, Status>> for Flow {
    fn from(result: Result<Flow, Status>) -> Self {
        result.unwrap_or_else(|status| Self::Done(Outcome::failed(status)))
    }
}

/// The event that a command waits for.
#[derive(Debug)]
pub(super) enum Wait {
    /// A fault's delay. Execution follows the delay, so that its effects are late, too.
    Delay(Box<Sqe>),
    /// Media operations.
    Media(Operations),
    /// Completion of the commands of a submission queue that is being deleted.
    Deletion { sqid: u16 },
}

/// Media operations of a command.
#[derive(Debug)]
pub(super) struct Operations {
    pub pending: u32,
    /// Status of the first failure.
    pub failed: Option<Status>,
    pub bytes: u64,
    /// LBA shift to switch to on success (Format NVM).
    pub format: Option<u8>,
}

/// A waiting command.
#[derive(Debug)]
struct Command {
    ticket: Ticket,
    wait: Wait,
}

/// The commands that wait.
#[derive(Debug, Default)]
pub(super) struct Commands {
    slab: Slab,
    /// Delayed commands as (time, token), unordered: there are few.
    delayed: Vec<(Nanos, u64)>,
    /// Tokens of commands whose media operations have all ended.
    finished: Vec<u64>,
    /// Commands that wait for the deletion of a submission queue.
    deletions: u32,
}

impl Commands {
    /// Returns the number of commands.
    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    /// Returns the tickets of all commands.
    pub(super) fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        self.slab.iter().map(|(_, command)| &command.ticket)
    }

    /// Returns the token that [`Commands::insert`] will assign next.
    #[inline]
    pub(super) fn next_token(&mut self) -> u64 {
        self.slab.next_token()
    }

    pub(super) fn insert(&mut self, ticket: Ticket, wait: Wait) {
        self.deletions += u32::from(matches!(wait, Wait::Deletion { .. }));
        self.slab.insert(Command { ticket, wait });
    }

    /// Holds a command until `time`.
    pub(super) fn delay(&mut self, time: Nanos, ticket: Ticket, sqe: &Sqe) {
        let wait = Wait::Delay(Box::new(*sqe));
        let token = self.slab.insert(Command { ticket, wait });
        self.delayed.push((time, token));
    }

    /// Returns whether there is work at `now` that needs neither media nor doorbells.
    pub(super) fn ready(&self, now: Nanos) -> bool {
        !self.finished.is_empty()
            || self.deletions > 0
            || self.delayed.iter().any(|(time, _)| *time <= now)
    }

    /// Returns the end of the first delay.
    pub(super) fn next_delay(&self) -> Option<Nanos> {
        self.delayed.iter().map(|(time, _)| *time).min()
    }

    /// Takes the command whose delay has passed first, if any has.
    pub(super) fn take_due(&mut self, now: Nanos) -> Option<(Ticket, Box<Sqe>)> {
        loop {
            let due = self.delayed.iter().enumerate().filter(|(_, (time, _))| *time <= now);
            let (index, _) = due.min_by_key(|(_, entry)| **entry)?;
            let (_, token) = self.delayed.swap_remove(index);
            if let Some(Command { ticket, wait: Wait::Delay(sqe) }) = self.slab.remove(token) {
                return Some((ticket, sqe));
            }
        }
    }

    /// Takes a delayed command of queue `sqid` (with this identifier, if one is given), which then
    /// is not executed.
    pub(super) fn take_delayed(&mut self, sqid: u16, cid: Option<u16>) -> Option<Ticket> {
        let place = self.delayed.iter().position(|(_, token)| {
            self.slab.get(*token).is_some_and(|Command { ticket, .. }| {
                ticket.sqid == sqid && cid.is_none_or(|cid| ticket.cid == cid)
            })
        })?;
        let (_, token) = self.delayed.remove(place);
        self.slab.remove(token).map(|command| command.ticket)
    }

    /// Returns the ticket of the command with `token`.
    pub(super) fn ticket(&self, token: u64) -> Option<Ticket> {
        self.slab.get(token).map(|command| command.ticket)
    }

    /// Accounts for an operation that a medium has ended.
    pub(super) fn operation_done(&mut self, token: u64, error: Option<&MediaError>) {
        let Some(Command { ticket, wait: Wait::Media(operations) }) = self.slab.get_mut(token)
        else {
            return;
        };
        operations.pending -= 1;
        if let Some(error) = error {
            operations.failed.get_or_insert_with(|| status_of(ticket.opcode, error));
        }
        if operations.pending == 0 {
            self.finished.push(token);
        }
    }

    /// Takes a command whose media operations have ended.
    pub(super) fn take_finished(&mut self) -> Option<(Ticket, Operations)> {
        while let Some(token) = self.finished.pop() {
            if let Some(Command { ticket, wait: Wait::Media(operations) }) = self.slab.remove(token)
            {
                return Some((ticket, operations));
            }
        }
        None
    }

    /// Takes the deletion of a submission queue that is `ended`.
    pub(super) fn take_deletion(
        &mut self,
        mut ended: impl FnMut(u16) -> bool,
    ) -> Option<(Ticket, u16)> {
        if self.deletions == 0 {
            return None;
        }
        let (token, sqid) = self.slab.iter().find_map(|(token, command)| match command.wait {
            Wait::Deletion { sqid } if ended(sqid) => Some((token, sqid)),
            _ => None,
        })?;
        self.deletions -= 1;
        self.slab.remove(token).map(|command| (command.ticket, sqid))
    }

    /// Drops all commands.
    pub(super) fn clear(&mut self) {
        self.slab.clear();
        self.delayed.clear();
        self.finished.clear();
        self.deletions = 0;
    }
}

/// Commands by token. Tokens of ended commands are never mistaken for those of later ones.
#[derive(Debug, Default)]
struct Slab {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Entry {
    generation: u32,
    command: Option<Command>,
}

impl Slab {
    /// Returns the number of commands.
    fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    #[inline]
    fn next_token(&mut self) -> u64 {
        if self.free.is_empty() {
            self.free.push(self.entries.len() as u32);
            self.entries.push(Entry { generation: 0, command: None });
        }
        let index = self.free[self.free.len() - 1];
        token(index, self.entries[index as usize].generation)
    }

    fn insert(&mut self, command: Command) -> u64 {
        let next = self.next_token();
        self.free.pop();
        self.entries[next as u32 as usize].command = Some(command);
        next
    }

    fn get(&self, token: u64) -> Option<&Command> {
        let entry = self.entries.get(token as u32 as usize)?;
        entry.command.as_ref().filter(|_| entry.generation == (token >> 32) as u32)
    }

    fn get_mut(&mut self, token: u64) -> Option<&mut Command> {
        let entry = self.entries.get_mut(token as u32 as usize)?;
        entry.command.as_mut().filter(|_| entry.generation == (token >> 32) as u32)
    }

    fn remove(&mut self, token: u64) -> Option<Command> {
        self.get(token)?;
        let entry = &mut self.entries[token as u32 as usize];
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(token as u32);
        entry.command.take()
    }

    /// Removes all commands.
    fn clear(&mut self) {
        for index in 0..self.entries.len() as u32 {
            let entry = &self.entries[index as usize];
            if entry.command.is_some() {
                self.remove(token(index, entry.generation));
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, &Command)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| {
            Some((token(index as u32, entry.generation), entry.command.as_ref()?))
        })
    }
}

fn token(index: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(cid: u16) -> Command {
        let cqe_fault = CqeFault::None;
        let ticket = Ticket { sqid: 1, cid, nsid: 1, opcode: 2, cqe_fault, tracked: true };
        Command { ticket, wait: Wait::Deletion { sqid: 1 } }
    }

    #[test]
    fn tokens_are_not_reused() {
        let mut slab = Slab::default();
        let next = slab.next_token();
        let first = slab.insert(command(7));
        assert_eq!(first, next);
        assert_eq!(slab.get_mut(first).unwrap().ticket.cid, 7);
        assert_eq!(slab.remove(first).unwrap().ticket.cid, 7);
        let second = slab.insert(command(8));
        assert_ne!(first, second);
        assert!(slab.get_mut(first).is_none() && slab.remove(first).is_none());
        assert_eq!(slab.iter().map(|(token, _)| token).collect::<Vec<_>>(), [second]);
        slab.clear();
        assert_eq!(slab.len(), 0);
        assert!(slab.get_mut(second).is_none());
    }
}
