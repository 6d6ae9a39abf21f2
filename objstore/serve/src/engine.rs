//! An engine of several clients: its scheduler finds and reserves blocks, and its ranks move them.
//!
//! A prefix or reservation has a number, which any client of the engine may name in a load or fill.
//! Every rank has files of its own: each has a namespace. A block is found if all ranks have it.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use kv_catalog::lock;
use objstore::{
    BlockKey, FileId, Namespace, NamespaceOwner, Prefix, Reservation, Store, StoreError,
};

use crate::{
    account::{Account, Held},
    error::RefusalKind,
    protocol::Member,
    refusal::{Refusal, unknown},
};

/// Ranks of an engine, at most.
const RANKS_MAX: u32 = 64;
/// Bytes of an engine's name, at most.
const NAME_BYTES_MAX: usize = 256;
/// Prefixes, and reservations, that a client may hold at a time.
const GRANTS_MAX: usize = 4096;
/// Positions of all of these together: each takes memory of the server.
const POSITIONS_MAX: usize = 1 << 20;
/// Attempts to reserve files on all ranks alike, while other engines take them.
const RESERVE_ATTEMPTS: u32 = 4;

/// An engine, by user and name.
pub(crate) type EngineKey = (u32, String);

/// An engine whose clients are connected, and the parts that they are.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) engine: Arc<Engine>,
    pub(crate) parts: BTreeSet<(Option<u32>, u32)>,
}

impl Joined {
    /// Adds a client. Returns the engine, and `None` if another client is that part.
    pub(crate) fn join(&mut self, member: &Member) -> Result<Option<Arc<Engine>>, Refusal> {
        let (found, given) = (self.engine.ranks, member.ranks);
        if found != given {
            let why = format!("engine {} has {found} ranks, and {given} were given", member.engine);
            return Err(Refusal::new(RefusalKind::Argument, why));
        }
        Ok(self.parts.insert((member.rank, member.copy)).then(|| self.engine.clone()))
    }
}

/// Checks what a client says about its engine.
pub(crate) fn check(member: &Member) -> Result<(), Refusal> {
    let Member { engine, ranks, rank, copy } = member;
    let is_named = (1..=NAME_BYTES_MAX).contains(&engine.len());
    let is_part = rank.map_or(*copy == 0, |rank| rank < *ranks && *copy < RANKS_MAX);
    if is_named && (1..=RANKS_MAX).contains(ranks) && is_part {
        return Ok(());
    }
    let why = format!(
        "an engine's name has 1 to {NAME_BYTES_MAX} bytes, and it has 1 to {RANKS_MAX} ranks, each \
         of as many copies; {} bytes, {ranks} ranks, rank {rank:?} and copy {copy} were given",
        engine.len()
    );
    Err(Refusal::new(RefusalKind::Argument, why))
}

/// State that the clients of an engine share.
#[derive(Debug)]
pub(crate) struct Engine {
    ranks: u32,
    grants: Mutex<Grants>,
    activity: Mutex<Activity>,
}

#[derive(Debug, Default)]
struct Grants {
    all: HashMap<u64, Grant>,
    /// How many each session has, and the positions of these together.
    owners: HashMap<u64, (usize, usize)>,
    last: u64,
    /// The last number of those that ended without a call for a time, and that time.
    expired: Option<(u64, Duration)>,
}

impl Grants {
    fn insert(&mut self, number: u64, grant: Grant) {
        let (count, positions) = self.owners.entry(grant.owner).or_default();
        (*count, *positions) = (*count + 1, *positions + grant.files.positions());
        self.all.insert(number, grant);
    }

    fn remove(&mut self, number: u64) -> Option<Grant> {
        let grant = self.all.remove(&number)?;
        let (count, positions) = self.owners.get_mut(&grant.owner).expect("it has this one");
        (*count, *positions) = (*count - 1, *positions - grant.files.positions());
        Some(grant)
    }
}

