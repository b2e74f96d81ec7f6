//! Converts errors of the driver and the server into errors that name the cause and the fix.

use mysql_async::{DriverError, Error as Mysql, IoError, ServerError};
use simba_core::{Error, ErrorKind};

use crate::schema::TableName;

pub(crate) const NAME: &str = "mysql";

/// Why a statement has no result.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The connection is broken or unusable. The statement may have been carried out.
    Lost(Error),
    /// No answer within the limit; the connection was closed. The statement may have been carried out.
    TimedOut(Error),
    /// The server timed out the statement. It may have been carried out.
    ServerTimeout(Error),
    /// A peer has locked the row, or the server rolled the statement back in favour of another transaction.
    /// Not carried out.
    Locked(Error),
    /// No server accepts the statement now, as during a failover: another connection may. Not carried out.
    NotWritable(Error),
    /// The server or the driver rejected the statement.
    Refused(Error),
}

impl Fault {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Lost(error)
            | Self::TimedOut(error)
            | Self::ServerTimeout(error)
            | Self::Locked(error)
            | Self::NotWritable(error)
            | Self::Refused(error) => error,
        }
    }

    /// Returns whether another try may succeed within milliseconds.
    pub(crate) const fn is_retried(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::ServerTimeout(_) | Self::Locked(_))
    }

    /// Returns whether a peer that keeps a row locked may be the cause.
    pub(crate) const fn suggests_locked_row(&self) -> bool {
        matches!(self, Self::Locked(_) | Self::ServerTimeout(_) | Self::TimedOut(_))
    }

    /// Returns whether the statement may have been carried out.
    pub(crate) const fn outcome_unknown(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::TimedOut(_) | Self::ServerTimeout(_))
    }
}

/// Converts the error of a statement about this table.
pub(crate) fn fault(error: Mysql, table: &TableName) -> Fault {
    match error {
        Mysql::Server(error) => match error.code {
            1205 | 3572 => Fault::Locked(locked().with_source(error)),
            1213 | 3101 => Fault::Locked(
                unavailable("the server rolled the statement back in favour of another transaction")
                    .with_source(error),
            ),
            1969 | 3024 => Fault::ServerTimeout(server_timeout(error)),
            1053 | 1927 | 1317 | 4031 => {
                Fault::Lost(unavailable("the server ended the connection").with_source(error))
            }
            1180 | 3100 => Fault::Lost(
                unavailable(
                    "the server could not commit a write, or does not know whether it did: see its log",
                )
                .with_source(error),
            ),
            // A proxy lost its server: MaxScale, MySQL Router and ProxySQL send the errors of a client.
            1158..=1161 | 2000..=2999 | 9001 => {
                Fault::Lost(unavailable("a proxy has no connection to the server").with_source(error))
            }
            // A proxy or a failover changed the server behind the connection, or the table was changed.
            1243 | 1615 => Fault::Lost(
                unavailable("the server does not know a prepared statement any more").with_source(error),
            ),
            1047 | 1290 | 1792 | 1836 | 3032 => Fault::NotWritable(refused(error, table)),
            _ => Fault::Refused(refused(error, table)),
        },
        Mysql::Io(IoError::Io(error)) if is_tls(&error) => Fault::Refused(tls_failed(error)),
        Mysql::Io(IoError::Tls(error)) => Fault::Refused(tls_failed(error)),
        Mysql::Io(IoError::Io(error)) => {
            Fault::Lost(unavailable("the connection to the server broke").with_source(error))
        }
        Mysql::Driver(DriverError::ConnectionClosed) => Fault::Lost(unavailable("the connection is closed")),
        Mysql::Driver(error) => Fault::Refused(driver(&error)),
        Mysql::Other(error) => {
            let message = format!("the driver failed: {error}");
            Fault::Refused(Error::new(ErrorKind::Protocol, message).with_backend(NAME))
        }
        // The error contains what was parsed, which may include a password.
        Mysql::Url(_) => Fault::Refused(Error::new(ErrorKind::Invalid, "the driver refused the settings")),
    }
}

/// Converts the error of a failed connect.
pub(crate) fn connect_error(error: Mysql, table: &TableName) -> Error {
    match error {
        Mysql::Io(IoError::Io(error)) if !is_tls(&error) => {
            unavailable("no connection to the server: check the host, the port and that it runs")
                .with_source(error)
        }
        error => fault(error, table).into_error(),
    }
}

