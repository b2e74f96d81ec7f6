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
    /// Returns whether another try may succeed within milliseconds.
    pub(crate) const fn is_retried(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::ServerTimeout(_) | Self::Locked(_))
    }

    /// Returns whether one call of several may be the cause: each is sent again alone.
    pub(crate) const fn may_concern_one_call(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Locked(_))
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

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Lost(error)
            | Fault::TimedOut(error)
            | Fault::ServerTimeout(error)
            | Fault::Locked(error)
            | Fault::NotWritable(error)
            | Fault::Refused(error) => error,
        }
    }
}

/// Converts the error of a statement about this table. Only an error of the server tells that the statement was not
/// carried out.
pub(crate) fn fault(error: Mysql, table: &TableName) -> Fault {
    let lost = unavailable("the connection to the server broke");
    match error {
        Mysql::Server(error) => server_fault(error, table),
        Mysql::Io(error) => Fault::Lost(lost.with_source(error)),
        // Without the error itself: its `Debug` contains the packet that was not expected, which may be anything.
        Mysql::Driver(error) => Fault::Lost(lost.with_source(driver(&error))),
        Mysql::Other(error) => Fault::Lost(lost.with_source(error)),
        Mysql::Url(_) => Fault::Lost(lost),
    }
}

/// Converts the error of a failed connect.
pub(crate) fn connect_error(error: Mysql, table: &TableName) -> Error {
    match error {
        Mysql::Server(error) => server_fault(error, table).into(),
        Mysql::Io(IoError::Io(error)) if !is_tls(&error) => {
            unavailable("no connection to the server: check the host, the port and that it runs")
                .with_source(error)
        }
        Mysql::Io(error) => tls_failed(error),
        Mysql::Driver(error) => driver(&error),
        Mysql::Other(error) => {
            Error::new(ErrorKind::Protocol, format!("the driver failed: {error}")).with_backend(NAME)
        }
        // The error contains what was parsed, which may include a password.
        Mysql::Url(_) => Error::new(ErrorKind::Invalid, "the driver refused the settings"),
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

/// The message about a row that a peer has locked.
pub(crate) const LOCKED: &str = "the row is locked by another transaction that does not end";

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
        DriverError::ConnectionClosed => (ErrorKind::Unavailable, "the connection is closed".to_owned()),
        DriverError::NoKeyFound => (ErrorKind::Config, "there is no private key in `ssl-key`".to_owned()),
        DriverError::PacketOutOfOrder | DriverError::UnexpectedPacket { .. } => {
            (ErrorKind::Protocol, format!("the server does not speak MySQL's protocol as expected: {error}"))
        }
        other => (ErrorKind::Protocol, format!("the driver refused: {other}")),
    };
    Error::new(kind, message).with_backend(NAME)
}