/// The calls of all clients.
#[derive(Debug, Default)]
struct Activity {
    in_progress: u32,
    /// The end of the latest one.
    last: Duration,
}

/// A prefix or reservation, of each rank.
#[derive(Debug)]
pub(crate) struct Grant {
    /// The session that may end it.
    owner: u64,
    files: Files,
    /// Counts as long as a request moves blocks of it.
    held: Arc<Held>,
}

/// The blocks of a grant, and what keeps them counted.
pub(crate) type Granted<T> = (Arc<T>, Arc<Held>);

#[derive(Debug, Clone)]
enum Files {
    Found(Arc<Vec<Prefix>>),
    Reserved(Arc<Writing>),
}

impl Files {
    /// Returns the number of positions, of which each rank has a part.
    fn positions(&self) -> usize {
        let of_ranks = match self {
            Self::Found(found) => found.iter().map(Prefix::len).max(),
            Self::Reserved(writing) => writing.ranks.iter().map(|rank| rank.accepted()).max(),
        };
        of_ranks.unwrap_or(0)
    }
}

/// A reservation of each rank, and what the ranks reported.
#[derive(Debug)]
pub(crate) struct Writing {
    pub(crate) ranks: Vec<Arc<Reservation>>,
    reported: Mutex<Vec<Option<bool>>>,
}

impl Writing {
    /// Returns true if a rank is to write this position.
    pub(crate) fn has(&self, position: u32) -> bool {
        self.ranks.iter().any(|rank| rank.has(position as usize))
    }
}

impl Engine {
    /// Makes an engine whose numbers begin above `chance`: those of an earlier one are unknown.
    pub(crate) fn new(ranks: u32, chance: u64) -> Self {
        // A client adds 16 bits of a position.
        let grants = Grants { last: chance >> 18, ..Grants::default() };
        Self { ranks, grants: Mutex::new(grants), activity: Mutex::default() }
    }

    /// Notes that a call begins.
    pub(crate) fn begin_call(&self) {
        lock(&self.activity).in_progress += 1;
    }

    /// Notes that a call has ended.
    pub(crate) fn end_call(&self, now: Duration) {
        let mut activity = lock(&self.activity);
        activity.in_progress -= 1;
        activity.last = now;
    }

    /// Returns true if none of its clients has made a call for the time `hold_max`. All that they
    /// hold ends then.
    pub(crate) fn is_idle(&self, now: Duration, hold_max: Duration) -> bool {
        let mut activity = lock(&self.activity);
        // One that was just made has made no call yet.
        if activity.in_progress > 0 || activity.last.is_zero() {
            activity.last = now;
        }
        now.saturating_sub(activity.last) >= hold_max
    }

    /// Takes all prefixes and reservations, because no client has made a call for a time.
    /// `are_more`: requests end, too.
    pub(crate) fn expire(&self, hold_max: Duration, are_more: bool) -> Vec<Grant> {
        let mut grants = lock(&self.grants);
        if are_more || !grants.all.is_empty() {
            grants.expired = Some((grants.last, hold_max));
        }
        grants.owners.clear();
        grants.all.drain().map(|(_, grant)| grant).collect()
    }

    /// Refuses a number that stands for nothing.
    pub(crate) fn unknown(&self, what: &str, number: u64) -> Refusal {
        match lock(&self.grants).expired {
            Some((last, hold_max)) if number <= last => {
                let why = format!(
                    "{what} {number} has ended: what a client holds ends after {} s without a call \
                     (`hold_max`); look the blocks up again",
                    hold_max.as_secs()
                );
                Refusal::new(RefusalKind::Limit, why)
            }
            _ => unknown(what, number),
        }
    }

    /// Returns a number that nothing else of the engine has.
    pub(crate) fn next(&self) -> u64 {
        let mut grants = lock(&self.grants);
        grants.last += 1;
        grants.last
    }

