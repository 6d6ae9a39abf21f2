//! Histories on a simulated medium: appends, compactions, and reopening.

use std::sync::LazyLock;

use nvme_spec::ids::Lba;

use super::model::{FILES, Model, Numbers, WORDS, change};
use crate::{
    block_io::tests::Medium,
    codec::Codec,
    format::{Plan, format_devices},
    journal::{Appended, Journal, JournalError},
    layout::Region,
    record::Records,
    shape::KvShape,
    superblock::{DeviceIdentity, JournalArea, OnDevice, StoreId, Superblock},
};

/// A small journal, which is full after some dozens of groups.
const HALF_BYTES: u64 = 48 << 10;
const GROUP_BYTES_MAX: u32 = 2 << 10;

/// A medium with a store's superblock and an empty, small journal.
pub fn formatted() -> Medium {
    static FORMATTED: LazyLock<Medium> = LazyLock::new(|| {
        write(2 << 20, FILES, WORDS, |area| {
            (area.half_bytes, area.group_bytes_max) = (HALF_BYTES, GROUP_BYTES_MAX);
        })
    });
    FORMATTED.copy()
}

/// Makes a medium with a journal sized for `files` files with `words` checksums.
pub fn format(bytes: u64, files: u32, words: u32) -> Medium {
    write(bytes, files, words, |_| {})
}

fn write(bytes: u64, files: u32, words: u32, change: impl Fn(&mut JournalArea)) -> Medium {
    let lba_bytes = 512;
    let medium = Medium::new("sim0", bytes, lba_bytes);
    let identity = DeviceIdentity {
        model: [b' '; 40],
        serial: [b'1'; 20],
        nsid: 1,
        nguid: [0; 16],
        eui64: [0; 8],
        lba_bytes,
        namespace_lbas: bytes / u64::from(lba_bytes),
    };
    let region = Region { first: Lba(0), lbas: identity.namespace_lbas, lba_shift: 9 };
    let plan = Plan {
        store: StoreId([1; 16]),
        rank: 0,
        ranks: 1,
        devices: &[(identity, region)],
        shape: KvShape { layers: words, segments: 1, object_bytes: 512, block_tokens: 16 },
        codec: Codec::None,
        catalog: true,
        data: false,
        checksums: true,
        namespaces_max: 4,
        files_max: Some(files),
        capacity_bytes: None,
        group: None,
    };
    let mut superblocks = plan.superblocks().unwrap();
    change(superblocks[0].journal.as_mut().unwrap());
    format_devices(&mut [&mut medium.clone()], &mut superblocks).unwrap();
    medium
}

pub fn superblock(medium: &Medium) -> Result<Superblock, String> {
    match Superblock::read(&mut medium.clone()) {
        Ok(OnDevice::Ours(superblock)) => Ok(*superblock),
        other => Err(format!("{other:?}")),
    }
}

/// Reason why a history ended early.
#[derive(Debug)]
pub enum Ended {
    /// The medium failed, or its loss was detected.
    Found(String),
    /// The state of the store was wrong.
    Wrong(String),
}

impl From<JournalError> for Ended {
    fn from(error: JournalError) -> Self {
        match error {
            JournalError::Full { .. } => Self::Wrong(error.to_string()),
            error => Self::Found(error.to_string()),
        }
    }
}

/// A store in use.
pub struct History {
    pub medium: Medium,
    pub numbers: Numbers,
    journal: Option<Journal>,
    /// The state after each record, from the last opening on.
    states: Vec<Model>,
    /// States up to this one were acknowledged as durable.
    acknowledged: usize,
    /// The state before the last append.
    last_append: usize,
    /// True when the medium keeps acknowledged writes.
    pub is_honest: bool,
    serial: u32,
    /// Next file to be copied by the compaction in progress.
    copied: u32,
    pub compactions: u64,
}

impl History {
    pub fn new(medium: Medium, seed: u64) -> Self {
        Self {
            medium,
            numbers: Numbers(seed),
            journal: None,
            states: vec![Model::default()],
            acknowledged: 0,
            last_append: 0,
            is_honest: true,
            serial: 0,
            copied: 0,
            compactions: 0,
        }
    }

    /// Opens the store, and checks that its state is one of those from `from` on.
    pub fn open(&mut self, from: usize) -> Result<(), Ended> {
        self.journal = None;
        let superblock = superblock(&self.medium).map_err(Ended::Found)?;
        let mut model = Model::default();
        let io = Box::new(self.medium.clone());
        let journal = Journal::open(io, superblock, |record| model.apply(record), |_, _| {})?;
        if !self.states[from..].contains(&model) {
            let (all, at) = (self.states.len(), self.states.iter().position(|s| *s == model));
            return Err(Ended::Wrong(format!("state {at:?} instead of {from}..{all}")));
        }
        self.journal = Some(journal);
        (self.states, self.acknowledged, self.last_append) = (vec![model], 0, 0);
        Ok(())
    }

