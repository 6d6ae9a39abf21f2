//! Accounts of users: the things that one takes by all of its clients, and how many it may.
//!
//! A client that is limited alone is not limited at all: its user starts another one. So all that
//! runs out counts to the user. A [`Charge`] is one that a client takes, until it is dropped.

use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU64,
    sync::{Arc, Mutex},
    time::Duration,
};

use kv_catalog::lock;
use objstore::FileId;

use crate::{error::RefusalKind, limit::Limit, refusal::Refusal};

/// Bytes of the server's memory for each position of a prefix, reservation or request, in the
/// tables of catalog and plane.
const POSITION_BYTES: u64 = 64;
/// Bytes for each object of a request: its checksum, in the request and for the devices.
const OBJECT_BYTES: u64 = 8;

/// Returns the bytes of the tables of a request that moves so many blocks of so many objects.
pub(crate) fn request_bytes(blocks: usize, rows: u32) -> u64 {
    blocks as u64 * (POSITION_BYTES + OBJECT_BYTES * u64::from(rows))
}

/// Things that run out, and that clients take and give back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resource {
    /// Clients.
    Clients,
    /// Connections to the socket.
    Connections,
    /// Files that prefixes, reservations and requests keep from being evicted.
    Files,
    /// Bytes of memory for tables of these.
    Memory,
}

/// The most that a user may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) clients: u64,
    pub(crate) connections: u64,
    pub(crate) held_files: u64,
    pub(crate) memory: u64,
    pub(crate) namespaces: u32,
    pub(crate) pins: usize,
    pub(crate) pinned_bytes: u64,
    /// Files of all of its namespaces; `None`: no limit.
    pub(crate) stored_files: Option<u32>,
    /// Bytes a second; `None`: no limit.
    pub(crate) bandwidth: Option<NonZeroU64>,
}

impl Share {
    fn of(&self, what: Resource) -> u64 {
        match what {
            Resource::Clients => self.clients,
            Resource::Connections => self.connections,
            Resource::Files => self.held_files,
            Resource::Memory => self.memory,
        }
    }
}

/// A user.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) uid: u32,
    state: Mutex<State>,
    /// Held while a pin is made: its room is computed from those that there are.
    pub(crate) pinning: Mutex<()>,
}

#[derive(Debug)]
struct State {
    share: Share,
    /// By resource.
    taken: [u64; 4],
    /// Files that are held, by number, and how often.
    held: HashMap<FileId, u32>,
    turn: Option<Limit>,
}

impl State {
    fn left(&self, what: Resource) -> u64 {
        self.share.of(what).saturating_sub(self.taken[what as usize])
    }
}

impl Account {
    pub(crate) fn new(uid: u32, share: Share) -> Arc<Self> {
        let turn = share.bandwidth.map(Limit::new);
        let state = Mutex::new(State { share, taken: [0; 4], held: HashMap::new(), turn });
        Arc::new(Self { uid, state, pinning: Mutex::default() })
    }

    pub(crate) fn share(&self) -> Share {
        lock(&self.state).share
    }

    /// Changes the limits. More than that may be taken already, and stays.
    pub(crate) fn set_share(&self, share: Share) {
        let mut state = lock(&self.state);
        if state.share.bandwidth != share.bandwidth {
            state.turn = share.bandwidth.map(Limit::new);
        }
        state.share = share;
    }

    /// Takes something.
    pub(crate) fn take(self: &Arc<Self>, what: Resource, amount: u64) -> Result<Charge, Refusal> {
        let mut state = lock(&self.state);
        if state.left(what) < amount {
            return Err(self.refusal(&state, what));
        }
        state.taken[what as usize] += amount;
        drop(state);
        Ok(Charge { account: self.clone(), what, amount })
    }

