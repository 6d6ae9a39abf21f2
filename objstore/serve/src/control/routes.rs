//! The requests of control, and what each does.

use std::{collections::BTreeSet, time::Duration};

use kv_catalog::lock;
use nvme_driver::Nanos;
use objstore::{BlockId, BlockKey, Erased, FileId, NamespaceId, NewPin, Prefix, Store, StoreError};
use ripieno_stack::http::{Asked, Reply};
use ripieno_stack::{Request, Size, StackError};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    BlockChecksums, BlockState, Blocks, ChecksumList, ChecksumsAsked, EraseAsked, ErasedPart,
    Hints, Key, Named, Outcome, PinAnswer, PinAsked, QuotaAsked, QuotaStatus, Whole, hints,
};
use crate::{account::Account, error::RefusalKind, refusal::Refusal, shared::Shared};

/// Blocks whose checksums are asked for at a time, at most.
const CHECKSUMS_MAX: usize = 1024;
/// Bytes that are read and compared at a time, at most.
const VERIFIED_BYTES_MAX: u64 = 256 << 20;
/// Bytes that are erased at a time: a request is to take seconds at most.
const ERASED_BYTES: u64 = 256 << 20;

/// Time for which prefetched blocks stay in the DRAM cache.
const PREFETCHED_FOR: Nanos = Nanos::from_millis(60_000);

/// A request that is answered.
pub(crate) struct Route {
    pub(crate) method: &'static str,
    /// In the words of OpenAPI: a last part in braces is a number.
    pub(crate) path: &'static str,
    answer: fn(&Shared, &Asked, u64) -> Result<Reply, Refusal>,
}

const fn route(
    method: &'static str,
    path: &'static str,
    answer: fn(&Shared, &Asked, u64) -> Result<Reply, Refusal>,
) -> Route {
    Route { method, path, answer }
}

/// All requests.
pub(crate) static ROUTES: &[Route] = &[
    route("GET", "/status", |shared, _, _| json(&shared.status()?)),
    route("GET", "/metrics", |shared, asked, _| Ok(shared.metrics(&asked.accept))),
    route("POST", "/directory/lookup", |shared, asked, _| {
        let Named { namespace, keys } = body(asked)?;
        json(&Blocks { blocks: within(shared, namespace.into())?.peek(&plain(&keys)) as u64 })
    }),
    route("GET", "/cache/pins", |shared, _, _| json(&shared.pin_list())),
    route("POST", "/cache/pins", |shared, asked, _| json(&shared.pin(body(asked)?)?)),
    route("DELETE", "/cache/pins/{pin}", |shared, _, pin| json(&shared.unpin(pin)?)),
    route("POST", "/cache/prefetches", |shared, asked, _| json(&shared.prefetch(&body(asked)?)?)),
    route("POST", "/cache/clear", |shared, asked, _| json(&shared.clear(&body(asked)?)?)),
    route("POST", "/cache/erase", |shared, asked, _| json(&shared.erase(body(asked)?)?)),
    route("POST", "/cache/delete", |shared, asked, _| {
        let Named { namespace, keys } = body(asked)?;
        let blocks = within(shared, namespace.into())?.remove(&plain(&keys))?.into();
        shared.stack.store().sync_journal()?;
        json(&Blocks { blocks })
    }),
    route("POST", "/cache/checksums", |shared, asked, _| json(&shared.checksums(&body(asked)?)?)),
    route("GET", "/quota/{namespace}", |shared, _, namespace| json(&shared.quota(namespace)?)),
    route("PUT", "/quota/{namespace}", |shared, asked, namespace| {
        let QuotaAsked { bytes } = body(asked)?;
        let within = within(shared, namespace)?;
        let each = shared.stack.store().geometry().file_bytes().max(1);
        if let Some(few @ 1..) = bytes.filter(|bytes| *bytes < each) {
            let [few, each] = [few, each].map(Size);
            let why = format!("a quota of {few} has room for no block: one has {each}; give more");
            return Err(Refusal::argument(why));
        }
        let files = bytes.map(|bytes| u32::try_from(bytes / each).unwrap_or(u32::MAX));
        within.set_quota(files)?;
        shared.stack.store().sync_journal()?;
        json(&shared.quota(namespace)?)
    }),
    route("POST", "/hints", |shared, asked, _| {
        json(&hints::answer(shared, body::<Hints>(asked)?)?)
    }),
    route("POST", "/reload", |shared, _, _| json(&shared.reload()?)),
];

/// Carries out a request.
pub(crate) fn answer(shared: &Shared, asked: &Asked) -> Result<Reply, Refusal> {
    let mut allowed = Vec::new();
    for Route { method, path, answer } in ROUTES {
        let Some(number) = number_of(path, &asked.path) else { continue };
        if *method == asked.method {
            return answer(shared, asked, number);
        }
        allowed.push(*method);
    }
    if allowed.is_empty() {
        let why = "there is no such path; `ripieno ctl --help` names what there is";
        return Err(Refusal::new(RefusalKind::Missing, why));
    }
    let why = format!("this path has {}", allowed.join(", "));
    Err(Refusal::new(RefusalKind::Method, why))
}

