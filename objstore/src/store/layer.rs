//! Starting and awaiting the layers of a request, on any thread.

use gio_uring::RawStream;
use kv_catalog::Layer;

use super::{Store, handles::Transfer};
use crate::{
    error::StoreError,
    ids::{LayerDone, Ticket},
    order::Order,
};

impl Store {
    /// Starts moving one layer of a request: to the engine's blocks for a
    /// [`crate::LoadRequest`], from them for a [`crate::StoreRequest`]. Nothing touches the blocks
    /// before `order` allows it; a stream alone means [`Order::InStream`]. Waits while as many
    /// layers are in flight as there may be; otherwise O(1) in the number of blocks, and nothing is
    /// allocated.
    ///
    /// A stream that waits continues even if the layer failed. The contents of its blocks are then
    /// undefined; the ticket reports the failure.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`], and the errors of [`crate::Plane::start`].
    pub fn start<'a>(
        &self,
        transfer: &Transfer,
        layer: Layer,
        order: impl Into<Order<'a>>,
    ) -> Result<Ticket, StoreError> {
        self.own(transfer)?;
        let ticket = transfer.ticket(layer);
        self.inner.plane.start(ticket, order.into())?;
        Ok(ticket)
    }

    /// Moves all layers of a request, and returns their bytes. On return, no device uses the
    /// request's blocks.
    ///
    /// # Errors
    /// Returns the first error of [`Store::wait`], or else that of [`Store::start`], after which no
    /// further layer is started.
    pub fn move_all(&self, transfer: &Transfer) -> Result<u64, StoreError> {
        let mut started = Vec::new();
        let refused = (0..self.shape().layers).map(Layer).try_for_each(|layer| {
            started.push(self.start(transfer, layer, Order::Unordered)?);
            Ok(())
        });
        // Of all layers, also after an error: then nothing uses the blocks any more.
        let done: Vec<_> = started.into_iter().map(|ticket| self.wait(ticket)).collect();
        let moved =
            done.into_iter().map(|done| Ok(done?.bytes)).sum::<Result<u64, StoreError>>()?;
        refused.map(|()| moved)
    }

    /// Refuses a request of another store.
    pub(super) fn own(&self, transfer: &Transfer) -> Result<(), StoreError> {
        if std::sync::Arc::ptr_eq(&transfer.store, &self.inner) {
            Ok(())
        } else {
            Err(StoreError::foreign("request"))
        }
    }

    /// Same as [`crate::Plane::join`].
    ///
    /// # Errors
    /// Same as [`crate::Plane::join`].
    pub fn join(&self, ticket: &Ticket, stream: RawStream) -> Result<(), StoreError> {
        self.inner.plane.join(*ticket, stream)
    }

    /// Same as [`crate::Plane::wait`]. Other threads may use the store meanwhile. After a failed
    /// retrieve, the files that failed are misses.
    ///
    /// # Errors
    /// Same as [`crate::Plane::wait`].
    pub fn wait(&self, ticket: Ticket) -> Result<LayerDone, StoreError> {
        self.inner.plane.wait(ticket)
    }

    /// Same as [`crate::Plane::poll`].
    ///
    /// # Errors
    /// Same as [`crate::Plane::poll`].
    pub fn poll(&self, ticket: &Ticket) -> Result<Option<LayerDone>, StoreError> {
        self.inner.plane.poll(*ticket)
    }
}