    /// Returns a namespace for each rank.
    pub(crate) fn spaces(
        &self,
        store: &Store,
        named: &Namespace,
        account: &Account,
    ) -> Result<Vec<Store>, Refusal> {
        let owner =
            NamespaceOwner { user: account.uid, namespaces_max: account.share().namespaces };
        let of_rank = |rank| match self.ranks {
            1 => named.clone(),
            ranks => {
                let layout = format!("{} rank {rank} of {ranks}", named.layout);
                Namespace { layout, ..named.clone() }
            }
        };
        (0..self.ranks).map(|rank| Ok(store.within_of(&of_rank(rank), Some(owner))?)).collect()
    }

    /// Finds the longest prefix that all ranks have. Returns its number and length.
    pub(crate) fn look_up(
        &self,
        owner: u64,
        account: &Arc<Account>,
        spaces: &[Store],
        keys: &[BlockKey],
    ) -> Result<(u64, usize), Refusal> {
        let find = |keys| -> Result<Vec<Prefix>, StoreError> {
            spaces.iter().map(|store| store.lookup(keys)).collect()
        };
        let hold = |found: &[Prefix]| {
            let ranks: Vec<&[FileId]> = found.iter().map(Prefix::files).collect();
            account.hold_files(&ranks)
        };
        let mut found = find(keys)?;
        let (fits, mut held) = hold(&found)?;
        if found.iter().any(|prefix| prefix.len() > fits) {
            found = find(&keys[..fits])?;
            // Not held anew beside the first: with little left, that would count both.
            held.name(found.iter().flat_map(|prefix| prefix.files().iter().copied()).collect());
        }
        let blocks = found.iter().map(Prefix::len).min().unwrap_or(0).min(fits);
        Ok((self.grant(owner, Files::Found(Arc::new(found)), held)?, blocks))
    }

    /// Reserves files for the same leading keys on all ranks. Returns the reservation's number, how
    /// many keys it has, and the positions to be written.
    pub(crate) fn reserve(
        &self,
        owner: u64,
        account: &Arc<Account>,
        spaces: &[Store],
        keys: &[BlockKey],
    ) -> Result<(u64, usize, Vec<u32>), Refusal> {
        let (mut accepted, mut held) = account.hold(keys.len(), spaces.len())?;
        for _ in 0..RESERVE_ATTEMPTS {
            let reserve = |store: &Store| store.reserve(&keys[..accepted]);
            let ranks = spaces.iter().map(reserve).collect::<Result<Vec<_>, _>>()?;
            let least = ranks.iter().map(|rank| rank.accepted()).min().unwrap_or(0);
            if ranks.iter().any(|rank| rank.accepted() > least) {
                accepted = least;
                continue;
            }
            held.name(ranks.iter().flat_map(|rank| rank.files()).collect());
            let reported = Mutex::new(vec![None; spaces.len()]);
            let writing = Writing { ranks, reported };
            let positions = (0..least as u32).filter(|at| writing.has(*at)).collect();
            let number = self.grant(owner, Files::Reserved(Arc::new(writing)), held)?;
            return Ok((number, least, positions));
        }
        let why = "other clients take the files that become free; try again later";
        Err(Refusal::new(RefusalKind::Limit, why))
    }

    fn grant(&self, owner: u64, files: Files, held: Held) -> Result<u64, Refusal> {
        let mut grants = lock(&self.grants);
        let (count, positions) = grants.owners.get(&owner).copied().unwrap_or_default();
        if count >= GRANTS_MAX || positions + files.positions() > POSITIONS_MAX {
            drop(grants);
            let why = format!(
                "a client may hold {GRANTS_MAX} prefixes and reservations together, of \
                 {POSITIONS_MAX} keys; release some"
            );
            return Err(Refusal::new(RefusalKind::Limit, why));
        }
        grants.last += 1;
        let number = grants.last;
        grants.insert(number, Grant { owner, files, held: Arc::new(held) });
        Ok(number)
    }