pub(crate) fn unavailable(message: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, message).with_backend(NAME)
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the backend was closed").with_backend(NAME)
}

/// Returns whether TLS failed: the driver reports that as invalid data.
pub(crate) fn is_tls(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidData
}

fn tls_failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    let message = "TLS with the server failed: set its authority as `ssl-ca`, the name in its certificate as the \
                   host, and a client certificate if it requires one";
    Error::new(ErrorKind::Config, message).with_backend(NAME).with_source(error)
}

/// Returns the error for a row that a peer has locked.
pub(crate) fn locked() -> Error {
    unavailable("the row is locked by another transaction that does not end")
}

fn server_timeout(error: ServerError) -> Error {
    let message = "the server timed out a statement: the row is locked by another transaction that does not end, or \
                   the server is overloaded";
    Error::new(ErrorKind::Unavailable, message).with_backend(NAME).with_source(error)
}

/// Uses the message of the error, not its `Debug`: an unexpected packet may contain anything.
fn driver(error: &DriverError) -> Error {
    let (kind, message) = match error {
        DriverError::NoClientSslFlagFromServer => (
            ErrorKind::Config,
            "TLS is requested but the server has none: enable it there (ssl_cert, ssl_key), or set \
             ssl-mode=DISABLED to send everything in plain text"
                .to_owned(),
        ),
        DriverError::UnknownAuthPlugin { .. }
        | DriverError::CleartextPluginDisabled
        | DriverError::MysqlOldPasswordDisabled => (
            ErrorKind::Denied,
            format!(
                "the server requires an unsupported authentication method ({error}): give the user another one"
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
    let (kind, message) = classify(error.code, table);
    Error::new(kind, message).with_backend(NAME).with_source(error)
}

/// Returns the kind, the cause and the fix of a server error, by its number.
fn classify(code: u16, table: &TableName) -> (ErrorKind, String) {
    match code {
        1045 | 1698 | 1396 => {
            (ErrorKind::Denied, "the server refused the user or its password: correct them in the URL".to_owned())
        }
        1044 => (ErrorKind::Denied, "the user has no access to this database: grant it".to_owned()),
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
            "the server accepts no statements: it is offline or not in its cluster's majority; wait, or name another"
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
            (ErrorKind::Unavailable, "the server has no connection left: raise max_connections".to_owned())
        }
        1406 => (ErrorKind::Config, format!("a value is longer than its column in {table}")),
        _ => (ErrorKind::Protocol, format!("the server refused a statement with error {code}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault_of(code: u16) -> Fault {
        let error = ServerError { code, message: "test".into(), state: "HY000".into() };
        fault(Mysql::Server(error), &TableName::default())
    }

    #[test]
    fn locks_and_lost_connections_differ_from_refusals() {
        assert!(matches!(fault_of(1205), Fault::Locked(_)) && matches!(fault_of(1213), Fault::Locked(_)));
        assert!(matches!(fault_of(1927), Fault::Lost(_)));
        assert!(
            matches!(fault_of(1290), Fault::NotWritable(_))
                && matches!(fault_of(1047), Fault::NotWritable(_))
        );
        assert!(matches!(fault_of(1146), Fault::Refused(_)));
    }

    #[test]
    fn errors_of_a_failover_are_transient() {
        for code in [1047, 1180, 1243, 1290, 1615, 1792, 1836, 3032, 3100, 3101] {
            let error = fault_of(code).into_error();
            assert!(error.is_transient(), "{code}: {error}");
        }
    }

    #[test]
    fn a_proxy_that_lost_its_server_is_a_lost_connection() {
        for code in [1158, 1161, 2002, 2003, 2006, 2013, 9001] {
            let fault = fault_of(code);
            assert!(matches!(fault, Fault::Lost(_)) && fault.into_error().is_transient(), "{code}");
        }
    }

    #[test]
    fn the_outcome_of_a_failed_commit_is_unknown() {
        assert!([1180, 3100].into_iter().all(|code| fault_of(code).outcome_unknown()));
        assert!(![1205, 1213, 1290, 3101].into_iter().any(|code| fault_of(code).outcome_unknown()));
    }

    #[test]
    fn every_refusal_names_its_fix() {
        let fixes = [
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
        for (code, kind, fix) in fixes {
            let error = fault_of(code).into_error();
            assert_eq!(error.kind(), kind, "{code}");
            assert!(error.to_string().contains(fix), "{error}");
        }
    }
}
