//! The connections of a session: each call in progress has one of its own.

use std::{os::unix::net::UnixStream, sync::PoisonError};

use super::{Client, call_on, open, unexpected};
use crate::{
    error::{RefusalKind, ServeError},
    protocol::{Answer, Bytes, CONNECTIONS_MAX, Call},
};

impl Client {
    /// Takes an idle connection, makes another one, or waits if there are as many as there may be,
    /// or as the server takes.
    pub(super) fn take_link(&self, generation: u64) -> Result<UnixStream, ServeError> {
        let (mut links, mut is_refused) = (self.links(), false);
        loop {
            if links.generation != generation {
                return Err(ServeError::Stale);
            }
            if let Some(why) = &links.lost {
                return Err(ServeError::Lost { why: why.clone() });
            }
            if let Some(stream) = links.idle.pop() {
                return Ok(stream);
            }
            if links.open < CONNECTIONS_MAX && !is_refused {
                links.open += 1;
                let session = links.session.clone();
                drop(links);
                match self.attach(session) {
                    Ok(stream) => return Ok(stream),
                    // The session goes on, with the connections that it has.
                    Err(ServeError::Refused {
                        kind: RefusalKind::Limit | RefusalKind::Denied,
                        ..
                    }) => is_refused = true,
                    Err(error) => {
                        // There is no server any more, or another one.
                        let why = error.to_string();
                        self.lose(generation, &why);
                        return Err(ServeError::Lost { why });
                    }
                }
                links = self.links();
                if links.generation == generation {
                    links.open -= 1;
                    self.inner.returned.notify_all();
                }
                continue;
            }
            let waited = self.inner.returned.wait_timeout(links, self.left());
            let (after, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                let why = "no other call ended in time".to_owned();
                return Err(ServeError::Lost { why });
            }
            links = after;
        }
    }

    fn attach(&self, session: Bytes) -> Result<UnixStream, ServeError> {
        let stream = open(&self.inner.path, self.left())?;
        match call_on(&stream, &Call::Attach { session }, None, self.left())? {
            Answer::Done => Ok(stream),
            other => Err(unexpected(&other)),
        }
    }
}