/// Returns the number in a path, or 0 for a path without one; `None` for another path.
fn number_of(pattern: &str, path: &str) -> Option<u64> {
    match pattern.split_once('{') {
        None => (pattern == path).then_some(0),
        Some((fixed, _)) => {
            let digits = path.strip_prefix(fixed)?;
            digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
        }
    }
}

fn body<T: DeserializeOwned>(asked: &Asked) -> Result<T, Refusal> {
    serde_json::from_slice(&asked.body).map_err(|error| Refusal::argument(error.to_string()))
}

pub(crate) fn json(answer: &impl Serialize) -> Result<Reply, Refusal> {
    let body = serde_json::to_vec(answer).map_err(|error| Refusal::argument(error.to_string()))?;
    Ok(Reply { status: 200, content_type: "application/json", headers: Vec::new(), body })
}

fn plain(keys: &[Key]) -> Vec<BlockKey> {
    keys.iter().map(|Key(key)| *key).collect()
}

/// Returns a handle of a namespace.
fn within(shared: &Shared, namespace: u64) -> Result<Store, Refusal> {
    let missing = || {
        let why = format!("there is no namespace {namespace}; ripieno ctl status shows them");
        Refusal::new(RefusalKind::Missing, why)
    };
    let number = u32::try_from(namespace).map_err(|_| missing())?;
    shared.stack.store().in_namespace(NamespaceId(number)).map_err(|error| match error {
        StoreError::Catalog { .. } => missing(),
        error => error.into(),
    })
}

impl Shared {
    /// Pins blocks for a program that controls the server.
    pub(crate) fn pin(&self, asked: PinAsked) -> Result<PinAnswer, Refusal> {
        let PinAsked { namespace, keys, ttl_s, bytes_max, wait } = asked;
        let store = within(self, namespace.into())?;
        let namespaces = &[store.namespace()];
        let (keys, ttl) = (&plain(&keys)[..], Duration::from_secs(ttl_s));
        self.pin_for(&NewPin { owner: 0, namespaces, keys, ttl, bytes_max, wait })
    }

    /// Pins blocks for a client, which is the owner by its number, or for none (0).
    pub(crate) fn pin_for(&self, new: &NewPin<'_>) -> Result<PinAnswer, Refusal> {
        if new.ttl.is_zero() {
            return Err(Refusal::argument("a pin of 0 seconds; give 1 or more"));
        }
        Ok(self.stack.store().pin_for(new, &self.settings().pins)?)
    }

    /// Same for a client, within the limits of its user.
    pub(crate) fn pin_of(&self, account: &Account, new: NewPin<'_>) -> Result<PinAnswer, Refusal> {
        let _alone = lock(&account.pinning);
        let own: BTreeSet<u64> = {
            let state = lock(&self.state);
            let of_user = state.sessions.iter().filter(|(_, it)| it.peer.uid == account.uid);
            of_user.map(|(number, _)| *number).collect()
        };
        let (pins, bytes) = self.stack.store().pins_of(|owner| own.contains(&owner));
        let (share, uid) = (account.share(), account.uid);
        let room = match pins < share.pins {
            true => share.pinned_bytes.saturating_sub(bytes),
            false => 0,
        };
        let asked = new.bytes_max.unwrap_or(u64::MAX);
        let mut answer = self.pin_for(&NewPin { bytes_max: Some(asked.min(room)), ..new })?;
        if room < asked && matches!(answer.outcome, Outcome::Rejected | Outcome::Clipped) {
            let why = format!(
                "user {uid} has {pins} of {} pins, of {bytes} of {} bytes; end some, or raise \
                 `pins` in the user's [[limit]]",
                share.pins, share.pinned_bytes
            );
            answer.reason = Some(answer.reason.map_or(why.clone(), |it| format!("{it}; {why}")));
        }
        Ok(answer)
    }

    /// Ends a pin.
    pub(crate) fn unpin(&self, number: u64) -> Result<Blocks, Refusal> {
        let ended = self.stack.store().end_pins(Some(number), None);
        let missing = || {
            let why = format!("there is no pin {number} any more; ripieno ctl pins shows them");
            Refusal::new(RefusalKind::Missing, why)
        };
        ended.map(|blocks| Blocks { blocks }).ok_or_else(missing)
    }

    /// Reads blocks into the DRAM cache. Returns how many leading ones are there or being read.
    pub(crate) fn prefetch(&self, Named { namespace, keys }: &Named) -> Result<Blocks, Refusal> {
        let store = within(self, (*namespace).into())?;
        if !store.plane().has_dram()? {
            let why = "the server has no DRAM cache to read them into; set store.dram in its \
                       configuration, and restart it";
            return Err(Refusal::new(RefusalKind::Unsupported, why));
        }
        Ok(Blocks { blocks: store.prefetch(&plain(keys), PREFETCHED_FOR)? as u64 })
    }

