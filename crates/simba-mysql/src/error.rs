//! What the driver and the server say, as errors that name the cause and the cure.

use mysql_async::{DriverError, Error as Mysql, IoError, ServerError};
use simba_core::{Error, ErrorKind};

use crate::table::TableName;

pub(crate) const NAME: &str = "mysql";

/// Why a statement has no result.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The connection is gone or of no more use, and the statement may have been carried out.
    Lost(Error),
    /// No answer in time; the connection was given up, and nobody knows either.
    Late(Error),
    /// The server's own timeout struck, and nobody knows for sure.
    Overdue(Error),
    /// A peer has locked the row, or its transaction won. Not carried out.
    Locked(Error),
    /// The server takes no writes now, as during a failover: another server may. Not carried out.
    Demoted(Error),
    /// The server said no.
    Refused(Error),
}

impl Fault {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Lost(error)
            | Self::Late(error)
            | Self::Overdue(error)
            | Self::Locked(error)
            | Self::Demoted(error)
            | Self::Refused(error) => error,
        }
    }

    /// There was nothing to send.
    pub(crate) fn nothing() -> Self {
        Self::Refused(Error::new(ErrorKind::Protocol, "a statement about nothing").with_backend(NAME))
    }

    /// Whether the statement may have been carried out all the same.
    pub(crate) const fn leaves_doubt(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Late(_) | Self::Overdue(_))
    }
}

/// What went wrong with a statement about this table.
pub(crate) fn fault(error: Mysql, table: &TableName) -> Fault {
    match error {
        Mysql::Server(error) => match error.code {
            1205 | 3572 => Fault::Locked(locked(error)),
            1213 | 3101 => {
                Fault::Locked(gone("another transaction won: the server undid ours").with_source(error))
            }
            1969 | 3024 => Fault::Overdue(overdue(error)),
            1053 | 1927 | 1317 | 4031 => {
                Fault::Lost(gone("the server ended the connection").with_source(error))
            }
            1180 | 3100 => Fault::Lost(
                gone("the server could not commit a write, or not say whether it did: see its log")
                    .with_source(error),
            ),
            // A proxy or a failover changed the server behind the connection, or the table was changed.
            1243 | 1615 => {
                Fault::Lost(gone("the server does not know a prepared statement any more").with_source(error))
            }
            1047 | 1290 | 1792 | 1836 | 3032 => Fault::Demoted(refused(error, table)),
            _ => Fault::Refused(refused(error, table)),
        },
        Mysql::Io(IoError::Io(error)) if is_tls(&error) => Fault::Refused(untrusted(error)),
        Mysql::Io(IoError::Tls(error)) => Fault::Refused(untrusted(error)),
        Mysql::Io(IoError::Io(error)) => {
            Fault::Lost(gone("the connection to the server broke").with_source(error))
        }
        Mysql::Driver(DriverError::ConnectionClosed) => Fault::Lost(gone("the connection is closed")),
        Mysql::Driver(error) => Fault::Refused(driver(&error)),
        Mysql::Other(error) => {
            let message = format!("the driver failed: {error}");
            Fault::Refused(Error::new(ErrorKind::Protocol, message).with_backend(NAME))
        }
        // Holds what it was parsed from, which may hold a password.
        Mysql::Url(_) => Fault::Refused(Error::new(ErrorKind::Invalid, "the driver refused the settings")),
    }
}

/// Why there is no connection.
pub(crate) fn unreached(error: Mysql, table: &TableName) -> Error {
    match error {
        Mysql::Io(IoError::Io(error)) if !is_tls(&error) => {
            gone("no connection to the server: check the host, the port and that it runs").with_source(error)
        }
        error => fault(error, table).into_error(),
    }
}

pub(crate) fn gone(message: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, message).with_backend(NAME)
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the backend was closed").with_backend(NAME)
}

/// Errors of TLS come as what went wrong with the bytes.
pub(crate) fn is_tls(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidData
}

fn untrusted(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    let message = "TLS with the server failed: give its authority as `ssl-ca`, the name in its certificate as the \
                   host, and a client certificate if it wants one";
    Error::new(ErrorKind::Config, message).with_backend(NAME).with_source(error)
}

fn locked(error: ServerError) -> Error {
    let message = "the row is locked by another transaction that does not end";
    Error::new(ErrorKind::Unavailable, message).with_backend(NAME).with_source(error)
}

fn overdue(error: ServerError) -> Error {
    let message = "the server did not get a statement done in time: the row is locked by another transaction that \
                   does not end, or the server is too busy";
    Error::new(ErrorKind::Unavailable, message).with_backend(NAME).with_source(error)
}

/// Its own words, not the value: a packet that was not expected may hold anything.
fn driver(error: &DriverError) -> Error {
    let (kind, message) = match error {
        DriverError::NoClientSslFlagFromServer => (
            ErrorKind::Config,
            "TLS is asked for but the server has none: turn it on there (ssl_cert, ssl_key), or say \
             ssl-mode=DISABLED to send everything in plain text"
                .to_owned(),
        ),
        DriverError::UnknownAuthPlugin { .. }
        | DriverError::CleartextPluginDisabled
        | DriverError::MysqlOldPasswordDisabled => (
            ErrorKind::Denied,
            format!(
                "the server wants to log us in by a method that we do not use ({error}): give the user another one"
            ),
        ),
        DriverError::NoKeyFound => (ErrorKind::Config, "there is no private key in `ssl-key`".to_owned()),
        DriverError::PacketOutOfOrder | DriverError::UnexpectedPacket { .. } => {
            (ErrorKind::Protocol, format!("the server does not speak MySQL's protocol as expected: {error}"))
        }
        other => (ErrorKind::Protocol, format!("the driver refused: {other}")),
    };
    Error::new(kind, message).with_backend(NAME)
}