/// Converts an error of the server, by its number. The message names the cause and the fix.
fn server_fault(error: ServerError, table: &TableName) -> Fault {
    use ErrorKind::{Config, Denied, Protocol, Unavailable};
    use Fault::{Locked, Lost, NotWritable, Refused, ServerTimeout};
    let (fault, kind, message): (fn(Error) -> Fault, ErrorKind, &str) = match error.code {
        1205 | 3572 => (Locked, Unavailable, LOCKED),
        1213 | 3101 => {
            (Locked, Unavailable, "the server rolled the statement back in favour of another transaction")
        }
        1969 | 3024 => (
            ServerTimeout,
            Unavailable,
            "the server timed out a statement: the row is locked by another transaction that does not end, or the \
             server is overloaded",
        ),
        1053 | 1927 | 1317 | 4031 => (Lost, Unavailable, "the server ended the connection"),
        1180 | 3100 => (
            Lost,
            Unavailable,
            "the server could not commit a write, or does not know whether it did: see its log",
        ),
        // MaxScale, MySQL Router and ProxySQL send the error numbers of a client.
        1158..=1161 | 2000..=2999 | 9001 => (Lost, Unavailable, "a proxy has no connection to the server"),
        // A proxy or a failover changed the server behind the connection, or the table was changed.
        1243 | 1615 => (Lost, Unavailable, "the server does not know a prepared statement any more"),
        // A planned failover makes the old primary read-only before the new one takes over.
        1290 | 1792 | 1836 => (
            NotWritable,
            Unavailable,
            "the server is read-only: wait for the failover to end, name the primary, or turn read_only off",
        ),
        1047 | 3032 => (
            NotWritable,
            Unavailable,
            "the server accepts no statements: it is offline or not in its cluster's majority; wait, or name another",
        ),
        1021 | 1114 | 1026 | 1030 | 3675 => {
            (Refused, Unavailable, "the server has no room left to write: make room on its disk")
        }
        1040 | 1203 | 1226 => {
            (Refused, Unavailable, "the server has no connection left: raise max_connections")
        }
        1129 => (
            Refused,
            Unavailable,
            "the server blocks this host after too many failed connections: fix their cause, then run FLUSH HOSTS (on \
             MySQL TRUNCATE TABLE performance_schema.host_cache)",
        ),
        1045 | 1698 | 1396 => {
            (Refused, Denied, "the server refused the user or its password: correct them in the URL")
        }
        1130 => (Refused, Denied, "the server accepts no user from this host: create one for it"),
        3118 | 4151 => (Refused, Denied, "the account of the user is locked: ALTER USER … ACCOUNT UNLOCK"),
        1820 | 1862 => (Refused, Denied, "the password of the user has expired: set a new one (ALTER USER)"),
        3159 => (
            Refused,
            Config,
            "the server requires TLS: set ssl-mode to VERIFY_IDENTITY, VERIFY_CA or REQUIRED in the URL",
        ),
        1044 => (Refused, Denied, "the user has no access to this database: grant it"),
        1142 | 1143 | 1227 | 1370 => (
            Refused,
            Denied,
            "the user lacks a right: GRANT SELECT, INSERT, UPDATE ON {table} TO it (and CREATE for the schema)",
        ),
        1049 => (Refused, Config, "the database in the URL does not exist: create it, or name another"),
        1146 => (Refused, Config, "the table {table} does not exist: run `simba schema --apply`"),
        1054 => (
            Refused,
            Config,
            "the table {table} lacks a column, so it is not Simba's: name another with `table`, then run `simba \
             schema --apply`",
        ),
        1264 | 1690 => (
            Refused,
            Config,
            "the version of this mutex has reached the end of its column: ALTER TABLE {table} MODIFY version BIGINT \
             UNSIGNED NOT NULL (JVM peers stop at 2147483647)",
        ),
        1665 => (
            Refused,
            Config,
            "the server logs statements instead of rows, which READ COMMITTED forbids: set binlog_format to ROW or \
             MIXED",
        ),
        1406 => (Refused, Config, "a value is longer than its column in {table}"),
        _ => (Refused, Protocol, "the server refused a statement with error {code}"),
    };
    let message = message.replace("{table}", &table.to_string()).replace("{code}", &error.code.to_string());
    fault(Error::new(kind, message).with_backend(NAME).with_source(error))
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
            let error = Error::from(fault_of(code));
            assert!(error.is_transient(), "{code}: {error}");
        }
    }

    #[test]
    fn a_proxy_that_lost_its_server_is_a_lost_connection() {
        for code in [1158, 1161, 2002, 2003, 2006, 2013, 9001] {
            let fault = fault_of(code);
            assert!(matches!(fault, Fault::Lost(_)) && Error::from(fault).is_transient(), "{code}");
        }
    }

    #[test]
    fn the_outcome_of_a_failed_commit_is_unknown() {
        assert!([1180, 3100].into_iter().all(|code| fault_of(code).outcome_unknown()));
        assert!(![1205, 1213, 1290, 3101].into_iter().any(|code| fault_of(code).outcome_unknown()));
    }

    #[test]
    fn only_an_error_of_the_server_tells_the_outcome_of_a_statement() {
        let invalid = || Mysql::Io(IoError::Io(std::io::ErrorKind::InvalidData.into()));
        let broken = [
            invalid(),
            Mysql::Driver(DriverError::ConnectionClosed),
            Mysql::Driver(DriverError::PacketOutOfOrder),
            Mysql::Other("a stopped handler".into()),
        ];
        for error in broken {
            let fault = fault(error, &TableName::default());
            assert!(
                matches!(fault, Fault::Lost(_)) && Error::from(fault.clone()).is_transient(),
                "{fault:?}"
            );
        }
        let error = connect_error(invalid(), &TableName::default());
        assert!(error.kind() == ErrorKind::Config && error.to_string().contains("ssl-ca"), "{error}");
    }

    #[test]
    fn every_refusal_names_its_fix() {
        let fixes = [
            (1045, ErrorKind::Denied, "URL"),
            (1129, ErrorKind::Unavailable, "FLUSH HOSTS"),
            (1130, ErrorKind::Denied, "this host"),
            (1142, ErrorKind::Denied, "GRANT SELECT, INSERT, UPDATE"),
            (1862, ErrorKind::Denied, "expired"),
            (3118, ErrorKind::Denied, "ACCOUNT UNLOCK"),
            (3159, ErrorKind::Config, "ssl-mode"),
            (4151, ErrorKind::Denied, "ACCOUNT UNLOCK"),
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
            let error = Error::from(fault_of(code));
            assert_eq!(error.kind(), kind, "{code}");
            assert!(error.to_string().contains(fix), "{error}");
        }
    }
}
