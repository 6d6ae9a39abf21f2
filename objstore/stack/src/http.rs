//! HTTP/1.1 as far as metrics and control need it: requests and answers that have a length.
//!
//! The other end is not trusted. Head, body and time of a request have limits, and what goes beyond
//! them has an answer of its own; `httparse` reads the head.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileTypeExt as _,
        unix::net::UnixStream,
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
        sockopt,
    },
};

use crate::address::MetricsAddress;

/// Bytes of a request's head, at most.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// Headers of a message, at most.
const HEADERS_MAX: usize = 32;
/// Bytes of a request's body, at most: about 60,000 keys.
pub const BODY_BYTES_MAX: usize = 4 << 20;
/// Bytes of an answer, at most.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Time and bytes for what comes after a request that was refused, so that the answer arrives.
const REST_TIME: Duration = Duration::from_millis(500);
const REST_BYTES_MAX: usize = 1 << 20;
const PIECE_BYTES: usize = 16 << 10;

/// A request.
#[derive(Debug, Default)]
pub struct Asked {
    /// Its method, in capitals.
    pub method: String,
    /// Its path, without a query.
    pub path: String,
    /// Value of the header `Authorization`.
    pub authorization: Option<String>,
    /// Value of the header `Accept`.
    pub accept: String,
    /// Its body.
    pub body: Vec<u8>,
    /// True if no request follows on the connection.
    pub is_last: bool,
}

/// Result of [`Link::receive`].
#[derive(Debug)]
pub enum Received<R> {
    /// A request.
    Request(Asked),
    /// A request that is refused by its head; its body was not read.
    Denied(Asked, R),
    /// The other end has closed the connection, or asks nothing for a while.
    End,
    /// Something that is no request, or beyond a limit: status and reason.
    Refused(u16, String),
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    /// Status.
    pub status: u16,
    /// Type of the body.
    pub content_type: &'static str,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Reply {
    /// Makes one without further headers.
    #[must_use]
    pub fn new(status: u16, content_type: &'static str, body: Vec<u8>) -> Self {
        Self { status, content_type, headers: Vec::new(), body }
    }
}

/// A connection.
#[derive(Debug)]
pub struct Link<S> {
    socket: S,
    /// Time for a request's head, idle time included, and then for its body.
    request_time: Duration,
    /// Time for an answer to be taken.
    answer_time: Duration,
    /// Bytes that were received and not used yet.
    ahead: Vec<u8>,
}

impl<S: AsFd> Link<S> {
    /// Serves a connection with these limits: the time for a request's head, idle time included,
    /// and again for its body; and the time for an answer to be taken.
    pub fn new(socket: S, request_time: Duration, answer_time: Duration) -> Self {
        Self { socket, request_time, answer_time, ahead: Vec::new() }
    }