fn refused(error: ServerError, table: &TableName) -> Error {
    let (kind, message) = meaning(error.code, table);
    Error::new(kind, message).with_backend(NAME).with_source(error)
}

/// Cause and cure of what a server refuses, by its number.
fn meaning(code: u16, table: &TableName) -> (ErrorKind, String) {
    match code {
        1045 | 1698 | 1396 => {
            (ErrorKind::Denied, "the server refused the user or its password: mend them in the URL".to_owned())
        }
        1044 => (ErrorKind::Denied, "the user may not use this database: grant it there".to_owned()),
        1142 | 1143 | 1227 | 1370 => (
            ErrorKind::Denied,
            format!("the user lacks a right: GRANT SELECT, INSERT, UPDATE ON {table} TO it (and CREATE for the schema)"),
        ),
        1049 => (ErrorKind::Config, "the database in the URL does not exist: create it, or name another".to_owned()),
        1146 => (ErrorKind::Config, format!("the table {table} does not exist: run `simba schema --apply`")),
        1054 => (
            ErrorKind::Config,
            format!("the table {table} lacks a column, so it is not Simba's: name another with `table`, then run \
                     `simba schema --apply`"),
        ),
        // Transient: a planned failover makes the old primary read-only before the new one takes over.
        1290 | 1792 | 1836 => (
            ErrorKind::Unavailable,
            "the server is read-only: wait for the failover to end, name the primary, or turn read_only off".to_owned(),
        ),
        1047 | 3032 => (
            ErrorKind::Unavailable,
            "the server takes no statements: it is offline or not in its cluster's majority; wait, or name another"
                .to_owned(),
        ),
        1264 | 1690 => (
            ErrorKind::Config,
            format!("the version of this mutex has reached the end of its column: ALTER TABLE {table} MODIFY version \
                     BIGINT UNSIGNED NOT NULL (JVM peers stop at 2147483647)"),
        ),
        1665 => (
            ErrorKind::Config,
            "the server logs statements instead of rows, which READ COMMITTED forbids: set binlog_format to ROW or \
             MIXED"
                .to_owned(),
        ),
        1021 | 1114 | 1026 | 1030 | 3675 => {
            (ErrorKind::Unavailable, "the server has no room left to write: make room on its disk".to_owned())
        }
        1040 | 1203 | 1226 => {
            (ErrorKind::Unavailable, "the server has no connection left for us: raise max_connections".to_owned())
        }
        1406 => (ErrorKind::Config, format!("a value is longer than its column in {table}")),
        _ => (ErrorKind::Protocol, format!("the server refused a statement with error {code}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(code: u16) -> Fault {
        let error = ServerError { code, message: "said so".into(), state: "HY000".into() };
        fault(Mysql::Server(error), &TableName::default())
    }

    #[test]
    fn locks_and_lost_connections_are_told_from_refusals() {
        assert!(matches!(of(1205), Fault::Locked(_)) && matches!(of(1213), Fault::Locked(_)));
        assert!(matches!(of(1927), Fault::Lost(_)));
        assert!(matches!(of(1290), Fault::Demoted(_)) && matches!(of(1047), Fault::Demoted(_)));
        assert!(matches!(of(1146), Fault::Refused(_)));
    }

    #[test]
    fn what_a_failover_causes_is_transient() {
        for code in [1047, 1180, 1243, 1290, 1615, 1792, 1836, 3032, 3100, 3101] {
            let error = of(code).into_error();
            assert!(error.is_transient(), "{code}: {error}");
        }
    }

    #[test]
    fn a_write_that_may_have_been_committed_leaves_doubt() {
        assert!([1180, 3100].into_iter().all(|code| of(code).leaves_doubt()));
        assert!(![1205, 1213, 1290, 3101].into_iter().any(|code| of(code).leaves_doubt()));
    }

    #[test]
    fn every_refusal_names_its_cure() {
        let cures = [
            (1045, ErrorKind::Denied, "URL"),
            (1142, ErrorKind::Denied, "GRANT SELECT, INSERT, UPDATE"),
            (1049, ErrorKind::Config, "create it"),
            (1146, ErrorKind::Config, "simba schema --apply"),
            (1054, ErrorKind::Config, "table"),
            (1290, ErrorKind::Unavailable, "primary"),
            (1047, ErrorKind::Unavailable, "majority"),
            (1264, ErrorKind::Config, "BIGINT UNSIGNED"),
            (1040, ErrorKind::Unavailable, "max_connections"),
            (1114, ErrorKind::Unavailable, "make room"),
        ];
        for (code, kind, cure) in cures {
            let error = of(code).into_error();
            assert_eq!(error.kind(), kind, "{code}");
            assert!(error.to_string().contains(cure), "{error}");
        }
    }
}
