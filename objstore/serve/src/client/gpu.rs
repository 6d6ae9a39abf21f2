//! A client's blocks on a GPU.

#![allow(unsafe_code, reason = "has a GPU write words of shared memory")]

use std::{
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex},
    time::Duration,
};

use kv_catalog::lock;
use ripieno_stack::{GpuHandle, GpuMemory, RawStream, StackError, StreamMarks};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, PidfdFlags},
};

use super::{Memory, Pool};
use crate::{
    error::ServeError,
    memory,
    peer::Peer,
    protocol::{Bytes, ClientPool, GpuRange, Mark},
};

/// Bytes of the words by which streams tell how far they have got: more streams than engines have.
const MARK_BYTES: u64 = 4096;

/// GPU memory that a server maps, and how far the streams are that use it.
#[derive(Debug)]
pub(super) struct OnGpu {
    named: GpuHandle,
    memory: GpuMemory,
    marks: StreamMarks,
    /// The memory of `marks`.
    file: OwnedFd,
    /// The process of the last server, and its number.
    server: Mutex<Option<(i32, OwnedFd)>>,
}

impl OnGpu {
    pub(super) fn new(memory: GpuMemory) -> Result<Self, ServeError> {
        let (named, device) = memory.share()?;
        let failed = |source| ServeError::Memory { bytes: MARK_BYTES, source };
        let (file, words) = memory::make(MARK_BYTES).map_err(failed)?;
        let (base, len) = (words.base(), words.len());
        // SAFETY: new pages, of zeros, that live as long as their owner; this process only reads
        // them, by words, and so does the server.
        let marks = unsafe { StreamMarks::new(&device, base, len, Arc::new(words)) };
        let marks = marks.map_err(StackError::from)?;
        Ok(Self { named, memory, marks, file, server: Mutex::default() })
    }

    /// Returns the address of the memory.
    pub(super) fn address(&self) -> u64 {
        self.memory.base().0
    }

    /// Notes the process of the server with which a session has begun, once that of another server
    /// before it has ended.
    pub(super) fn note_server(
        &self,
        stream: &UnixStream,
        within: Duration,
    ) -> Result<(), ServeError> {
        let unseen = |why: String| ServeError::Unshared {
            why: format!(
                "the server's process cannot be watched: {why}; a server of GPU memory has to be \
                 in the same PID namespace"
            ),
        };
        let Peer { pid, .. } = Peer::of(stream).map_err(|error| unseen(error.to_string()))?;
        let number =
            Pid::from_raw(pid).ok_or_else(|| unseen("it has no number here".to_owned()))?;
        let opened = rustix::process::pidfd_open(number, PidfdFlags::empty());
        let watched = opened.map_err(|error| unseen(error.to_string()))?;
        let mut server = lock(&self.server);
        match &*server {
            Some((before, process)) if *before != pid => until_ended(process, within)?,
            _ => {}
        }
        *server = Some((pid, watched));
        Ok(())
    }

    /// Waits until the process of the last server has ended.
    pub(super) fn until_server_ended(&self, within: Duration) -> Result<(), ServeError> {
        let server = lock(&self.server);
        server.as_ref().map_or(Ok(()), |(_, process)| until_ended(process, within))
    }
}

/// Waits until a server's process has ended: the driver has closed its mappings then, and nothing
/// copies to the memory.
fn until_ended(process: &OwnedFd, within: Duration) -> Result<(), ServeError> {
    let lost = |why: String| ServeError::Lost { why };
    let within = Timespec::try_from(within).map_err(|error| lost(error.to_string()))?;
    let mut ready = [PollFd::new(process, PollFlags::IN)];
    match rustix::io::retry_on_intr(|| rustix::event::poll(&mut ready, Some(&within))) {
        Ok(1..) => Ok(()),
        Ok(0) => Err(lost("the server's process does not end, and may copy".to_owned())),
        Err(error) => Err(lost(format!("waiting for the end of the server: {error}"))),
    }
}

impl Pool {
    /// Returns what the server is told of the memory.
    pub(super) fn named(&self) -> ClientPool {
        let gpu = match &self.memory {
            Memory::Host(..) => None,
            Memory::Gpu(OnGpu { named, .. }) => {
                let GpuHandle { gpu, handle, offset, bytes } = named.clone();
                Some(GpuRange { gpu, handle: Bytes(handle), offset, bytes })
            }
        };
        ClientPool { layout: self.layout.clone(), gpu }
    }

    /// Marks the position of a stream.
    pub(super) fn mark(&self, stream: RawStream) -> Result<Mark, ServeError> {
        let Memory::Gpu(OnGpu { marks, .. }) = &self.memory else {
            let why = "the blocks are in host memory, which has no streams".to_owned();
            return Err(ServeError::Unshared { why });
        };
        let (word, value) = marks.mark(stream).map_err(StackError::from)?;
        Ok(Mark { word, value })
    }

    /// Returns the file that goes with it.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        match &self.memory {
            Memory::Host(file, _) => file.as_fd(),
            Memory::Gpu(OnGpu { file, .. }) => file.as_fd(),
        }
    }
}
