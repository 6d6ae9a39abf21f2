//! Starting and awaiting the layers of a request, on any thread.

use gio_uring::{Progress, RawStream};
use kv_catalog::Layer;
use nvme_driver::Waiter;

use super::{
    Inner, Store,
    handles::{Handle, Transfer, Writing},
};
use crate::{
    error::StoreError,
    order::Order,
    plane::{LayerDone, Plane, Polled, Ticket},
};

impl Store {
    /// Starts reading one layer of a transfer. O(1) in the number of blocks; nothing is allocated.
    ///
    /// # Errors
    /// Same as [`Plane::start`].
    pub fn retrieve_layer(&self, transfer: &Transfer, layer: Layer) -> Result<Ticket, StoreError> {
        self.start(&transfer.handle, "transfer", layer, Order::Unordered)
    }

    /// Same as [`Store::retrieve_layer`], with an order: nothing writes to the layer's blocks
    /// before `order` allows it. A stream alone means [`Order::InStream`].
    ///
    /// A stream that waits continues even if the layer failed. The contents of its blocks are then
    /// undefined; the ticket reports the failure.
    ///
    /// # Errors
    /// Same as [`Plane::start`].
    pub fn retrieve_layer_on<'a>(
        &self,
        transfer: &Transfer,
        layer: Layer,
        order: impl Into<Order<'a>>,
    ) -> Result<Ticket, StoreError> {
        self.start(&transfer.handle, "transfer", layer, order.into())
    }

    /// Starts writing one layer. O(1) in the number of blocks; nothing is allocated.
    ///
    /// # Errors
    /// Same as [`Plane::start`].
    pub fn store_layer(&self, writing: &Writing, layer: Layer) -> Result<Ticket, StoreError> {
        self.start(&writing.handle, "writing", layer, Order::Unordered)
    }

    /// Same as [`Store::store_layer`], with an order: nothing reads the layer's blocks before
    /// `order` allows it. A stream alone means [`Order::InStream`].
    ///
    /// # Errors
    /// Same as [`Plane::start`].
    pub fn store_layer_on<'a>(
        &self,
        writing: &Writing,
        layer: Layer,
        order: impl Into<Order<'a>>,
    ) -> Result<Ticket, StoreError> {
        self.start(&writing.handle, "writing", layer, order.into())
    }

    fn start(
        &self,
        handle: &Handle,
        what: &'static str,
        layer: Layer,
        order: Order<'_>,
    ) -> Result<Ticket, StoreError> {
        self.own(handle, what)?;
        self.inner.with_plane(|plane| plane.start(handle.job, layer, order))
    }

    /// Refuses a handle of another store.
    pub(super) fn own(&self, handle: &Handle, what: &'static str) -> Result<(), StoreError> {
        if std::sync::Arc::ptr_eq(&handle.store, &self.inner) {
            Ok(())
        } else {
            Err(StoreError::Foreign { what })
        }
    }

    /// Same as [`Plane::join`].
    ///
    /// # Errors
    /// Same as [`Plane::join`].
    pub fn join(&self, ticket: &Ticket, stream: RawStream) -> Result<(), StoreError> {
        self.inner.with_plane(|plane| plane.join(ticket, stream))
    }

    /// Same as [`Plane::wait`]. Other threads may use the store meanwhile. After a failed retrieve,
    /// the files that failed are misses.
    ///
    /// # Errors
    /// Same as [`Plane::wait`].
    pub fn wait(&self, ticket: Ticket) -> Result<LayerDone, StoreError> {
        self.inner.wait_for(&ticket)
    }

    /// Same as [`Plane::poll`].
    ///
    /// # Errors
    /// Same as [`Plane::poll`].
    pub fn poll(&self, ticket: &Ticket) -> Result<Option<LayerDone>, StoreError> {
        self.inner.with_plane(|plane| plane.poll(ticket))
    }

    /// Waits for everything in flight. Failures stay with their requests.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn drain(&self) -> Result<(), StoreError> {
        self.inner.with_plane(Plane::drain)
    }
}

impl Inner {
    pub(super) fn wait_for(&self, ticket: &Ticket) -> Result<LayerDone, StoreError> {
        let clock = &self.clock;
        loop {
            let mut waiter = Waiter::new(&**clock, clock.now() + self.wait_timeout);
            loop {
                match self.with_plane(|plane| plane.poll_layer(ticket))? {
                    Polled::Done(done) => return Ok(done),
                    Polled::Pending(Progress::Moved) => waiter.moved(),
                    Polled::Pending(Progress::Idle) if waiter.wait() => {}
                    Polled::Pending(Progress::Idle) => break,
                }
            }
            self.with_plane(|plane| plane.overdue(ticket))?;
        }
    }
}
