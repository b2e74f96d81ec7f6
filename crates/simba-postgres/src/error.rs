//! Converts errors of the server, the driver and the network into errors with a cause and a fix.
//!
//! No message contains a password: the server repeats none, the driver's errors hold none, and no message contains
//! the URL.

use std::io;

use simba_core::{Error, ErrorKind};
use tokio_postgres::error::SqlState;

use crate::NAME;
use crate::config::{Endpoint, PostgresConfig};

/// An error of the driver.
pub(crate) type DriverError = tokio_postgres::Error;

/// Returns whether the server answered with one of these codes.
pub(crate) fn has_code(error: &Error, codes: &[&str]) -> bool {
    let source = std::error::Error::source(error);
    let driver = source.and_then(|source| source.downcast_ref::<DriverError>());
    driver.and_then(DriverError::code).is_some_and(|code| codes.contains(&code.code()))
}

/// Returns whether another transaction has locked what the statement needs.
pub(crate) fn is_locked(error: &Error) -> bool {
    has_code(error, &["55P03"])
}

/// Converts the error of a statement or login.
pub(crate) fn from_driver(error: DriverError, config: &PostgresConfig) -> Error {
    let (kind, message) = match error.code() {
        Some(code) => classify(code, config),
        None => classify_driver(&error),
    };
    Error::new(kind, message).with_source(error).with_backend(NAME)
}

/// Converts the error of a connection attempt.
pub(crate) fn from_dial(error: io::Error, endpoint: &Endpoint) -> Error {
    let message = format!("no connection to {endpoint}: check the host, the port and that the server runs");
    unavailable(message).with_source(error)
}

pub(crate) fn unavailable(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Unavailable, message).with_backend(NAME)
}

pub(crate) fn protocol(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Protocol, message).with_backend(NAME)
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the backend is closed").with_backend(NAME)
}

/// Returns the error of a broken connection whose cause is not known yet.
pub(crate) fn lost() -> Error {
    unavailable("the connection to the server is lost")
}

/// Returns the error of a row that stays locked.
pub(crate) fn locked() -> Error {
    unavailable(LOCKED)
}

/// Returns the error of a server that accepts no writes.
pub(crate) fn read_only(endpoint: &Endpoint) -> Error {
    unavailable(format!(
        "{endpoint} takes no writes: it is a standby or read-only; name the primary in the URL, or several hosts \
         separated by commas"
    ))
}

/// Classifies an error of the driver without a code of the server.
fn classify_driver(error: &DriverError) -> (ErrorKind, String) {
    let text = full_text(error);
    let io_kind = causes(error).find_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
    // The driver exposes these cases only in its text.
    let contains = |word: &str| text.contains(word);
    if contains("password missing") {
        (ErrorKind::Denied, "the server requires a password and the URL has none: add one".into())
    } else if contains("TLS") && io_kind.is_none_or(|kind| kind == io::ErrorKind::InvalidData) {
        // TLS failures are reported as invalid data; other kinds are network failures.
        let message = "the server does not support TLS as requested: enable ssl on the server, or check sslmode, \
                       sslrootcert and the host name";
        (ErrorKind::Denied, message.into())
    } else if contains("authentication") {
        (ErrorKind::Denied, "the server requires an unsupported authentication method: use SCRAM".into())
    } else if error.is_closed() || io_kind.is_some() {
        (ErrorKind::Unavailable, "the connection to the server is lost".into())
    } else {
        (ErrorKind::Protocol, "the server and the driver disagree about the protocol".into())
    }
}

/// Returns an error of the driver and all its causes.
fn causes(error: &DriverError) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source())
}

fn full_text(error: &DriverError) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

const LOCKED: &str = "another transaction keeps the mutex's row locked: find it in pg_stat_activity and end it with \
     pg_terminate_backend";