    /// Receives a request. `admit` looks at its head before the body is read.
    ///
    /// # Errors
    /// Returns an error of the socket.
    pub fn receive<R>(
        &mut self,
        admit: impl FnOnce(&Asked) -> Result<(), R>,
    ) -> io::Result<Received<R>> {
        let until = Instant::now() + self.request_time;
        let refused = |status, why: &str| Ok(Received::Refused(status, why.to_owned()));
        let Head { mut asked, bytes, body_bytes, wants_word } = loop {
            match Head::parse(&self.ahead) {
                Ok(Some(head)) => break head,
                Ok(None) if self.ahead.len() > HEAD_BYTES_MAX => {
                    return refused(431, &format!("a head has {HEAD_BYTES_MAX} bytes at most"));
                }
                Ok(None) => {}
                Err((status, why)) => return Ok(Received::Refused(status, why)),
            }
            let is_idle = self.ahead.is_empty();
            match self.fill(until)? {
                Filled::Some => {}
                Filled::End | Filled::Late if is_idle => return Ok(Received::End),
                Filled::End => return refused(400, "the connection ends inside a request"),
                Filled::Late => return refused(408, "the head did not come in time"),
            }
        };
        self.ahead.drain(..bytes);
        if let Err(refusal) = admit(&asked) {
            return Ok(Received::Denied(asked, refusal));
        }
        if body_bytes > BODY_BYTES_MAX {
            return refused(413, &format!("a body has {BODY_BYTES_MAX} bytes at most"));
        }
        if wants_word && self.ahead.len() < body_bytes {
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        let until = Instant::now() + self.request_time;
        while self.ahead.len() < body_bytes {
            match self.fill(until)? {
                Filled::Some => {}
                Filled::End => return refused(400, "the connection ends inside a body"),
                Filled::Late => return refused(408, "the body did not come in time"),
            }
        }
        asked.body = self.ahead.drain(..body_bytes).collect();
        Ok(Received::Request(asked))
    }

    fn fill(&mut self, until: Instant) -> io::Result<Filled> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Filled::Late);
            }
            sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(left))?;
            let mut piece = [0; PIECE_BYTES];
            match rustix::net::recv(&self.socket, &mut piece, RecvFlags::empty()) {
                Ok((0, _)) => return Ok(Filled::End),
                Ok((count, _)) => {
                    self.ahead.extend_from_slice(&piece[..count]);
                    return Ok(Filled::Some);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Filled::Late),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends an answer.
    ///
    /// # Errors
    /// Returns an error of the socket, also if the answer is not taken in time.
    pub fn reply(&self, reply: &Reply, is_last: bool) -> io::Result<()> {
        let Reply { status, content_type, headers, body } = reply;
        let mut head = format!(
            "HTTP/1.1 {status} {}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n",
            reason(*status),
            body.len()
        );
        let close = is_last.then(|| ("Connection", "close".to_owned()));
        for (name, value) in headers.iter().chain(&close) {
            head += &format!("{name}: {value}\r\n");
        }
        self.send(&[head.as_bytes(), b"\r\n", body].concat())
    }

    fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        let until = Instant::now() + self.answer_time;
        while !bytes.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Send, Some(left))?;
            // A client that has gone must not end the process by a signal.
            match rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Ends a connection after a refused request: takes a part of what still comes, because an
    /// answer may be dropped on the way if the connection is closed with bytes left.
    pub fn end(mut self) {
        // The other end may have closed it already.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        let until = Instant::now() + REST_TIME;
        let mut taken = 0;
        while taken < REST_BYTES_MAX && matches!(self.fill(until), Ok(Filled::Some)) {
            taken += std::mem::take(&mut self.ahead).len();
        }
    }
}

/// Result of waiting for bytes.
enum Filled {
    Some,
    End,
    Late,
}

/// The head of a request.
struct Head {
    asked: Asked,
    bytes: usize,
    body_bytes: usize,
    /// True if the client waits for a word before it sends the body.
    wants_word: bool,
}

impl Head {
    /// Parses a head; `None` if its end has not come yet.
    fn parse(bytes: &[u8]) -> Result<Option<Self>, (u16, String)> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        let head = &bytes[..bytes.len().min(HEAD_BYTES_MAX)];
        let end = match request.parse(head) {
            Ok(httparse::Status::Complete(end)) => end,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => {
                return Err((431, format!("a request has {HEADERS_MAX} headers at most")));
            }
            Err(error) => return Err((400, format!("it is no request of HTTP/1.1: {error}"))),
        };
        let path = request.path.unwrap_or_default();
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        let (method, path) = (request.method.unwrap_or_default().to_owned(), path.to_owned());
        let is_last = request.version == Some(0);
        let mut asked = Asked { method, path, is_last, ..Asked::default() };
        let (mut length, mut wants_word) = (None, false);
        for httparse::Header { name, value } in request.headers.iter() {
            let text = || {
                let text = std::str::from_utf8(value).ok();
                text.ok_or_else(|| (400, format!("the header {name} is not UTF-8")))
            };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => {
                    let text = text()?.trim();
                    let is_number = !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
                    let number = text.parse::<usize>().ok().filter(|_| is_number);
                    // More than fits into a number is too large as well.
                    let number = if is_number { number.or(Some(usize::MAX)) } else { None };
                    if number.is_none() || length.is_some_and(|other| Some(other) != number) {
                        return Err((400, "Content-Length is no number, or two".to_owned()));
                    }
                    length = number;
                }
                "transfer-encoding" => {
                    let why = "a body has a Content-Length here, and no other encoding";
                    return Err((411, why.to_owned()));
                }
                "authorization" => asked.authorization = Some(text()?.to_owned()),
                "accept" => asked.accept = text()?.to_owned(),
                "connection" => asked.is_last |= text()?.eq_ignore_ascii_case("close"),
                "expect" => wants_word = text()?.eq_ignore_ascii_case("100-continue"),
                _ => {}
            }
        }
        Ok(Some(Self { asked, bytes: end, body_bytes: length.unwrap_or(0), wants_word }))
    }
}

