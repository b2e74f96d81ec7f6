//! What went wrong at the server, as the errors of Simba: with a kind, a cause and a cure, and no secret.

use std::io;
use std::time::Duration;

use simba_core::{Error, ErrorKind};

use crate::config::Address;
use crate::resp::Malformed;

pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, message.into()).with_backend(crate::NAME)
}

/// The connection broke; what was under way has an unknown outcome.
pub(crate) fn io(cause: io::Error) -> Error {
    new(ErrorKind::Unavailable, "the connection to the server broke").with_source(cause)
}

pub(crate) fn gone() -> Error {
    new(ErrorKind::Unavailable, "the connection to the server is gone")
}

pub(crate) fn silent(limit: Duration) -> Error {
    new(
        ErrorKind::Unavailable,
        format!("the server was silent for {limit:?}: the connection counts as broken"),
    )
}

pub(crate) fn overrun() -> Error {
    new(ErrorKind::Unavailable, "too many calls wait for the server: it does not keep up")
}

pub(crate) fn closed() -> Error {
    new(ErrorKind::Closed, "the backend is closed")
}

pub(crate) fn unreachable(address: &Address, cause: io::Error) -> Error {
    new(
        ErrorKind::Unavailable,
        format!("{address} cannot be reached: is the server up, and the address right"),
    )
    .with_source(cause)
}

pub(crate) fn untrusted(address: &Address, cause: io::Error) -> Error {
    let message = format!(
        "{address} does not prove who it is, or speaks no TLS: check its certificate, `tls_ca` and \
         `tls_server_name`"
    );
    new(ErrorKind::Denied, message).with_source(cause)
}

pub(crate) fn malformed(cause: Malformed) -> Error {
    let message = "the server does not speak the protocol of Redis: check the port, and whether it wants TLS \
                   (`rediss://`)";
    new(ErrorKind::Protocol, message).with_source(cause)
}

pub(crate) fn unasked() -> Error {
    new(ErrorKind::Protocol, "the server sent a reply that nobody asked for")
}

pub(crate) fn unexpected(what: &str) -> Error {
    new(ErrorKind::Protocol, format!("the server answered {what} in a form that is not known"))
}

/// The key of a mutex holds something that no contender put there.
pub(crate) fn foreign(key: &str) -> Error {
    let message = format!("`{key}` holds something that is not Simba's: remove it, or take another name");
    new(ErrorKind::Protocol, message)
}

/// An error reply. Its words may repeat arguments, which hold no secret in anything but a login.
pub(crate) fn refused(reply: &str) -> Error {
    let (kind, message) = verdict(reply);
    new(kind, message).with_source(Words(reply.chars().take(200).collect()))
}

/// A refused login: the server's words are left out, since a login holds a secret.
pub(crate) fn login(reply: &str) -> Error {
    let (kind, message) = verdict(reply);
    match kind {
        ErrorKind::Protocol => new(
            ErrorKind::Denied,
            "the server refused the login: check user and password, or leave them out if it has none",
        ),
        _ => new(kind, message),
    }
}

/// What the first words of an error reply mean, and what cures it.
const VERDICTS: &[(&str, ErrorKind, &str)] = &[
    ("NOAUTH", ErrorKind::Denied, "the server wants a login: put user and password into the URL"),
    ("WRONGPASS", ErrorKind::Denied, "the server refused user or password: check them"),
    ("NOPERM", ErrorKind::Denied, "the user lacks a right: give it the documented ACL"),
    // What a server says of a right that a script lacks.
    (
        "ERR The user executing the script",
        ErrorKind::Denied,
        "the user lacks a right: give it the documented ACL",
    ),
    ("OOM", ErrorKind::Unavailable, "the server is out of memory: raise `maxmemory` or remove data"),
    ("READONLY", ErrorKind::Unavailable, "the server is a replica: connect to its master"),
    ("LOADING", ErrorKind::Unavailable, "the server still loads its data: it is tried again"),
    ("MASTERDOWN", ErrorKind::Unavailable, "the server is a replica without its master: wait for a failover"),
    (
        "BUSY",
        ErrorKind::Unavailable,
        "another client's script keeps the server busy: end it with SCRIPT KILL",
    ),
    ("CLUSTERDOWN", ErrorKind::Unavailable, "the cluster does not serve: some slots have no master"),
    ("TRYAGAIN", ErrorKind::Unavailable, "the mutex moves to another node: it is tried again"),
    ("MOVED", ErrorKind::Config, "the server is part of a cluster: connect with `redis+cluster://`"),
    ("ASK", ErrorKind::Unavailable, "the mutex moves to another node: it is tried again"),
    ("NOREPLICAS", ErrorKind::Unavailable, "the server has too few replicas to accept writes"),
    ("MISCONF", ErrorKind::Unavailable, "the server cannot save its data and refuses writes: see its log"),
    ("CROSSSLOT", ErrorKind::Invalid, "the name of the mutex spreads over several slots of a cluster"),
    ("WRONGTYPE", ErrorKind::Protocol, "a key of the mutex holds something that is not Simba's: remove it"),
    ("NOSCRIPT", ErrorKind::Unavailable, "the server forgot the scripts: they are sent again"),
    (
        "ERR max number of clients",
        ErrorKind::Unavailable,
        "the server has too many clients: raise `maxclients`",
    ),
    ("ERR DB index", ErrorKind::Config, "the server has no such database: choose another number"),
    ("ERR invalid DB index", ErrorKind::Config, "the server has no such database: choose another number"),
    ("ERR SELECT is not allowed", ErrorKind::Config, "a cluster has database 0 only: leave the number out"),
    ("ERR unknown command", ErrorKind::Protocol, "the server lacks a command: Redis 6 or Valkey is needed"),
    (
        "ERR This instance has cluster support disabled",
        ErrorKind::Config,
        "the server is no part of a cluster: connect with `redis://`",
    ),
];