/// The kind and message for codes of the server. The first entry with a prefix of the error's code is used.
const CODES: &[(&[&str], ErrorKind, &str)] = &[
    (&["28P01"], ErrorKind::Denied, "wrong password for the user `{user}`: correct the URL"),
    (&["28000"], ErrorKind::Denied, "the server rejects user `{user}`: check pg_hba.conf and sslmode"),
    (&["42501"], ErrorKind::Denied, "the user `{user}` lacks a privilege; the owner runs: {grants}"),
    (&["3D000"], ErrorKind::Config, "there is no database `{database}`: create it or correct the URL"),
    (&["42P01", "3F000"], ErrorKind::Config, NO_TABLE),
    (
        &["25006"],
        ErrorKind::Unavailable,
        "the server takes no writes: it is a standby or read-only; name the primary",
    ),
    (
        &["53300"],
        ErrorKind::Unavailable,
        "the server has no connection left: raise max_connections, or close unused connections",
    ),
    (&["53100"], ErrorKind::Unavailable, "the server's disk is full: make room on it"),
    (&["55P03"], ErrorKind::Unavailable, LOCKED),
    (
        &["57014", "25P04"],
        ErrorKind::Unavailable,
        "a statement took longer than statement_timeout or transaction_timeout: the server is overloaded or a table is \
         locked",
    ),
    (&["22003"], ErrorKind::Config, "a token in {mutex} has reached its maximum: lower it manually"),
    (&["08", "53", "57", "58", "40", "26"], ErrorKind::Unavailable, OUTAGE),
    (&["42", "22", "23"], ErrorKind::Config, OTHER_TABLE),
];

const NO_TABLE: &str =
    "there is no table {mutex} or {waiter}: run `simba schema --apply`, or name their schema in the URL";
const REFUSED: &str = "the server refused a statement (SQLSTATE {code})";
const OUTAGE: &str = "the server is temporarily unavailable (SQLSTATE {code})";
const OTHER_TABLE: &str = "the tables {mutex} and {waiter} were not created by this version of Simba (SQLSTATE \
     {code}): compare them with `simba schema`, or choose another prefix in the URL";

/// Classifies an SQLSTATE code of the server.
fn classify(code: &SqlState, config: &PostgresConfig) -> (ErrorKind, String) {
    let code = code.code();
    let found = CODES.iter().find(|(prefixes, ..)| prefixes.iter().any(|prefix| code.starts_with(prefix)));
    let (kind, message) =
        found.map_or((ErrorKind::Protocol, REFUSED), |(_, kind, message)| (*kind, *message));
    let message = config.tables.with_names(&message.replace("{code}", code));
    let message = message.replace("{grants}", &config.tables.grants(&config.user));
    (kind, message.replace("{user}", &config.user).replace("{database}", &config.database))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classified(code: &str) -> (ErrorKind, String) {
        let config = PostgresConfig::from_url(&"postgres://app:canary@h/db".parse().unwrap()).unwrap();
        classify(&SqlState::from_code(code), &config)
    }

    #[test]
    fn each_code_has_its_kind_and_its_fix() {
        let expected = [
            ("28P01", ErrorKind::Denied, "wrong password"),
            ("42501", ErrorKind::Denied, "GRANT SELECT, INSERT, UPDATE ON simba_mutex TO \"app\""),
            ("3D000", ErrorKind::Config, "no database `db`"),
            ("42P01", ErrorKind::Config, "simba schema --apply"),
            ("42703", ErrorKind::Config, "another prefix"),
            ("42804", ErrorKind::Config, "another prefix"),
            ("25006", ErrorKind::Unavailable, "name the primary"),
            ("53300", ErrorKind::Unavailable, "max_connections"),
            ("53100", ErrorKind::Unavailable, "disk is full"),
            ("57P01", ErrorKind::Unavailable, "temporarily unavailable"),
            ("55P03", ErrorKind::Unavailable, "pg_stat_activity"),
            ("25P04", ErrorKind::Unavailable, "transaction_timeout"),
            ("22003", ErrorKind::Config, "reached its maximum"),
            ("XX000", ErrorKind::Protocol, "XX000"),
        ];
        for (code, kind, text) in expected {
            let (actual, message) = classified(code);
            assert_eq!(actual, kind, "{code}");
            assert!(message.contains(text) && !message.contains("canary"), "{code}: {message}");
        }
    }
}
