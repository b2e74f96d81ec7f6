//! What the server, the driver and the network say, as errors with a cause and a cure.
//!
//! No message repeats a password: the server never does, the driver holds none in its errors, and the URL goes
//! into none of them.

use std::{fmt, io};

use simba_core::{Error, ErrorKind};
use tokio_postgres::error::SqlState;

use crate::NAME;
use crate::config::{Place, PostgresConfig};

/// The driver's error.
pub(crate) type Fault = tokio_postgres::Error;

/// Why a statement has no answer.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The driver or the server says so.
    Fault(Fault),
    /// The server is none to work with: whatever it answered does not count.
    Refused(Error),
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(fault) => fault.fmt(f),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl Trouble {
    fn code(&self) -> Option<&str> {
        match self {
            Self::Fault(fault) => fault.code().map(SqlState::code),
            Self::Refused(_) => None,
        }
    }

    /// Whether the server undid the statement for the sake of another one, so that it can be sent again.
    pub(crate) fn is_undone(&self) -> bool {
        matches!(self.code(), Some("40001" | "40P01"))
    }

    /// Whether a row or a table was locked for too long.
    pub(crate) fn is_locked(&self) -> bool {
        self.code() == Some(SqlState::LOCK_NOT_AVAILABLE.code())
    }

    /// Whether the server's queue of notifications is full, since a session that listens does not read.
    pub(crate) fn is_notify_queue_full(&self) -> bool {
        self.code() == Some(SqlState::PROGRAM_LIMIT_EXCEEDED.code())
    }

    /// Whether the server has forgotten what was prepared on this connection.
    pub(crate) fn is_forgotten(&self) -> bool {
        matches!(self.code(), Some("26000" | "0A000" | "42P05"))
    }

    /// What it means for the caller.
    pub(crate) fn told(self, config: &PostgresConfig) -> Error {
        match self {
            Self::Fault(fault) => of_fault(fault, config),
            Self::Refused(error) => error,
        }
    }
}

/// What a failed statement or login means.
pub(crate) fn of_fault(fault: Fault, config: &PostgresConfig) -> Error {
    let (kind, message) = match fault.code() {
        Some(code) => verdict(code, config),
        None => silent(&fault),
    };
    Error::new(kind, message).with_source(fault).with_backend(NAME)
}

