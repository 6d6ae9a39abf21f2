//! Records that the journal has yet to write, and files that wait for them.

use std::collections::VecDeque;

use crate::{
    ids::{FileId, Lsn},
    record::{Record, USE_BYTES, UseKind},
};

/// Limits on the Use records that wait for the next group: bytes, and their part of the limit for
/// all records. Later uses are not recorded.
const USES_BYTES_MAX: usize = 1 << 18;
const USES_PART: usize = 4;

/// Records handed out together, to be written as one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Encoded records.
    pub records: Vec<u8>,
    /// The position of the last one, to pass to [`super::Catalog::durable`] once it is written.
    pub lsn: Lsn,
    /// Set when the queue of records overflowed. None of them is in `records`: a snapshot that
    /// begins now includes their effect and must be written instead.
    pub needs_snapshot: bool,
}

/// Records in memory, and files that may be reused once those are durable.
#[derive(Debug)]
pub struct Log {
    /// True when there is a journal.
    keeps: bool,
    bytes: Vec<u8>,
    /// Bytes of each record in `bytes`, including the Use records before it.
    lengths: VecDeque<u32>,
    /// Use records behind the last record. Nothing waits for them, and they start no group.
    uses: Vec<u8>,
    /// The last Use record, which may still grow: its first file, count and kind.
    run: Option<(FileId, u32, UseKind)>,
    /// Limit on queued bytes.
    bytes_max: usize,
    /// Set when the queue overflowed and was dropped: only a snapshot has its effect.
    is_dropped: bool,
    /// The last record made.
    last: Lsn,
    durable: Lsn,
    /// Files without a key, each with the record that must be durable before it is free.
    limbo: VecDeque<(Lsn, FileId)>,
}

impl Log {
    pub fn new(keeps: bool) -> Self {
        Self {
            keeps,
            bytes: Vec::new(),
            lengths: VecDeque::new(),
            uses: Vec::new(),
            run: None,
            bytes_max: usize::MAX,
            is_dropped: false,
            last: Lsn(0),
            durable: Lsn(0),
            limbo: VecDeque::new(),
        }
    }

    pub fn last(&self) -> Lsn {
        self.last
    }

    /// Limits the bytes of queued records.
    pub fn limit(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    pub fn push(&mut self, record: &Record<'_>) {
        if !self.keeps {
            return;
        }
        self.last.0 += 1;
        if self.is_dropped {
            return;
        }
        self.end_run();
        let before = self.bytes.len();
        self.bytes.append(&mut self.uses);
        record.encode(&mut self.bytes);
        self.lengths.push_back((self.bytes.len() - before) as u32);
        if self.bytes.len() > self.bytes_max {
            (self.bytes, self.lengths) = (Vec::new(), VecDeque::new());
            self.is_dropped = true;
        }
    }

    /// Records a use. The blocks of a request come tail first, often from one run of files.
    pub fn used(&mut self, file: FileId, how: UseKind) {
        match &mut self.run {
            _ if !self.keeps => {}
            Some((first, count, kind)) if *kind == how && first.0 == file.0 + 1 => {
                (*first, *count) = (file, *count + 1);
            }
            _ => {
                self.end_run();
                let max = USES_BYTES_MAX.min(self.bytes_max / USES_PART);
                self.run = (self.uses.len() < max).then_some((file, 1, how));
            }
        }
    }

    fn end_run(&mut self) {
        if let Some((first, count, how)) = self.run.take() {
            Record::Use { first, count, how }.encode(&mut self.uses);
        }
    }

    /// Returns true when records were made and not taken; uses do not count.
    pub fn is_pending(&self) -> bool {
        self.is_dropped || !self.lengths.is_empty()
    }

    /// Returns true when nothing waits for the next group, not even uses.
    pub fn is_empty(&self) -> bool {
        !self.is_pending() && self.uses.is_empty() && self.run.is_none()
    }

    pub fn pending(&mut self, max_bytes: usize) -> Option<Group> {
        if std::mem::take(&mut self.is_dropped) {
            self.uses.clear();
            self.run = None;
            return Some(Group { records: Vec::new(), lsn: self.last, needs_snapshot: true });
        }
        let (mut records, mut bytes) = (0, 0);
        for length in &self.lengths {
            if records > 0 && bytes + *length as usize > max_bytes {
                break;
            }
            bytes += *length as usize;
            records += 1;
        }
        self.lengths.drain(..records);
        let rest = self.bytes.split_off(bytes);
        if rest.is_empty() && bytes + self.uses.len() + USE_BYTES <= max_bytes {
            self.end_run();
            self.bytes.append(&mut self.uses);
        }
        if self.bytes.is_empty() {
            return None;
        }
        let lsn = Lsn(self.last.0 - self.lengths.len() as u64);
        let records = std::mem::replace(&mut self.bytes, rest);
        Some(Group { records, lsn, needs_snapshot: false })
    }

    /// Retires a dropped file. Returns true when it is free now, because all records made so far
    /// are durable; otherwise it waits in limbo.
    pub fn retire(&mut self, file: FileId) -> bool {
        if self.last == self.durable {
            return true;
        }
        self.limbo.push_back((self.last, file));
        false
    }

    pub fn durable(&mut self, lsn: Lsn) {
        self.durable = self.durable.max(lsn);
    }

    /// Removes the next file from limbo that has become free.
    pub fn leave_limbo(&mut self) -> Option<FileId> {
        let (lsn, file) = *self.limbo.front()?;
        if lsn > self.durable {
            return None;
        }
        self.limbo.pop_front();
        Some(file)
    }

    pub fn limbo(&self) -> u32 {
        self.limbo.len() as u32
    }
}