    fn clear(&self, Whole { namespace, unused }: &Whole) -> Result<Blocks, Refusal> {
        let store = within(self, (*namespace).into())?;
        let blocks = store.usage()?.stored.into();
        match unused {
            false => store.clear()?,
            true => match store.clear_unused()? {
                0 => {}
                used => {
                    let why = format!(
                        "{used} blocks of namespace {namespace} are in use, pinned or being \
                         stored; end the requests and pins (the status shows them), and ask again"
                    );
                    return Err(Refusal::new(RefusalKind::Conflict, why));
                }
            },
        }
        store.sync_journal()?;
        Ok(Blocks { blocks })
    }

    /// Erases files without a block, a part in a call.
    fn erase(&self, EraseAsked { first }: EraseAsked) -> Result<ErasedPart, Refusal> {
        let Erased { next, bytes } = self.stack.store().erase(FileId(first), ERASED_BYTES)?;
        Ok(ErasedPart { next: next.map(|file| file.0), bytes })
    }

    fn quota(&self, namespace: u64) -> Result<QuotaStatus, Refusal> {
        let store = within(self, namespace)?;
        let (usage, each) = (store.usage()?, store.geometry().file_bytes());
        let labels = store.namespaces();
        let label = labels.into_iter().find(|(id, _)| *id == store.namespace());
        Ok(QuotaStatus {
            namespace: store.namespace().0,
            label: label.map(|(_, label)| label).unwrap_or_default(),
            stored_bytes: u64::from(usage.stored) * each,
            quota_bytes: usage.quota_files.map(|files| u64::from(files) * each),
        })
    }

    fn checksums(&self, asked: &ChecksumsAsked) -> Result<ChecksumList, Refusal> {
        let ChecksumsAsked { namespace, keys, verify } = asked;
        let store = within(self, (*namespace).into())?;
        let bytes = (keys.len() as u64).saturating_mul(store.shape().block_bytes());
        if keys.len() > CHECKSUMS_MAX || (*verify && bytes > VERIFIED_BYTES_MAX) {
            let why = format!(
                "{} keys were given, and {CHECKSUMS_MAX} are possible, of which {} are read at a \
                 time; give fewer",
                keys.len(),
                Size(VERIFIED_BYTES_MAX)
            );
            return Err(Refusal::argument(why));
        }
        if *verify && store.superblock().layout.words_per_file == 0 {
            let why = "the store keeps no checksums to compare with; ask without verify";
            return Err(Refusal::new(RefusalKind::Unsupported, why));
        }
        let each = |key: &Key| {
            let held = store.hold_prefix(&[key.0])?;
            let state = match (held.is_empty(), verify) {
                (true, _) => BlockState::Missing,
                (false, false) => BlockState::Stored,
                (false, true) => self.verify(&store, &held)?,
            };
            Ok(BlockChecksums { key: *key, state, checksums: store.checksums(&held) })
        };
        let blocks = keys.iter().map(each).collect::<Result<_, Refusal>>()?;
        Ok(ChecksumList { blocks })
    }

    /// Reads a block from the devices into the server's own pool, which compares its checksums. The
    /// store drops a block that is damaged.
    fn verify(&self, store: &Store, held: &Prefix) -> Result<BlockState, Refusal> {
        let _alone = lock(&self.own_pool);
        let read = Request::retrieve(&store.without_dram(), held, 0, &[BlockId(0)])?.move_all();
        match read {
            Ok(()) => Ok(BlockState::Intact),
            Err(StackError::Store(StoreError::Transfer { failure }))
                if failure.status == gio_uring::IoStatus::Checksum =>
            {
                Ok(BlockState::Damaged)
            }
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_routes_are_described_and_no_others() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/openapi.json");
        let document: serde_json::Value =
            serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let mut described = BTreeSet::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            let methods = operations.as_object().unwrap().keys();
            described.extend(methods.map(|method| (path.clone(), method.to_uppercase())));
        }
        let ours = ROUTES.iter().map(|route| (route.path.to_owned(), route.method.to_owned()));
        assert_eq!(ours.collect::<BTreeSet<_>>(), described);
    }

    #[test]
    fn numbers_of_paths_are_digits() {
        assert_eq!(number_of("/cache/pins", "/cache/pins"), Some(0));
        assert_eq!(number_of("/cache/pins/{pin}", "/cache/pins/17"), Some(17));
        for wrong in ["/cache/pins/", "/cache/pins", "/cache/pins/+1", "/cache/pins/1/2"] {
            assert_eq!(number_of("/cache/pins/{pin}", wrong), None, "{wrong}");
        }
    }
}
