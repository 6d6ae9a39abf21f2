//! Asks a server: one connection for each request.

use std::{fmt, net::SocketAddr, path::PathBuf, time::Duration};

use ripieno_stack::{MetricsAddress, http};
use serde::{Serialize, de::DeserializeOwned};

use super::Refused;
use crate::{
    error::{ServeError, reach_hint},
    protocol::{self, Answer},
};

/// Time for an answer: longer than the server needs to read what it compares at a time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);

/// Where a server is controlled.
#[derive(Clone, PartialEq, Eq)]
pub enum ControlAddress {
    /// Its socket.
    Unix(PathBuf),
    /// Its TCP port, and the token.
    Tcp(SocketAddr, String),
}

impl fmt::Debug for ControlAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ControlAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address, _) => address.fmt(f),
        }
    }
}

/// Control of a server.
#[derive(Debug)]
pub struct Control {
    address: ControlAddress,
}

impl Control {
    /// Makes it; nothing is asked yet.
    #[must_use]
    pub fn new(address: ControlAddress) -> Self {
        Self { address }
    }

    /// Asks with a body in JSON, or without one, and returns the body of the answer.
    ///
    /// # Errors
    /// Returns [`ServeError::Control`] if no server is there, [`ServeError::Refused`], or
    /// [`ServeError::Lost`].
    pub fn ask(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<String, ServeError> {
        let lost = |why: String| ServeError::Lost { why };
        let body = body.map(serde_json::to_vec).transpose();
        let body = body.map_err(|error| lost(error.to_string()))?.unwrap_or_default();
        let (address, token) = match &self.address {
            ControlAddress::Unix(path) => (MetricsAddress::Unix(path.clone()), String::new()),
            ControlAddress::Tcp(address, token) => {
                (MetricsAddress::Tcp(*address), format!("Authorization: Bearer {token}\r\n"))
            }
        };
        let headers = format!("{token}Content-Type: application/json\r\n");
        let answer = http::ask(&address, (method, path), &headers, &body, ANSWER_TIMEOUT);
        let answer = answer.map_err(|source| {
            let hint = reach_hint(&source);
            ServeError::Control { address: self.address.to_string(), source, hint }
        })?;
        let parsed = http::parse_answer(&answer);
        let Some((status, body)) = parsed else {
            // The server turns connections away before it knows what they are.
            return Err(match protocol::receive_from(&answer) {
                Some(Answer::Refused { kind, message }) => ServeError::Refused { kind, message },
                _ => lost("it is no answer of HTTP".to_owned()),
            });
        };
        let text = String::from_utf8_lossy(body).into_owned();
        if status == 200 {
            return Ok(text);
        }
        match serde_json::from_str(&text) {
            Ok(Refused { kind, message }) => Err(ServeError::Refused { kind, message }),
            Err(_) => Err(lost(format!("the answer {status} is not that of a server"))),
        }
    }

    /// Same as [`Control::ask`], for an answer in JSON.
    ///
    /// # Errors
    /// Same as [`Control::ask`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ServeError> {
        let text = self.ask("GET", path, None::<&()>)?;
        serde_json::from_str(&text).map_err(|error| ServeError::Lost { why: error.to_string() })
    }
}