/// Returns the words for a status.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    }
}

/// Splits a whole answer into status and body; `None` if it is none, or is cut.
#[must_use]
pub fn parse_answer(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut answer = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(end) = answer.parse(bytes).ok()? else { return None };
    let is_length =
        |header: &&httparse::Header<'_>| header.name.eq_ignore_ascii_case("content-length");
    let length = answer.headers.iter().find(is_length)?;
    let length: usize = std::str::from_utf8(length.value).ok()?.trim().parse().ok()?;
    Some((answer.code?, bytes.get(end..end.checked_add(length)?)?))
}

/// Asks on a new connection, and returns the answer as it came. `headers`: further ones, each with
/// the end of its line. `within`: the time to connect, and for each read and write.
///
/// # Errors
/// Returns an error if nobody listens, or the answer does not come.
pub fn ask(
    address: &MetricsAddress,
    (method, path): (&str, &str),
    headers: &str,
    body: &[u8],
    within: Duration,
) -> io::Result<Vec<u8>> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    let request = [head.as_bytes(), body].concat();
    match address {
        MetricsAddress::Unix(path) => exchange(connect(path, within)?, &request),
        MetricsAddress::Tcp(address) => {
            let stream = TcpStream::connect_timeout(address, within)?;
            stream.set_read_timeout(Some(within))?;
            stream.set_write_timeout(Some(within))?;
            exchange(stream, &request)
        }
    }
}

fn exchange(mut stream: impl Read + Write, request: &[u8]) -> io::Result<Vec<u8>> {
    // A server that refuses early has said why.
    let sent = stream.write_all(request);
    let mut answer = Vec::new();
    let read = stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer);
    if answer.is_empty() {
        sent?;
        read?;
    }
    Ok(answer)
}

/// Connects to the socket of a server, which hangs if it has no room for a connection for the time
/// `within`. That is the time of each read and write afterwards, too.
///
/// # Errors
/// Returns [`io::ErrorKind::TimedOut`] from a server that hangs, [`io::ErrorKind::InvalidInput`]
/// for what is no socket, or what the operating system says.
pub fn connect(path: &Path, within: Duration) -> io::Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    let (stream, address) = (UnixStream::from(socket), SocketAddrUnix::new(path)?);
    stream.set_read_timeout(Some(within))?;
    // On Linux it is that of a connect as well.
    stream.set_write_timeout(Some(within))?;
    match rustix::io::retry_on_intr(|| rustix::net::connect(&stream, &address)) {
        Err(Errno::AGAIN) => {
            let why =
                format!("no connection was taken for {within:.1?}: restart a server that hangs");
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        }
        // Of a file, as of a socket without a server.
        Err(Errno::CONNREFUSED) if path.metadata().is_ok_and(|it| !it.file_type().is_socket()) => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no socket"))
        }
        connected => Ok(connected.map(|()| stream)?),
    }
}

/// Ends a connection that another thread serves.
pub fn hang_up(socket: &OwnedFd) {
    // One that is closed already needs no more.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

#[cfg(test)]
mod tests;