    /// Opens the store after power loss: everything acknowledged must be there.
    pub fn recover(&mut self) -> Result<(), Ended> {
        let numbers = &mut self.numbers;
        self.medium.restart(&mut |bound| numbers.below(bound));
        self.open(self.acknowledged)
    }

    /// Reopens a store that was not closed. A dishonest medium may have lost the last append.
    pub fn reopen(&mut self) -> Result<(), Ended> {
        self.open(if self.is_honest { self.acknowledged } else { self.last_append })
    }

    /// Closes the store, and reopens it with all that was acknowledged.
    pub fn close_and_open(&mut self) -> Result<(), Ended> {
        self.journal.take().expect("it is open").close()?;
        self.open(self.acknowledged)
    }

    /// Returns true when the last opening succeeded.
    pub fn is_open(&self) -> bool {
        self.journal.is_some()
    }

    /// Reopens, keeping the expected states.
    pub fn check(&mut self) -> Result<(), Ended> {
        let states = self.states.clone();
        let (acknowledged, last_append) = (self.acknowledged, self.last_append);
        let checked = self.reopen();
        (self.states, self.acknowledged, self.last_append) = (states, acknowledged, last_append);
        checked
    }

    pub fn journal(&mut self) -> &mut Journal {
        self.journal.as_mut().expect("it is open")
    }

    fn state(&self) -> &Model {
        self.states.last().expect("there is a first one")
    }

    /// Runs `steps` appends, and compactions as needed.
    pub fn run(&mut self, steps: u32) -> Result<(), Ended> {
        for _ in 0..steps {
            let many = if self.numbers.one_in(12) { 80 } else { 6 };
            self.append(many)?;
            let soon = self.numbers.one_in(12) && self.journal().compaction.is_none();
            if soon || self.journal().wants_compaction() {
                self.journal().begin_compaction()?;
                self.copied = 0;
            }
            while self.journal().copy_due() {
                self.copy()?;
            }
            if self.journal().compaction.is_some() && self.numbers.one_in(4) {
                self.copy()?;
            }
            if self.numbers.one_in(25) {
                match self.numbers.one_in(2) {
                    true => self.close_and_open()?,
                    false => self.reopen()?,
                }
            }
        }
        Ok(())
    }

    /// Makes some changes, as records to be appended.
    fn changes(&mut self, many: u32) -> Result<Vec<u8>, Ended> {
        let mut records = Vec::new();
        for _ in 0..=self.numbers.below(many) {
            self.serial += 1;
            let mut state = self.state().clone();
            let first = records.len();
            change(&state, &mut self.numbers, self.serial, &mut records);
            let record = Records::new(&records[first..]).next().unwrap().unwrap();
            state.apply(record).map_err(Ended::Wrong)?;
            self.states.push(state);
        }
        Ok(records)
    }

    pub fn append(&mut self, many: u32) -> Result<(), Ended> {
        self.last_append = self.acknowledged;
        let records = self.changes(many)?;
        // Sometimes the queue of records overflows.
        let appended = match self.numbers.one_in(40) {
            true => None,
            false => self.append_if_room(&records)?,
        };
        if appended.is_none() {
            self.compact_instead()?;
        }
        if appended != Some(Appended::Permanent) {
            // The snapshot includes these records, and carries those made meanwhile.
            while self.journal().compaction.is_some() {
                self.copy()?;
                let goes_on = self.journal().compaction.is_some() && self.numbers.one_in(2);
                if goes_on {
                    let records = self.changes(many)?;
                    match self.append_if_room(&records)? {
                        None => self.compact_instead()?,
                        appended => assert_eq!(appended, Some(Appended::WithCompaction)),
                    }
                }
            }
        }
        self.acknowledged = self.states.len() - 1;
        Ok(())
    }

    fn append_if_room(&mut self, records: &[u8]) -> Result<Option<Appended>, Ended> {
        match self.journal().append(records) {
            Err(JournalError::Full { .. }) => Ok(None),
            appended => Ok(Some(appended?)),
        }
    }

    fn compact_instead(&mut self) -> Result<(), Ended> {
        self.copied = 0;
        Ok(self.journal().compact_instead()?)
    }

    fn copy(&mut self) -> Result<(), Ended> {
        let count = 1 + self.numbers.below(FILES / 2);
        let piece = self.state().snapshot(self.copied, count);
        self.journal().copy(&piece, 0)?;
        self.copied += count;
        if self.copied >= FILES {
            self.journal().finish_compaction()?;
            self.compactions += 1;
        }
        Ok(())
    }
}
