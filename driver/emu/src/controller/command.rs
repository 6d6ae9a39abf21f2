//! Commands inside the controller.

use nvme_spec::{sqe::Sqe, status::Status};

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

/// Result of executing a command.
#[derive(Debug)]
pub(super) enum Flow {
    /// The command is finished.
    Done(Outcome),
    /// The command is in the slab, or held elsewhere, and completes later.
    Pending,
}

impl From<Result<Flow, Status>> for Flow {
    fn from(result: Result<Flow, Status>) -> Self {
        result.unwrap_or_else(|status| Self::Done(Outcome::failed(status)))
    }
}

/// A waiting command.
#[derive(Debug)]
pub(super) struct Command {
    pub ticket: Ticket,
    pub wait: Wait,
}

/// The event that a command waits for.
#[derive(Debug)]
pub(super) enum Wait {
    /// A fault's delay. Execution follows the delay, so that its effects are late, too.
    Delay { sqe: Box<Sqe> },
    /// Media operations.
    Media {
        operations: u32,
        /// Status of the first failure.
        failed: Option<Status>,
        bytes: u64,
        /// LBA shift to switch to on success (Format NVM).
        format: Option<u8>,
    },
    /// Completion of the commands of a submission queue that is being deleted.
    Deletion { sqid: u16 },
}

/// Commands by token. Tokens of ended commands are never mistaken for those of later ones.
#[derive(Debug, Default)]
pub(super) struct Slab {
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
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Returns the token that [`Slab::insert`] will assign next.
    #[inline]
    pub(super) fn next_token(&mut self) -> u64 {
        if self.free.is_empty() {
            self.free.push(self.entries.len() as u32);
            self.entries.push(Entry { generation: 0, command: None });
        }
        let index = self.free[self.free.len() - 1];
        token(index, self.entries[index as usize].generation)
    }

    pub(super) fn insert(&mut self, command: Command) -> u64 {
        let next = self.next_token();
        self.free.pop();
        self.entries[next as u32 as usize].command = Some(command);
        next
    }

    pub(super) fn get_mut(&mut self, token: u64) -> Option<&mut Command> {
        let entry = self.entries.get_mut(token as u32 as usize)?;
        if entry.generation != (token >> 32) as u32 {
            return None;
        }
        entry.command.as_mut()
    }

    pub(super) fn remove(&mut self, token: u64) -> Option<Command> {
        self.get_mut(token)?;
        let entry = &mut self.entries[token as u32 as usize];
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(token as u32);
        entry.command.take()
    }

    /// Removes all commands.
    pub(super) fn clear(&mut self) {
        for index in 0..self.entries.len() as u32 {
            let entry = &self.entries[index as usize];
            if entry.command.is_some() {
                self.remove(token(index, entry.generation));
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Command)> {
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
