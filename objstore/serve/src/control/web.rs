//! Connections of HTTP: who may ask, and the loop of requests and answers.

use std::{io, os::fd::AsFd, time::Duration};

use kv_catalog::lock;
use ripieno_stack::http::{Asked, Link, Received, Reply};

use super::{Refused, routes};
use crate::{error::RefusalKind, refusal::Refusal, shared::Shared};

/// Time for a request's head, idle time included, and then for its body.
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// Time for an answer to be taken.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// How a client has shown that it may control the server.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Access {
    /// By the user of its process.
    User(u32),
    /// By the token in each request; the number of the connection.
    Token(u64),
}

/// Answers the requests of a connection, until it ends or one is refused as a message. `from` names
/// the other end in the log.
pub(crate) fn serve<S: AsFd>(
    shared: &Shared,
    socket: S,
    access: Access,
    from: &str,
) -> io::Result<()> {
    let mut link = Link::new(socket, REQUEST_TIME, ANSWER_TIME);
    loop {
        let received = link.receive(|asked| admit(shared, access, asked))?;
        let (asked, reply) = match received {
            Received::Request(asked) => {
                let reply = routes::answer(shared, &asked);
                (asked, reply)
            }
            Received::Denied(asked, refusal) => (asked, Err(refusal)),
            Received::End => return Ok(()),
            Received::Refused(status, why) => {
                shared.log_refusal(from, "a message", &why);
                let reply = refused(status, RefusalKind::Message, why);
                link.reply(&reply, true)?;
                link.end();
                return Ok(());
            }
        };
        let is_last = asked.is_last || reply.is_err();
        let reply = reply.unwrap_or_else(|refusal| {
            let Refusal { kind, message } = refusal;
            let what = format!("{} {:.100}", asked.method, asked.path);
            shared.log_refusal(from, &what, &message);
            shared.note_failure(kind, &message);
            let is_unknown = kind == RefusalKind::Denied && matches!(access, Access::Token(_));
            let status = if is_unknown { 401 } else { status_of(kind) };
            refused(status, kind, message)
        });
        link.reply(&reply, is_last)?;
        if is_last {
            link.end();
            return Ok(());
        }
    }
}

/// Answers a connection beyond the most there may be.
pub(crate) fn turn_away<S: AsFd>(socket: S) -> io::Result<()> {
    let why = "there are as many connections as there may be; try again later";
    Link::new(socket, REQUEST_TIME, ANSWER_TIME)
        .reply(&refused(503, RefusalKind::Limit, why.to_owned()), true)
}

fn admit(shared: &Shared, access: Access, asked: &Asked) -> Result<(), Refusal> {
    let denied = |why: String| Err(Refusal::new(RefusalKind::Denied, why));
    match access {
        Access::User(uid) if shared.is_controller(uid) => Ok(()),
        Access::User(uid) => denied(format!(
            "user {uid} does not control this server; its own user and root do, and over TCP who \
             has the token"
        )),
        Access::Token(number) => {
            let settings = shared.settings();
            let given = asked.authorization.as_deref().and_then(|it| it.strip_prefix("Bearer "));
            match (settings.token.as_deref(), given) {
                (Some(token), Some(given)) if is_same(token.as_bytes(), given.as_bytes()) => {
                    lock(&shared.state).doors.know(number);
                    Ok(())
                }
                (_, Some(_)) => {
                    denied("the token is another one; use that of the server".to_owned())
                }
                (_, None) => denied("a token is needed: Authorization: Bearer TOKEN".to_owned()),
            }
        }
    }
}

/// Compares in a time that does not depend on where they differ.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let differing = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && std::hint::black_box(differing) == 0
}

fn refused(status: u16, kind: RefusalKind, message: String) -> Reply {
    let header = match status {
        401 => Some(("WWW-Authenticate", "Bearer".to_owned())),
        405 => message.strip_prefix("this path has ").map(|it| ("Allow", it.to_owned())),
        _ => None,
    };
    let body = serde_json::to_vec(&Refused { kind, message }).unwrap_or_default();
    let headers = header.into_iter().collect();
    Reply { status, content_type: "application/json", headers, body }
}

fn status_of(kind: RefusalKind) -> u16 {
    match kind {
        RefusalKind::Denied => 403,
        RefusalKind::Message | RefusalKind::Argument => 400,
        RefusalKind::Missing => 404,
        RefusalKind::Method => 405,
        RefusalKind::Limit | RefusalKind::Conflict => 409,
        RefusalKind::Unsupported => 501,
        RefusalKind::Transfer => 500,
        RefusalKind::ReadOnly | RefusalKind::Failed => 503,
    }
}
