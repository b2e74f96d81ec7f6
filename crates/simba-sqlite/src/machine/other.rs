use std::io;
use std::path::{Path, PathBuf};

use simba_core::{Error, ErrorKind, Result};

/// Not supported: [`BootClock::read`] always fails.
#[derive(Clone, Debug)]
pub(crate) struct BootClock;

impl BootClock {
    pub(crate) fn read() -> Result<Self> {
        Err(Error::new(
            ErrorKind::Config,
            "the SQLite backend can identify a boot of the machine only on Linux: use a store with a server \
             here",
        ))
    }

    pub(crate) fn boot(&self) -> &str {
        ""
    }

    pub(crate) fn now(&self) -> i64 {
        0
    }
}

/// Has no values: only its expiry ends a queue entry.
#[derive(Clone, Debug)]
pub(crate) enum WaiterThread {}

impl WaiterThread {
    pub(crate) fn current() -> Option<Self> {
        None
    }

    pub(crate) fn as_str(&self) -> &str {
        match *self {}
    }

    pub(crate) fn knows_ended(&self, _: &str) -> bool {
        match *self {}
    }
}

fn unsupported<T>() -> io::Result<T> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(crate) fn file_system(_: &Path) -> io::Result<u64> {
    unsupported()
}

pub(crate) fn is_mount_point(_: &Path, _: &Path) -> io::Result<bool> {
    unsupported()
}

pub(crate) fn open_files(_: &[PathBuf]) -> io::Result<Vec<(u64, u64)>> {
    unsupported()
}

pub(crate) fn create_empty(_: &Path) -> io::Result<()> {
    unsupported()
}

pub(crate) fn rename_new(_: &Path, _: &Path) -> io::Result<()> {
    unsupported()
}
