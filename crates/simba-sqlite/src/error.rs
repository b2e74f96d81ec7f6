//! From SQLite's errors and the system's to ours: what kind, why, and what to do.

use std::io;
use std::path::Path;

use rusqlite::ErrorCode;
use simba_core::{Error, ErrorKind};

/// The name of this backend in errors and logs.
pub(crate) const NAME: &str = "sqlite";

/// What a failed call of SQLite means for whoever called us.
pub(crate) fn explain(path: &Path, error: rusqlite::Error) -> Error {
    let file = path.display();
    let (kind, message) = match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => (
            ErrorKind::Unavailable,
            format!(
                "another process keeps {file} locked: see who with `fuser {file}`, and end it if it hangs"
            ),
        ),
        Some(ErrorCode::DiskFull) => (
            ErrorKind::Unavailable,
            format!("the disk under {file} is full: make room there, and it goes on by itself"),
        ),
        Some(ErrorCode::SystemIoFailure | ErrorCode::FileLockingProtocolFailed) => (
            ErrorKind::Unavailable,
            format!("the system failed to read or write {file}: see whether the disk is full or failing"),
        ),
        Some(ErrorCode::OutOfMemory | ErrorCode::OperationInterrupted) => {
            (ErrorKind::Unavailable, format!("SQLite could not finish a call on {file}: try again"))
        }
        Some(ErrorCode::ReadOnly) => (
            ErrorKind::Denied,
            format!("{file} cannot be written: make it and its folder writable for this user"),
        ),
        Some(ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied) => {
            (ErrorKind::Denied, format!("the system refuses access to {file}: give this user its rights"))
        }
        Some(ErrorCode::CannotOpen) => (
            ErrorKind::Denied,
            format!("{file} or a file beside it cannot be opened: let this user read and write the folder"),
        ),
        Some(ErrorCode::NotADatabase) => return foreign(path, "is no SQLite database").with_source(error),
        Some(ErrorCode::DatabaseCorrupt) => (
            ErrorKind::Protocol,
            format!("{file} is damaged: stop all that use it and move it away, a new one is made by itself"),
        ),
        // What is left is a statement that does not fit the tables.
        _ => (
            ErrorKind::Config,
            format!(
                "the tables in {file} have another shape: move the file away, a new one is made by itself"
            ),
        ),
    };
    Error::new(kind, message).with_backend(NAME).with_source(error)
}

/// A file that somebody else keeps under our name.
pub(crate) fn foreign(path: &Path, what: &str) -> Error {
    let message = format!("{} {what}: it was left as it is, choose another path", path.display());
    Error::new(ErrorKind::Protocol, message).with_backend(NAME)
}

/// A file that can be ours only after a person did something.
pub(crate) fn unfit(path: &Path, what: &str) -> Error {
    Error::new(ErrorKind::Config, format!("{} {what}", path.display())).with_backend(NAME)
}

/// The system's answer to `what` we tried to do with `path`.
pub(crate) fn system(path: &Path, what: &str, error: io::Error) -> Error {
    let (kind, cure) = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            (ErrorKind::Denied, "give this user the right to, or choose another path")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            (ErrorKind::Unavailable, "the disk is full: make room there")
        }
        _ => (ErrorKind::Config, "choose another path"),
    };
    let message = format!("cannot {what} {}: {cure}", path.display());
    Error::new(kind, message).with_backend(NAME).with_source(error)
}

/// The handle was closed.
pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the handle is closed: connect again").with_backend(NAME)
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use rusqlite::ffi;

    use super::*;

    fn explained(code: i32) -> Error {
        explain(Path::new("/a/b.db"), rusqlite::Error::SqliteFailure(ffi::Error::new(code), None))
    }

    #[test]
    fn every_fault_has_a_kind_a_cure_and_its_cause() {
        let faults = [
            (ffi::SQLITE_BUSY, ErrorKind::Unavailable, "fuser /a/b.db"),
            (ffi::SQLITE_FULL, ErrorKind::Unavailable, "make room"),
            (ffi::SQLITE_IOERR, ErrorKind::Unavailable, "full or failing"),
            (ffi::SQLITE_READONLY, ErrorKind::Denied, "writable"),
            (ffi::SQLITE_PERM, ErrorKind::Denied, "rights"),
            (ffi::SQLITE_CANTOPEN, ErrorKind::Denied, "read and write"),
            (ffi::SQLITE_NOTADB, ErrorKind::Protocol, "choose another path"),
            (ffi::SQLITE_CORRUPT, ErrorKind::Protocol, "move it away"),
            (ffi::SQLITE_ERROR, ErrorKind::Config, "move the file away"),
        ];
        for (code, kind, cure) in faults {
            let error = explained(code);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(cure), "{error}");
            assert!(error.to_string().starts_with("sqlite: "), "{error}");
            assert!(error.source().is_some());
        }
    }
}
