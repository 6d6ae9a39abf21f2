//! Ownership of devices that other processes may reach, too, through other controllers.
//!
//! [`kv_catalog::Owner`] has the protocol; here are its times, and the thread that shows that the
//! owner is alive. Devices of one controller need none of this: whoever has that has them alone.

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use kv_catalog::{BlockError, BlockIo as _, FormatError, Owner, OwnerError, Sighting, lock};
use nvme_driver::{Clock, Nanos, wait_until};

use super::block_device::BlockDevice;
use crate::{error::StoreError, watch::Watch};

/// Time between two pulses: a sixth of the default timeout.
const BEAT: Duration = Duration::from_millis(500);

/// Least timeout. With one of 400 ms, another process would see no pulse of an owner that is alive.
const TIMEOUT_MIN: Nanos = Nanos::from_millis(1_000);

/// Time between two looks at another owner.
const LOOK: Nanos = Nanos::from_millis(50);

/// Devices that this process has claimed, and the thread that keeps them. Dropping it closes the
/// claims: nothing may write to the devices any more.
#[derive(Debug)]
pub(crate) struct Ownership {
    kept: Arc<Kept>,
    /// `None` in virtual time.
    thread: Option<Watch>,
}

#[derive(Debug)]
struct Kept {
    owner: Owner,
    media: Mutex<Media>,
    clock: Arc<dyn Clock>,
    /// Time for which no other process takes over after this one was seen to be alive, with half as
    /// much to spare.
    lease: Nanos,
    /// End of that time. Never locked during I/O.
    until: Mutex<Nanos>,
    lost: OnceLock<String>,
}

#[derive(Debug)]
struct Media {
    devices: Vec<BlockDevice>,
    pulses: u64,
}

/// Returns the time that a process waits between its claim and its first read.
pub(super) fn settle(timeout: Nanos) -> Nanos {
    Nanos(timeout.0 / 3)
}

/// Returns an owner other than `own` that is alive, and its device. Waits for up to `timeout`, if
/// there is a claim. Writes nothing.
pub(super) fn living(
    media: &mut [BlockDevice],
    own: &Owner,
    timeout: Nanos,
    clock: &dyn Clock,
) -> Result<Option<(String, Owner)>, BlockError> {
    let look = |medium: &mut BlockDevice| Sighting::take(medium);
    let first: Vec<Sighting> = media.iter_mut().map(look).collect::<Result<_, _>>()?;
    let is_other = |seen: &Sighting| seen.owner.as_ref().is_some_and(|owner| owner.id != own.id);
    if !first.iter().any(is_other) {
        return Ok(None);
    }
    // Looks count, not the time: where everything is slow, so is the other one.
    for _ in 0..=timeout.0 / LOOK.0 {
        for (medium, first) in media.iter_mut().zip(&first) {
            let later = look(medium)?;
            if let Some(owner) = first.living(&later).filter(|owner| owner.id != own.id) {
                return Ok(Some((medium.name().to_owned(), owner.clone())));
            }
        }
        wait_until(clock, clock.now() + LOOK, || false);
    }
    Ok(None)
}

