//! Serves the metrics over HTTP, on a Unix socket or a TCP port, by a thread of its own.
//!
//! There is one page, which takes microseconds to write, so connections are served one after the
//! other. A client has a second for its request, and ten to take the answer.

use std::{
    io,
    net::TcpListener,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use objstore::{Plane, Store, Watch};
use rustix::{io::Errno, net::Shutdown};

use super::{ComputeSaved, MetricsPage};
use crate::{
    address::MetricsAddress,
    error::StackError,
    http::{Asked, Link, Received, Reply},
    socket_file::SocketFile,
};

/// Time for a request's head. Other clients wait meanwhile.
const REQUEST_TIME: Duration = Duration::from_secs(1);
/// Time for an answer to be taken: an endpoint that ends waits for it.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Pause while the process has no descriptor left.
const PAUSE: Duration = Duration::from_secs(1);

/// A running endpoint; it ends on drop, after the client that it answers.
#[derive(Debug)]
pub struct Endpoint {
    listener: Arc<OwnedFd>,
    _thread: Watch,
    address: MetricsAddress,
    compute_saved: Arc<ComputeSaved>,
    /// Of a Unix socket; dropped after the thread has ended.
    _file: Option<SocketFile>,
}

impl Endpoint {
    /// Serves the metrics of a store.
    ///
    /// # Errors
    /// Returns [`StackError::Metrics`] if the address cannot be used.
    pub fn of_store(address: &MetricsAddress, store: &Store) -> Result<Self, StackError> {
        Self::start(address, store.plane().clone(), Some(store.clone()))
    }

    /// Serves the metrics of a plane, which has no catalog.
    ///
    /// # Errors
    /// Returns [`StackError::Metrics`] if the address cannot be used.
    pub fn of_plane(address: &MetricsAddress, plane: &Plane) -> Result<Self, StackError> {
        Self::start(address, plane.clone(), None)
    }

    fn start(
        address: &MetricsAddress,
        plane: Plane,
        store: Option<Store>,
    ) -> Result<Self, StackError> {
        let failed = |source| StackError::Metrics { address: address.to_string(), source };
        let (listener, address, file) = listen(address).map_err(failed)?;
        let listener = Arc::new(listener);
        let mut page = MetricsPage::of(plane, store);
        let (mine, compute_saved) = (listener.clone(), page.compute_saved.clone());
        let serve = move || match rustix::net::accept(&mine) {
            // A client that went away has no use for an error.
            Ok(connection) => {
                drop(answer(connection, &mut page));
                Some(Duration::ZERO)
            }
            Err(Errno::INTR | Errno::CONNABORTED) => Some(Duration::ZERO),
            // Out of descriptors or memory, also if the endpoint ends: this passes, and must not
            // take a core.
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => Some(PAUSE),
            Err(_) => None,
        };
        let thread = Watch::spawn("ripieno metrics", serve);
        let thread = thread.map_err(|error| StackError::of_threads(&error))?;
        Ok(Self { listener, _thread: thread, address, compute_saved, _file: file })
    }

    /// Returns the address, with the port that the system chose in place of port 0.
    #[must_use]
    pub fn address(&self) -> &MetricsAddress {
        &self.address
    }

    /// Returns the time that hits saved; the engine adds to it.
    #[must_use]
    pub fn compute_saved(&self) -> &Arc<ComputeSaved> {
        &self.compute_saved
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Ends `accept`; that of the thread ends a pause before it.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
    }
}

fn listen(address: &MetricsAddress) -> io::Result<(OwnedFd, MetricsAddress, Option<SocketFile>)> {
    match address {
        MetricsAddress::Tcp(address) => {
            let listener = TcpListener::bind(address)?;
            let address = MetricsAddress::Tcp(listener.local_addr()?);
            Ok((listener.into(), address, None))
        }
        MetricsAddress::Unix(path) => {
            let (listener, file) = SocketFile::bind(path)?;
            Ok((listener.into(), MetricsAddress::Unix(path.clone()), Some(file)))
        }
    }
}

/// Reads a request and answers it.
fn answer(connection: impl AsFd, page: &mut MetricsPage) -> io::Result<()> {
    let mut link = Link::new(connection, REQUEST_TIME, ANSWER_TIME);
    let text = |status, text: &str| Reply::new(status, "text/plain", text.as_bytes().to_vec());
    // Before a body is read.
    let admit = |asked: &Asked| (asked.method == "GET").then_some(()).ok_or(());
    let reply = match link.receive(admit)? {
        Received::Request(asked) if asked.path == "/metrics" => {
            let (kind, text) = page.text(&asked.accept);
            Reply::new(200, kind, text.into_bytes())
        }
        Received::Request(_) => text(404, "see /metrics\n"),
        Received::Denied(..) => text(405, "only GET is answered\n"),
        Received::Refused(status, why) => text(status, &format!("{why}\n")),
        Received::End => return Ok(()),
    };
    link.reply(&reply, true)
}
