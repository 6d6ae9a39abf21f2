//! Starting and awaiting the layers of a request, on any thread.

use gio_uring::RawStream;
use kv_catalog::Layer;

use super::{
    Store,
    handles::{Handle, LoadRequest, StoreRequest},
};
use crate::{
    error::StoreError,
    ids::{LayerDone, Ticket},
    order::Order,
};

impl Store {
    /// Starts reading one layer of a request. Waits while as many layers are in flight as there may
    /// be; otherwise O(1) in the number of blocks, and nothing is allocated.
    ///
    /// # Errors
    /// Same as [`crate::Plane::start`].
    pub fn retrieve_layer(&self, load: &LoadRequest, layer: Layer) -> Result<Ticket, StoreError> {
        self.start(&load.handle, "load request", layer, Order::Unordered)
    }

    /// Same as [`Store::retrieve_layer`], with an order: nothing writes to the layer's blocks
    /// before `order` allows it. A stream alone means [`Order::InStream`].
    ///
    /// A stream that waits continues even if the layer failed. The contents of its blocks are then
    /// undefined; the ticket reports the failure.
    ///
    /// # Errors
    /// Same as [`crate::Plane::start`].
    pub fn retrieve_layer_on<'a>(
        &self,
        load: &LoadRequest,
        layer: Layer,
        order: impl Into<Order<'a>>,
    ) -> Result<Ticket, StoreError> {
        self.start(&load.handle, "load request", layer, order.into())
    }

    /// Starts writing one layer, as [`Store::retrieve_layer`] starts reading one.
    ///
    /// # Errors
    /// Same as [`crate::Plane::start`].
    pub fn store_layer(&self, save: &StoreRequest, layer: Layer) -> Result<Ticket, StoreError> {
        self.start(&save.handle, "store request", layer, Order::Unordered)
    }

    /// Same as [`Store::store_layer`], with an order: nothing reads the layer's blocks before
    /// `order` allows it. A stream alone means [`Order::InStream`].
    ///
    /// # Errors
    /// Same as [`crate::Plane::start`].
    pub fn store_layer_on<'a>(
        &self,
        save: &StoreRequest,
        layer: Layer,
        order: impl Into<Order<'a>>,
    ) -> Result<Ticket, StoreError> {
        self.start(&save.handle, "store request", layer, order.into())
    }

    fn start(
        &self,
        handle: &Handle,
        what: &'static str,
        layer: Layer,
        order: Order<'_>,
    ) -> Result<Ticket, StoreError> {
        self.own(handle, what)?;
        let ticket = Ticket { job: handle.job, layer };
        self.inner.plane.start(ticket, order)?;
        Ok(ticket)
    }

    /// Reads all layers of a request, and returns their bytes. On return, no device uses the
    /// request's blocks.
    ///
    /// # Errors
    /// Returns the first error of [`Store::wait`], or else that of [`Store::retrieve_layer`], after
    /// which no further layer is started.
    pub fn retrieve_all(&self, load: &LoadRequest) -> Result<u64, StoreError> {
        self.move_all(|layer| self.retrieve_layer(load, layer))
    }

    /// Writes all layers of a request, as [`Store::retrieve_all`] reads them.
    ///
    /// # Errors
    /// Returns the first error of [`Store::wait`], or else that of [`Store::store_layer`].
    pub fn store_all(&self, save: &StoreRequest) -> Result<u64, StoreError> {
        self.move_all(|layer| self.store_layer(save, layer))
    }

    fn move_all(
        &self,
        start: impl Fn(Layer) -> Result<Ticket, StoreError>,
    ) -> Result<u64, StoreError> {
        let mut started = Vec::new();
        let refused = (0..self.shape().layers).map(Layer).try_for_each(|layer| {
            started.push(start(layer)?);
            Ok(())
        });
        // Of all layers, also after an error: then nothing uses the blocks any more.
        let done: Vec<_> = started.into_iter().map(|ticket| self.wait(ticket)).collect();
        let moved =
            done.into_iter().map(|done| Ok(done?.bytes)).sum::<Result<u64, StoreError>>()?;
        refused.map(|()| moved)
    }

    /// Refuses a handle of another store.
    pub(super) fn own(&self, handle: &Handle, what: &'static str) -> Result<(), StoreError> {
        if std::sync::Arc::ptr_eq(&handle.store, &self.inner) {
            Ok(())
        } else {
            Err(StoreError::Foreign { what })
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