impl Ownership {
    /// Claims devices. In virtual time there is no thread: each use of the store renews the lease.
    ///
    /// # Errors
    /// Returns [`StoreError::Owned`] if another process has one of them open, or takes it at the
    /// same time; [`StoreError::Config`] for an owner without an id, or too short a timeout.
    pub(super) fn take(
        mut media: Vec<BlockDevice>,
        owner: &Owner,
        timeout: Nanos,
        clock: &Arc<dyn Clock>,
        virtual_time: bool,
    ) -> Result<Option<Self>, StoreError> {
        if media.is_empty() {
            return Ok(None);
        }
        if timeout < TIMEOUT_MIN {
            let [found, least] = [timeout, TIMEOUT_MIN].map(|time| time.duration());
            let problem = format!(
                "{found:?} is too short to see that another owner is alive; set at least {least:?}"
            );
            return Err(StoreError::Config { field: "owner_timeout", problem });
        }
        if owner.id == [0; 16] {
            let problem = "other controllers may reach the devices, so the owner needs an id";
            return Err(StoreError::Config { field: "owner", problem: problem.to_owned() });
        }
        let found = living(&mut media, owner, timeout, &**clock).map_err(FormatError::from)?;
        if let Some((device, owner)) = found {
            return Err(StoreError::Owned { device, owner });
        }
        let kept = Arc::new(Kept {
            owner: owner.clone(),
            media: Mutex::new(Media { devices: media, pulses: 0 }),
            clock: clock.clone(),
            lease: Nanos(timeout.0 / 3 * 2),
            until: Mutex::default(),
            lost: OnceLock::new(),
        });
        // From here on its drop closes the claims.
        let mut own = Self { kept, thread: None };
        let Kept { media, .. } = &*own.kept;
        let claimed = lock(media).devices.iter_mut().try_for_each(|medium| owner.claim(medium));
        claimed.map_err(FormatError::from)?;
        wait_until(&**clock, clock.now() + settle(timeout), || false);
        if let Err(OwnerError::Lost { device, by: Some(owner) }) = own.kept.show() {
            return Err(StoreError::Owned { device, owner });
        }
        own.kept.renew()?;
        if !virtual_time {
            own.thread = Some(spawn(own.kept.clone())?);
        }
        tracing::info!(%owner, "the devices can be reached through other controllers; claimed");
        Ok(Some(own))
    }

    /// Checks that this process owns the devices. Does I/O only if it was stopped, or the devices
    /// did not answer, for so long that another one may have taken them over.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if they have another owner, and [`StoreError::Format`] if it
    /// is unknown.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let Kept { lost, clock, until, .. } = &*self.kept;
        if lost.get().is_none() && clock.now() <= *lock(until) {
            return Ok(());
        }
        self.kept.renew()
    }

    /// Gives the devices up and leaves the claims open, as the death of the process does: a device
    /// may still write.
    pub(crate) fn leave(self) {
        lock(&self.kept.media).devices.clear();
    }
}

impl Drop for Ownership {
    fn drop(&mut self) {
        drop(self.thread.take());
        for medium in &mut std::mem::take(&mut lock(&self.kept.media).devices) {
            // A device that was lost has no claim of this process.
            if let Err(OwnerError::Block(error)) = self.kept.owner.release(medium) {
                tracing::warn!(%error, "closing the claim; who opens the store next waits longer");
            }
        }
    }
}

fn spawn(kept: Arc<Kept>) -> Result<Watch, StoreError> {
    let mut has_just_shown = true;
    let beat = move || {
        let is_due = !std::mem::replace(&mut has_just_shown, false);
        let is_lost = is_due && kept.renew().is_err() && kept.lost.get().is_some();
        (!is_lost).then_some(BEAT)
    };
    Watch::spawn("ripieno owner", beat).map_err(|error| StoreError::Failed {
        cause: format!("no thread that shows who owns the devices: {error}"),
    })
}

impl Kept {
    /// Checks the claims, shows that the owner is alive, and renews the lease.
    fn renew(&self) -> Result<(), StoreError> {
        if let Some(cause) = self.lost.get() {
            return Err(StoreError::Failed { cause: cause.clone() });
        }
        let since = self.clock.now();
        match self.show() {
            Ok(()) => {
                let mut until = lock(&self.until);
                *until = (*until).max(since + self.lease);
                Ok(())
            }
            Err(OwnerError::Block(error)) => Err(FormatError::from(error).into()),
            Err(error @ OwnerError::Lost { .. }) => {
                let cause = self.lost.get_or_init(|| error.to_string()).clone();
                tracing::error!(cause, "the store has failed");
                Err(StoreError::Failed { cause })
            }
        }
    }

    /// Checks the claims, and shows that the owner is alive.
    fn show(&self) -> Result<(), OwnerError> {
        let Media { devices, pulses } = &mut *lock(&self.media);
        *pulses += 1;
        for medium in devices {
            self.owner.check(medium)?;
            self.owner.pulse(medium, *pulses)?;
        }
        Ok(())
    }
}