/// What a connection that could not be opened means.
pub(crate) fn of_dial(error: io::Error, place: &Place) -> Error {
    let message = format!("no connection to {place}: check the host, the port and that the server runs");
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

/// Nothing to read or write with for now, and no reason known yet.
pub(crate) fn lost() -> Error {
    unavailable("the connection to the server is lost")
}

/// A row that stays locked.
pub(crate) fn locked() -> Error {
    unavailable(
        "another transaction keeps the mutex's row locked: find it in pg_stat_activity and end it with \
         pg_terminate_backend",
    )
}

/// A server that takes no writes.
pub(crate) fn read_only(place: &Place) -> Error {
    unavailable(format!(
        "{place} takes no writes: it is a standby or read-only; name the primary in the URL, or several hosts \
         separated by commas"
    ))
}

/// The driver's own trouble, without a word from the server.
fn silent(fault: &Fault) -> (ErrorKind, String) {
    let text = words(fault);
    let broken = causes(fault).find_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
    // The driver knows these by their text alone.
    let says = |word: &str| text.contains(word);
    if says("password missing") {
        (ErrorKind::Denied, "the server asks for a password and the URL has none: add one".into())
    } else if says("TLS") && broken.is_none_or(|kind| kind == io::ErrorKind::InvalidData) {
        // What TLS refuses comes as data that is not valid; anything else is the network.
        let message = "the server does not speak TLS as asked for: turn its ssl on, or check sslmode, \
                       sslrootcert and the name of the host";
        (ErrorKind::Denied, message.into())
    } else if says("authentication") {
        (ErrorKind::Denied, "the server asks for a login that this client does not know: use SCRAM".into())
    } else if fault.is_closed() || broken.is_some() {
        (ErrorKind::Unavailable, "the connection to the server is lost".into())
    } else {
        (ErrorKind::Protocol, "the server and the driver do not understand each other".into())
    }
}

/// An error of the driver and all its causes.
fn causes(fault: &Fault) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(Some(fault as &(dyn std::error::Error + 'static)), |error| error.source())
}

fn words(fault: &Fault) -> String {
    causes(fault).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// What the server's code means for the caller.
fn verdict(code: &SqlState, config: &PostgresConfig) -> (ErrorKind, String) {
    use ErrorKind::{Config, Denied, Protocol, Unavailable};
    let (user, database) = (&config.user, &config.database);
    match code.code() {
        "28P01" => (Denied, format!("wrong password for the user `{user}`: correct the URL")),
        "28000" => {
            (Denied, format!("the server lets the user `{user}` not in: check pg_hba.conf and sslmode"))
        }
        "42501" => (
            Denied,
            format!("the user `{user}` lacks a right; an owner runs: {}", config.tables.grants(user)),
        ),
        "3D000" => (Config, format!("there is no database `{database}`: create it or correct the URL")),
        "42P01" | "3F000" => (
            Config,
            format!(
                "there is no table {} or {}: run `simba schema --apply`, or name their schema in the URL",
                config.tables.mutex(),
                config.tables.waiter()
            ),
        ),
        "25006" => {
            (Unavailable, "the server takes no writes: it is a standby or read-only; name the primary".into())
        }
        "53300" => (
            Unavailable,
            "the server has no connection left: raise max_connections, or end what uses them up".into(),
        ),
        "53100" => (Unavailable, "the server's disk is full: make room on it".into()),
        "55P03" => (Unavailable, locked_row()),
        "57014" => (
            Unavailable,
            "a statement took longer than statement_timeout: the server is overloaded or a table is locked"
                .into(),
        ),
        "22003" => (
            Config,
            format!("a number in {} is at its end: set its token back by hand", config.tables.mutex()),
        ),
        code if starts(code, &["08", "53", "57", "58", "40", "26"]) => {
            (Unavailable, format!("the server cannot serve for now (SQLSTATE {code})"))
        }
        code if starts(code, &["42", "22", "23"]) => (
            Config,
            format!(
                "the tables {} and {} are not ours or of another version (SQLSTATE {code}): compare them with \
                 `simba schema`, or choose another prefix in the URL",
                config.tables.mutex(),
                config.tables.waiter()
            ),
        ),
        code => (Protocol, format!("the server refused a statement (SQLSTATE {code})")),
    }
}

fn locked_row() -> String {
    "another transaction keeps the mutex's row locked: find it in pg_stat_activity and end it with \
     pg_terminate_backend"
        .into()
}

fn starts(code: &str, classes: &[&str]) -> bool {
    classes.iter().any(|class| code.starts_with(class))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(code: &str) -> (ErrorKind, String) {
        let config = PostgresConfig::from_url(&"postgres://app:canary@h/db".parse().unwrap()).unwrap();
        verdict(&SqlState::from_code(code), &config)
    }

    #[test]
    fn each_cause_has_its_kind_and_its_cure() {
        let wanted = [
            ("28P01", ErrorKind::Denied, "wrong password"),
            ("42501", ErrorKind::Denied, "GRANT SELECT, INSERT, UPDATE ON simba_mutex TO \"app\""),
            ("3D000", ErrorKind::Config, "no database `db`"),
            ("42P01", ErrorKind::Config, "simba schema --apply"),
            ("42703", ErrorKind::Config, "another prefix"),
            ("42804", ErrorKind::Config, "another prefix"),
            ("25006", ErrorKind::Unavailable, "name the primary"),
            ("53300", ErrorKind::Unavailable, "max_connections"),
            ("53100", ErrorKind::Unavailable, "disk is full"),
            ("57P01", ErrorKind::Unavailable, "for now"),
            ("55P03", ErrorKind::Unavailable, "pg_stat_activity"),
            ("22003", ErrorKind::Config, "at its end"),
            ("XX000", ErrorKind::Protocol, "XX000"),
        ];
        for (code, kind, cure) in wanted {
            let (told, message) = told(code);
            assert_eq!(told, kind, "{code}");
            assert!(message.contains(cure) && !message.contains("canary"), "{code}: {message}");
        }
    }
}