    /// Returns a prefix that a client of the engine found.
    pub(crate) fn prefix(&self, number: u64) -> Result<Granted<Vec<Prefix>>, Refusal> {
        let found = match lock(&self.grants).all.get(&number) {
            Some(Grant { files: Files::Found(found), held, .. }) => {
                Some((found.clone(), held.clone()))
            }
            _ => None,
        };
        found.ok_or_else(|| self.unknown("prefix", number))
    }

    /// Returns a reservation that a client of the engine made.
    pub(crate) fn reservation(&self, number: u64) -> Result<Granted<Writing>, Refusal> {
        let found = match lock(&self.grants).all.get(&number) {
            Some(Grant { files: Files::Reserved(writing), held, .. }) => {
                Some((writing.clone(), held.clone()))
            }
            _ => None,
        };
        found.ok_or_else(|| self.unknown("reservation", number))
    }

    /// Records the report of a rank on a client's reservation, which ends if one has failed, or has
    /// not stored its part.
    pub(crate) fn report(
        &self,
        owner: u64,
        number: u64,
        rank: u32,
        is_filled: bool,
    ) -> Result<Option<bool>, Refusal> {
        let writing = self.own_reservation(owner, number)?;
        let own = writing.ranks.get(rank as usize);
        let is_filled = is_filled && own.is_some_and(|own| own.is_filled());
        let is_good = {
            // A thread that panicked leaves a list that is whole.
            let mut reported = lock(&writing.reported);
            match reported.get_mut(rank as usize) {
                // A failure is not taken back.
                Some(report) => *report = Some(is_filled && *report != Some(false)),
                None => return Err(unknown("rank", rank.into())),
            }
            if reported.contains(&None) {
                return Ok(None);
            }
            !reported.contains(&Some(false))
        };
        if !is_good {
            self.end(owner, number);
        }
        Ok(Some(is_good))
    }

    /// Makes the blocks of a client's reservation visible, durable if asked for, and ends it.
    pub(crate) fn publish(
        &self,
        owner: u64,
        number: u64,
        store: &Store,
        is_durable: bool,
    ) -> Result<(), Refusal> {
        let writing = self.own_reservation(owner, number)?;
        match is_durable {
            true => store.commit_reservations(&writing.ranks)?,
            false => writing.ranks.iter().try_for_each(|rank| store.commit_reservation(rank))?,
        }
        self.end(owner, number);
        Ok(())
    }

    /// Returns a reservation that a client made itself.
    pub(crate) fn own_reservation(&self, owner: u64, number: u64) -> Result<Arc<Writing>, Refusal> {
        let own = match lock(&self.grants).all.get(&number) {
            Some(Grant { owner: found, files: Files::Reserved(writing), .. })
                if *found == owner =>
            {
                Some(writing.clone())
            }
            _ => None,
        };
        own.ok_or_else(|| self.unknown("reservation", number))
    }

    /// Ends a client's prefix or reservation. Returns false if it has none with this number.
    pub(crate) fn end(&self, owner: u64, number: u64) -> bool {
        let mut grants = lock(&self.grants);
        let is_own = grants.all.get(&number).is_some_and(|grant| grant.owner == owner);
        let ended = if is_own { grants.remove(number) } else { None };
        // Files are released without the lock.
        drop(grants);
        ended.is_some()
    }

    /// Ends all of a client's prefixes and reservations.
    pub(crate) fn leave(&self, owner: u64) {
        let ended: Vec<Grant> = {
            let mut grants = lock(&self.grants);
            grants.owners.remove(&owner);
            grants.all.extract_if(|_, grant| grant.owner == owner).map(|(_, ended)| ended).collect()
        };
        drop(ended);
    }

    /// Returns the numbers of a client's prefixes and reservations.
    pub(crate) fn held(&self, owner: u64) -> (u32, u32) {
        let grants = lock(&self.grants);
        let own = grants.all.values().filter(|grant| grant.owner == owner);
        own.fold((0, 0), |(found, reserved), grant| match grant.files {
            Files::Found(_) => (found + 1, reserved),
            Files::Reserved(_) => (found, reserved + 1),
        })
    }
}