    /// Takes room for up to `positions` leading keys of each rank, before their files are known,
    /// and memory for their tables. Returns the number that fits: at least one, unless none is
    /// asked for.
    pub(crate) fn hold(
        self: &Arc<Self>,
        positions: usize,
        ranks: usize,
    ) -> Result<(usize, Held), Refusal> {
        let each = ranks.max(1) as u64;
        let mut state = lock(&self.state);
        let by_files = state.left(Resource::Files) / each;
        let by_memory = state.left(Resource::Memory) / (each * POSITION_BYTES);
        let fits = (positions as u64).min(by_files).min(by_memory);
        if fits == 0 && positions > 0 {
            let what = if by_files == 0 { Resource::Files } else { Resource::Memory };
            return Err(self.refusal(&state, what));
        }
        let mut held = Held { account: self.clone(), count: 0, named: Vec::new() };
        held.take(&mut state, fits * each, Vec::new());
        Ok((fits as usize, held))
    }

    /// Same, of files that are known, of each rank: one that the user holds already takes no room.
    pub(crate) fn hold_files(
        self: &Arc<Self>,
        ranks: &[&[FileId]],
    ) -> Result<(usize, Held), Refusal> {
        let mut state = lock(&self.state);
        let positions = ranks.iter().map(|files| files.len()).max().unwrap_or(0);
        let (mut files, mut memory) = (state.left(Resource::Files), state.left(Resource::Memory));
        let (mut named, mut known, mut fits) = (Vec::new(), HashSet::new(), 0);
        for at in 0..positions {
            let of_ranks = ranks.iter().filter_map(|files| files.get(at).copied());
            let is_new = |file: &FileId| !state.held.contains_key(file) && known.insert(*file);
            let new = of_ranks.clone().filter(is_new).count() as u64;
            let bytes = of_ranks.clone().count() as u64 * POSITION_BYTES;
            if new > files || bytes > memory {
                break;
            }
            (files, memory) = (files - new, memory - bytes);
            named.extend(of_ranks);
            fits = at + 1;
        }
        if fits == 0 && positions > 0 {
            let what = if files == 0 { Resource::Files } else { Resource::Memory };
            return Err(self.refusal(&state, what));
        }
        let mut held = Held { account: self.clone(), count: 0, named: Vec::new() };
        held.take(&mut state, 0, named);
        Ok((fits, held))
    }

    fn refusal(&self, state: &State, what: Resource) -> Refusal {
        let (uid, taken, most) = (self.uid, state.taken[what as usize], state.share.of(what));
        let why = match what {
            Resource::Clients => format!(
                "user {uid} has {taken} of the {most} clients it may have; end some, or raise \
                 `clients` in the user's [[limit]]"
            ),
            Resource::Connections => format!(
                "user {uid} has {taken} of the {most} connections it may have; close some, or \
                 raise `clients` in the user's [[limit]]"
            ),
            Resource::Files => format!(
                "user {uid} holds {taken} of the {most} files that its prefixes, reservations and \
                 requests may hold; release some, or raise `held` in the user's [[limit]]"
            ),
            Resource::Memory => format!(
                "user {uid} has prefixes, reservations and requests whose tables take {taken} of \
                 {most} bytes; end some, or raise `memory` in the user's [[limit]]"
            ),
        };
        Refusal::new(RefusalKind::Limit, why)
    }

    /// Returns how long a layer of so many bytes has to wait that one of the clients starts now, or
    /// `None` if that is longer than `wait_max`.
    pub(crate) fn wait_for_turn(
        &self,
        bytes: u64,
        now: Duration,
        wait_max: Duration,
    ) -> Option<Duration> {
        let turn = &mut lock(&self.state).turn;
        turn.as_mut().map_or(Some(Duration::ZERO), |turn| turn.take(bytes, now, wait_max))
    }
}

/// Something that counts to a user until it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<Account>,
    what: Resource,
    amount: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        lock(&self.account.state).taken[self.what as usize] -= self.amount;
    }
}

/// Files that are held, and the memory for their tables, which count until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    account: Arc<Account>,
    /// Files that are not known by number.
    count: u64,
    named: Vec<FileId>,
}

