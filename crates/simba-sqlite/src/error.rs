//! Converts errors of SQLite and of the system: kind, cause, fix.

use std::io;
use std::path::Path;

use simba_core::{Error, ErrorKind};

/// The name of this backend in errors and logs.
pub(crate) const NAME: &str = "sqlite";

/// Converts an error of SQLite.
pub(crate) fn explain(path: &Path, error: rusqlite::Error) -> Error {
    use rusqlite::ErrorCode::*;
    use simba_core::ErrorKind::{Config, Denied, Protocol, Unavailable};

    let (kind, message) = match error.sqlite_error_code() {
        Some(DatabaseBusy | DatabaseLocked) => {
            (Unavailable, "another process keeps {} locked: find it with `fuser {}`, and end it if it hangs")
        }
        Some(DiskFull) => (Unavailable, "the disk under {} is full: make room there; no restart is needed"),
        Some(SystemIoFailure | FileLockingProtocolFailed) => {
            (Unavailable, "the system failed to read or write {}: check whether the disk is full or failing")
        }
        Some(OutOfMemory | OperationInterrupted) => {
            (Unavailable, "SQLite could not finish a call on {}: try again")
        }
        Some(ReadOnly) => (Denied, "{} cannot be written: make it and its folder writable for this user"),
        Some(PermissionDenied | AuthorizationForStatementDenied) => {
            (Denied, "access to {} is denied: give this user the rights to it")
        }
        Some(CannotOpen) => {
            (Denied, "{} or a file beside it cannot be opened: let this user read and write the folder")
        }
        Some(NotADatabase) => return foreign(path, "is no SQLite database").with_source(error),
        Some(DatabaseCorrupt) => {
            (Protocol, "{} is damaged: stop every program that uses it, move it away, start them again")
        }
        None if is_value(&error) => (
            Protocol,
            "a row in {} has a value that Simba did not write: delete the row, or choose another mutex",
        ),
        // All other errors mean that a statement does not fit the tables.
        _ => (Config, "the tables in {} have another shape: move the file away; a new one is created"),
    };
    let message = message.replace("{}", &path.display().to_string());
    Error::new(kind, message).with_backend(NAME).with_source(error)
}

/// Returns whether a value that was read has another type than expected, or is no text.
fn is_value(error: &rusqlite::Error) -> bool {
    use rusqlite::Error::{FromSqlConversionFailure, InvalidColumnType};
    matches!(error, FromSqlConversionFailure(..) | InvalidColumnType(..))
}

/// Returns the error for a file of another program. Such a file is not changed.
pub(crate) fn foreign(path: &Path, what: &str) -> Error {
    let message = format!("{} {what}: it was not changed; choose another path", path.display());
    Error::new(ErrorKind::Protocol, message).with_backend(NAME)
}

/// Returns the error for a file that cannot be used until an operator has changed something.
pub(crate) fn unusable(path: &Path, what: &str) -> Error {
    Error::new(ErrorKind::Config, format!("{} {what}", path.display())).with_backend(NAME)
}

/// Converts an error of the system; `what` is the operation that failed on `path`.
pub(crate) fn system(path: &Path, what: &str, error: io::Error) -> Error {
    let (kind, fix) = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            (ErrorKind::Denied, "give this user the right to, or choose another path")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            (ErrorKind::Unavailable, "the disk is full: make room there")
        }
        _ => (ErrorKind::Config, "choose another path"),
    };
    let message = format!("cannot {what} {}: {fix}", path.display());
    Error::new(kind, message).with_backend(NAME).with_source(error)
}

/// Returns the error for calls on a closed handle.
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
    fn every_error_has_a_kind_a_fix_and_its_source() {
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
        for (code, kind, fix) in faults {
            let error = explained(code);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(fix), "{error}");
            assert!(error.to_string().starts_with("sqlite: "), "{error}");
            assert!(error.source().is_some());
        }
    }
}
