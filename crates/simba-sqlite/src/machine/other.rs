use std::io;
use std::path::Path;

use simba_core::{Error, ErrorKind, Result};

/// There is none here: see [`BootClock::read`].
#[derive(Clone, Debug)]
pub(crate) struct BootClock;

impl BootClock {
    pub(crate) fn read() -> Result<Self> {
        Err(Error::new(
            ErrorKind::Config,
            "SQLite needs to tell one boot of the machine from the next, and only knows how on Linux: take a \
             store with a server here",
        ))
    }

    pub(crate) fn boot(&self) -> &str {
        ""
    }

    pub(crate) fn now(&self) -> i64 {
        0
    }
}

/// No value exists here: leases alone tell whether a waiter is gone.
#[derive(Clone, Debug)]
pub(crate) enum WaiterThread {}

impl WaiterThread {
    pub(crate) fn current() -> Option<Self> {
        None
    }

    pub(crate) fn as_str(&self) -> &str {
        match *self {}
    }

    pub(crate) fn sees_end_of(&self, _: &str) -> bool {
        match *self {}
    }
}

fn unsupported<T>() -> io::Result<T> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(crate) fn file_system(_: &Path) -> io::Result<u64> {
    unsupported()
}

pub(crate) fn room_left(_: &Path) -> io::Result<u64> {
    unsupported()
}

pub(crate) fn is_mount_point(_: &Path, _: &Path) -> io::Result<bool> {
    unsupported()
}

pub(crate) fn create_empty(_: &Path) -> io::Result<()> {
    unsupported()
}

pub(crate) fn rename_new(_: &Path, _: &Path) -> io::Result<()> {
    unsupported()
}
