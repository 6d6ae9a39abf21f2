//! One process owns a store, and engines in other processes use it over a Unix socket.
//!
//! A [`Server`] has a store with its devices, journal and catalog. A [`Client`] makes memory for
//! its KV blocks, gives it to the server with its first call, and names blocks, keys and layers
//! from then on. The server submits every command. `ripieno serve` is the program.
//!
//! # Architecture
//! - [`protocol`]: the messages on a stream socket. One answer for each call, also about several
//!   layers.
//! - [`Server`]: a thread for each connection; checks the user by the credentials of the socket.
//! - `session.rs`: a client's pool, and what the numbers that it may use stand for; `moving.rs`:
//!   its requests.
//! - `engine.rs`: what the clients of an engine of several processes share.
//! - `account.rs`: what a user takes by all of its clients, and how much that may be (`settings.rs`
//!   has its share); `limit.rs`: its bandwidth, if it has a limit. Others share the devices in the
//!   order of their calls, or equally if the plane has a pacer.
//! - `memory.rs`: shared memory (memfd), sealed against shrinking.
//! - `gpu.rs`: a client's pool on a GPU: its layers go through memory of the server, in the order
//!   of the client's streams.
//! - [`Client`]: any number of threads, each call on a connection of its own; also the scheduler or
//!   a rank of an engine of several processes, which exchange plain data: a *place* names a block
//!   of a [`Prefix`] or [`Reservation`]. A [`Request`] moves blocks. [`RemoteStore`] is a client's
//!   store as a [`ripieno_stack::KvStore`].
//! - [`control`]: requests of control over HTTP ([`ripieno_stack::http`]), at the same socket, and
//!   by choice at a TCP port. `routes.rs` has all of them, `hints.rs` the largest one; `web.rs`
//!   decides who may ask. [`Control`] asks: `ripieno ctl`.
//! - `settings.rs`: values that can change while the server runs; `shared.rs`: all of its state.
//!
//! All clients share one plane: its queues, its scheduler, its recovery. A client's memory is one
//! more pool of it ([`objstore::Plane::add_pool`]).
//!
//! # Invariants
//! - A client names neither files nor addresses: the server computes LBA and IOVA from files that
//!   its catalog chose, and blocks that are inside the client's own pool. It moves only what was
//!   found or reserved by itself, or by another client of its engine.
//! - A client's session ends with its first connection, whatever ends that: then its transfers have
//!   ended, uncommitted files are free, references are released, and only then is its memory
//!   unmapped.
//! - An access of the server to a client's memory never fails: the memory cannot shrink. Of a GPU's
//!   memory, it ends before the memory is unmapped, and none begins once the session has ended.
//! - A call that is refused changes nothing, is counted, and logged (at most 100 of a
//!   connection, and 600 a minute).
//! - Blocks that a commit has returned for survive the server's death; of a [`Reservation`], those
//!   published before a [`Client::sync`], or durably.
//! - Whatever runs out counts to the user, and not to a client: nobody gets more by more clients. A
//!   controller's connections are its own: others cannot keep it out.
//! - What a client holds ends after a time in which its engine makes no call.
//! - A pinned block is not evicted before its pin ends; a pin ends with its time, or the server.
//! - Once a [`Request`] has ended, even by the server's death, nothing else accesses its blocks, if
//!   objects are whole pages of the memory.
//!
//! # Not implemented
//! - *Trusted* clients, which ring doorbells themselves: only the mediated class is there. A client
//!   with a device of its own has a store of its own, and needs no server.
//! - A client's stream that waits for a layer on a GPU: a thread does. Copies between that memory
//!   and the devices without the server's.
//! - Prefetching is a request of control only: clients announce neither requests nor steps (see
//!   docs/adr/0016-served-engines.md).
//! - A protocol that is stable: server and client are of one version.
//! - Protection of blocks from clients of the same namespace: a client that knows a namespace can
//!   remove a block, and store wrong bytes under any key.

mod account;
mod client;
pub mod control;
mod engine;
mod error;
mod gpu;
mod limit;
mod memory;
mod moving;
mod peer;
pub mod protocol;
mod refusal;
mod remote;
mod server;
mod session;
mod settings;
mod shared;

pub use client::{Client, Prefix, Request, Reservation, SpaceId};
pub use control::{Control, ControlAddress, PinLimits};
pub use error::{RefusalKind, ServeError};
pub use remote::RemoteStore;
pub use ripieno_stack::PoolLayout;
pub use server::Server;
pub use settings::{Reload, Settings, UserLimits};
pub use shared::ServerOptions;