/// Returns whether an error reply has this code, also from within a script: Redis 6 and before put it behind words of
/// their own.
fn has_code(reply: &str, code: &str) -> bool {
    reply.starts_with(code) || reply.contains(&format!(": {code} ")) || reply.contains(&format!("-{code} "))
}

/// Returns whether an error reply says that the server takes no writes because it is not a master, or not yet.
pub(crate) fn is_no_master(reply: &str) -> bool {
    ["READONLY", "MASTERDOWN", "LOADING"].iter().any(|code| has_code(reply, code))
}

/// Returns whether the server ended the connection.
pub(crate) fn is_hang_up(error: &Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    let cause = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    let ended = [BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof];
    cause.is_some_and(|cause| ended.contains(&cause.kind()))
}

/// Returns the error reply behind an error.
pub(crate) fn words(error: &Error) -> Option<&str> {
    let words = std::error::Error::source(error)?.downcast_ref::<Words>()?;
    Some(&words.0)
}

/// A node of a cluster redirects to a node that it has no address for.
pub(crate) fn unknown_endpoint(reply: &str) -> Error {
    let message = "a node of the cluster has no host name: set `cluster-announce-hostname` on every node, or \
                   `cluster-preferred-endpoint-type ip`";
    new(ErrorKind::Unavailable, message).with_source(Words(reply.chars().take(200).collect()))
}

/// A proxy that runs no scripts stands at the address.
pub(crate) fn no_scripts(address: &Address) -> Error {
    let message = format!(
        "{address} ends the connection at SCRIPT LOAD: it is a proxy without scripts and subscriptions, such as \
         twemproxy. Connect to the server itself"
    );
    new(ErrorKind::Config, message)
}

fn verdict(reply: &str) -> (ErrorKind, String) {
    let found = VERDICTS.iter().find(|(code, ..)| has_code(reply, code));
    found.map_or_else(
        || (ErrorKind::Protocol, "the server answered with an error".into()),
        |(_, kind, message)| (*kind, (*message).into()),
    )
}

/// The server's own words.
#[derive(Debug)]
struct Words(String);

impl std::fmt::Display for Words {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Words {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_replies_get_their_kind_also_from_within_a_script() {
        let cases = [
            ("NOPERM this user has no permissions", ErrorKind::Denied),
            ("ERR The user executing the script can't run this command", ErrorKind::Denied),
            ("WRONGTYPE Operation against a key", ErrorKind::Protocol),
            (
                "ERR Error running script (call to f_1): @user_script:3: WRONGTYPE Operation",
                ErrorKind::Protocol,
            ),
            ("OOM command not allowed when used memory > 'maxmemory'.", ErrorKind::Unavailable),
            ("READONLY You can't write against a read only replica.", ErrorKind::Unavailable),
            ("LOADING Redis is loading the dataset in memory", ErrorKind::Unavailable),
            ("BUSY Redis is busy running a script.", ErrorKind::Unavailable),
            ("MOVED 1 127.0.0.1:1", ErrorKind::Config),
            ("ERR something new", ErrorKind::Protocol),
        ];
        for (reply, kind) in cases {
            assert_eq!(refused(reply).kind(), kind, "{reply}");
        }
    }

    #[test]
    fn a_replica_is_recognised_also_by_the_words_of_redis_6() {
        for reply in [
            "READONLY You can't write against a read only replica.",
            "ERR Error running script (call to f_5a): @user_script:6: @user_script: 6: -READONLY You can't write \
             against a read only replica.",
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        ] {
            assert!(is_no_master(reply), "{reply}");
            assert_eq!(words(&refused(reply)), Some(reply));
        }
        assert!(!is_no_master("OOM command not allowed when used memory > 'maxmemory'."));
    }

    #[test]
    fn a_refused_login_repeats_nothing() {
        let error = login("ERR wrong number of arguments for 'auth hunter2'");
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(!format!("{error:?}").contains("hunter2"));
    }
}