impl Held {
    /// Sets the files to those that are held in fact.
    pub(crate) fn name(&mut self, files: Vec<FileId>) {
        let account = self.account.clone();
        let mut state = lock(&account.state);
        self.give_back(&mut state);
        self.take(&mut state, 0, files);
    }

    fn take(&mut self, state: &mut State, count: u64, named: Vec<FileId>) {
        let mut new = count;
        for file in &named {
            let held = state.held.entry(*file).or_insert(0);
            *held += 1;
            new += u64::from(*held == 1);
        }
        state.taken[Resource::Files as usize] += new;
        (self.count, self.named) = (count, named);
        state.taken[Resource::Memory as usize] += self.bytes();
    }

    fn give_back(&mut self, state: &mut State) {
        state.taken[Resource::Memory as usize] -= self.bytes();
        let mut gone = std::mem::take(&mut self.count);
        for file in std::mem::take(&mut self.named) {
            let held = state.held.get_mut(&file).expect("it was taken");
            *held -= 1;
            if *held == 0 {
                state.held.remove(&file);
                gone += 1;
            }
        }
        state.taken[Resource::Files as usize] -= gone;
    }

    fn bytes(&self) -> u64 {
        (self.count + self.named.len() as u64) * POSITION_BYTES
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let account = self.account.clone();
        self.give_back(&mut lock(&account.state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_given_back() {
        let share = Share {
            clients: 2,
            connections: 40,
            held_files: 10,
            memory: 8 * POSITION_BYTES,
            namespaces: 1,
            pins: 1,
            pinned_bytes: 0,
            stored_files: None,
            bandwidth: NonZeroU64::new(1000),
        };
        let account = Account::new(1001, share);
        let all = account.take(Resource::Clients, 2).unwrap();
        let refused = account.take(Resource::Clients, 1).unwrap_err();
        assert!(refused.message.contains("user 1001 has 2 of the 2 clients"), "{refused:?}");
        drop(all);
        account.take(Resource::Clients, 1).unwrap();
        // Four positions of two ranks are the memory that there is, and not the files.
        let (positions, mut held) = account.hold(6, 2).unwrap();
        assert_eq!(positions, 4);
        let refused = account.hold(1, 2).unwrap_err();
        assert!(refused.message.contains("`memory`"), "{refused:?}");
        held.name([1, 2].map(FileId).to_vec());
        assert_eq!(account.hold(6, 2).unwrap().0, 3);
        account.set_share(Share { held_files: 1, ..share });
        let refused = account.hold(6, 1).unwrap_err();
        assert!(refused.message.contains("holds 2 of the 1 files"), "{refused:?}");
        assert_eq!(account.hold(0, 1).unwrap().0, 0, "nothing needs no room");
        drop(held);
        assert_eq!(account.hold(6, 1).unwrap().0, 1);
        // A file that is held already is held again for nothing.
        account.set_share(Share { held_files: 3, ..share });
        let files = [5, 6, 7, 8].map(FileId);
        let (positions, one) = account.hold_files(&[&files[..1], &files[1..2]]).unwrap();
        assert_eq!(positions, 1);
        let (positions, mut other) = account.hold_files(&[&files]).unwrap();
        assert_eq!(positions, 3);
        assert!(account.hold_files(&[&files[3..]]).is_err());
        assert_eq!(account.hold_files(&[&[files[2]; 3]]).unwrap().0, 3, "one file");
        drop(one);
        assert!(account.hold_files(&[&files[3..]]).is_err(), "the other one holds them, too");
        other.name(files[2..3].to_vec());
        assert_eq!(account.hold_files(&[&files[1..]]).unwrap().0, 3);
        // All clients have the same turn.
        let (second, wait) = (Duration::from_secs(1), Duration::from_secs(5));
        assert_eq!(account.wait_for_turn(1000, second, wait), Some(Duration::ZERO));
        assert_eq!(account.wait_for_turn(1000, second, wait), Some(second));
    }
}
