//! Serves the metrics over HTTP, on a Unix socket or a TCP port, by a thread of its own.
//!
//! There is one page, which takes microseconds to write, so connections are served one after the
//! other. A client that sends or takes nothing is dropped after a second, and a slow one after ten.

use std::{
    convert::Infallible,
    io,
    net::TcpListener,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use objstore::{Plane, Store};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, Shutdown, sockopt},
};

use super::{ComputeSaved, MetricsAddress, MetricsPage};
use crate::{error::StackError, socket_file::SocketFile};

/// Longest pause of a client.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Longest time of a client: an endpoint that ends waits for it.
const CLIENT_MAX: Duration = Duration::from_secs(10);
/// Most pieces that a request comes in.
const PIECES_MAX: usize = 8;
/// Most bytes of a piece.
const PIECE_BYTES: usize = 4096;

/// A running endpoint; it ends on drop, after the client that it answers.
#[derive(Debug)]
pub struct Endpoint {
    listener: Arc<OwnedFd>,
    stop: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
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
        let (stop, stopped) = mpsc::channel::<Infallible>();
        let serve = move || {
            loop {
                match rustix::net::accept(&mine) {
                    // A client that went away has no use for an error.
                    Ok(connection) => drop(answer(&connection, &mut page)),
                    Err(Errno::INTR | Errno::CONNABORTED) => {}
                    // Out of descriptors or memory, also if the endpoint ends: this passes, and
                    // must not take a core.
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                        if stopped.recv_timeout(PAUSE_MAX) != Err(RecvTimeoutError::Timeout) {
                            return;
                        }
                    }
                    Err(_) => return,
                }
            }
        };
        let thread = thread::Builder::new().name("ripieno metrics".to_owned()).spawn(serve);
        let thread = Some(thread.map_err(StackError::Watch)?);
        Ok(Self { listener, stop: Some(stop), thread, address, compute_saved, _file: file })
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
        // Ends `accept`, and a pause before it.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        drop(self.stop.take());
        self.thread.take().map(nvme_driver::join);
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
fn answer(connection: &impl AsFd, page: &mut MetricsPage) -> io::Result<()> {
    for timeout in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(connection, timeout, Some(PAUSE_MAX))?;
    }
    let since = Instant::now();
    let mut request = Vec::new();
    for _ in 0..PIECES_MAX {
        let mut piece = [0; PIECE_BYTES];
        let (count, _) = rustix::net::recv(connection, &mut piece, RecvFlags::empty())?;
        request.extend_from_slice(&piece[..count]);
        if count == 0 || request.windows(4).any(|end| end == b"\r\n\r\n") {
            break;
        }
    }
    let request = String::from_utf8_lossy(&request);
    let lines = request.lines().filter_map(|line| line.split_once(':'));
    let accepts = lines.filter(|(name, _)| name.eq_ignore_ascii_case("accept"));
    let accept: String = accepts.map(|(_, value)| value).collect();
    let mut words = request.lines().next().unwrap_or_default().split([' ', '?']);
    let (status, kind, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/metrics")) => {
            let (kind, text) = page.text(&accept);
            ("200 OK", kind, text)
        }
        (Some("GET"), _) => ("404 Not Found", "text/plain", "see /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "text/plain", "only GET is answered\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let whole = head + &body;
    let mut rest = whole.as_bytes();
    while !rest.is_empty() {
        // A client that has gone must not end the process by a signal.
        let sent = rustix::net::send(connection, rest, SendFlags::NOSIGNAL)?;
        if since.elapsed() > CLIENT_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        rest = &rest[sent..];
    }
    Ok(())
}
