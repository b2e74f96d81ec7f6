//! Conversion of server errors to errors of Simba with a kind, a cause and a fix, and without secrets.

use std::io;
use std::time::Duration;

use simba_core::ErrorKind::{Config, Denied, Invalid, Protocol, Unavailable};
use simba_core::{Error, ErrorKind, Result};

use crate::config::Address;
use crate::resp::{Malformed, Reply};

pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, message.into()).with_backend(crate::NAME)
}

/// The connection broke. The outcome of outstanding calls is unknown.
pub(crate) fn io(cause: io::Error) -> Error {
    new(Unavailable, "the connection to the server broke").with_source(cause)
}

pub(crate) fn disconnected() -> Error {
    new(Unavailable, "the connection to the server was closed")
}

pub(crate) fn silent(limit: Duration) -> Error {
    new(Unavailable, format!("the server was silent for {limit:?}: the connection counts as broken"))
}

pub(crate) fn overloaded() -> Error {
    new(Unavailable, "too many calls are outstanding: the server does not keep up")
}

pub(crate) fn closed() -> Error {
    new(ErrorKind::Closed, "the backend is closed")
}

pub(crate) fn unreachable(address: &Address, cause: io::Error) -> Error {
    new(
        Unavailable,
        format!("{address} cannot be reached: check the address and whether the server is running"),
    )
    .with_source(cause)
}

pub(crate) fn untrusted(address: &Address, cause: io::Error) -> Error {
    let message = format!(
        "{address} has no trusted certificate or does not use TLS: check its certificate, `tls_ca` and \
         `tls_server_name`"
    );
    new(Denied, message).with_source(cause)
}

pub(crate) fn malformed(cause: Malformed) -> Error {
    let message = "the server does not speak the protocol of Redis: check the port, and whether it requires TLS \
                   (`rediss://`)";
    new(Protocol, message).with_source(cause)
}

pub(crate) fn unexpected_reply() -> Error {
    new(Protocol, "the server sent a reply without a request")
}

/// The reply to this command or operation has an unknown form.
pub(crate) fn unexpected(call: &str) -> Error {
    new(Protocol, format!("the server sent an unexpected reply to {call}"))
}

/// The key of a mutex holds a value that is not a contender id.
pub(crate) fn foreign(key: &str) -> Error {
    let message = format!("`{key}` holds a value that is not Simba's: delete it, or choose another name");
    new(Protocol, message)
}

/// An error reply. Its text may repeat arguments, which contain no secret except in a login.
pub(crate) fn refused(reply: &str) -> Error {
    let (kind, message) = classify(reply);
    new(kind, message).with_source(ServerMessage(reply.chars().take(200).collect()))
}

impl Reply {
    /// Returns the reply, or an error reply as an error.
    pub(crate) fn into_result(self) -> Result<Self> {
        match self {
            Self::Error(message) => Err(refused(&message)),
            reply => Ok(reply),
        }
    }
}

/// A refused login, without the server's message, which may repeat the password.
pub(crate) fn login(reply: &str) -> Error {
    let (kind, message) = classify(reply);
    match kind {
        Protocol => new(
            Denied,
            "the server refused the login: check user and password, or leave them out if the server has none",
        ),
        _ => new(kind, message),
    }
}

/// Kind and message of an error reply, by its code.
const ERROR_CODES: &[(&str, ErrorKind, &str)] = &[
    ("NOAUTH", Denied, "the server requires a login: put user and password into the URL"),
    ("WRONGPASS", Denied, "the server refused user or password: check them"),
    ("NOPERM", Denied, "the user lacks a right: give it the documented ACL"),
    // A missing right within a script.
    ("ERR The user executing the script", Denied, "the user lacks a right: give it the documented ACL"),
    ("OOM", Unavailable, "the server is out of memory: raise `maxmemory` or delete data"),
    ("READONLY", Unavailable, "the server is a replica: connect to its master"),
    ("LOADING", Unavailable, "the server is loading its data: the call is retried"),
    ("MASTERDOWN", Unavailable, "the server is a replica without its master: wait for a failover"),
    ("BUSY", Unavailable, "the server is busy with another client's script: stop it with SCRIPT KILL"),
    ("CLUSTERDOWN", Unavailable, "the cluster is down: some slots have no master"),
    ("TRYAGAIN", Unavailable, "the mutex is moving to another node: the call is retried"),
    ("MOVED", Config, "the server is part of a cluster: connect with `redis+cluster://`"),
    ("ASK", Unavailable, "the mutex is moving to another node: the call is retried"),
    ("NOREPLICAS", Unavailable, "the server has too few replicas to accept writes"),
    ("MISCONF", Unavailable, "the server cannot save its data and refuses writes: check its log"),
    ("CROSSSLOT", Invalid, "the keys of the mutex are in several slots of a cluster"),
    ("WRONGTYPE", Protocol, "a key of the mutex holds a value that is not Simba's: delete it"),
    ("NOSCRIPT", Unavailable, "the server lost the scripts: they are sent again"),
    ("FENCELOST", Unavailable, "the fence of the mutex was deleted: it is acquired anew after its lease"),
    ("ERR max number of clients", Unavailable, "the server has too many clients: raise `maxclients`"),
    ("ERR DB index", Config, "the server has no such database: choose another number"),
    ("ERR invalid DB index", Config, "the server has no such database: choose another number"),
    ("ERR SELECT is not allowed", Config, "a cluster has only database 0: omit the number"),
    ("ERR unknown command", Protocol, "the server lacks a command: use Redis 6+ or Valkey"),
    (
        "ERR This instance has cluster support disabled",
        Config,
        "the server is not part of a cluster: connect with `redis://`",
    ),
];

/// Returns whether an error reply has this code. Redis 6 and earlier put other text before the code of an error within
/// a script.
fn has_code(reply: &str, code: &str) -> bool {
    reply.starts_with(code) || reply.contains(&format!(": {code} ")) || reply.contains(&format!("-{code} "))
}

/// Returns whether an error reply says that the server accepts no writes because it is not a master, or not yet.
pub(crate) fn is_not_master(reply: &str) -> bool {
    ["READONLY", "MASTERDOWN", "LOADING"].iter().any(|code| has_code(reply, code))
}

/// Returns whether the peer closed the connection.
pub(crate) fn is_hang_up(error: &Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    let cause = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    let closed = [BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof];
    cause.is_some_and(|cause| closed.contains(&cause.kind()))
}

/// Returns the error reply that caused an error.
pub(crate) fn reply_of(error: &Error) -> Option<&str> {
    let message = std::error::Error::source(error)?.downcast_ref::<ServerMessage>()?;
    Some(&message.0)
}

/// A node of a cluster redirects to a node without an address.
pub(crate) fn unknown_endpoint(reply: &str) -> Error {
    let message = "a node of the cluster has no host name: set `cluster-announce-hostname` on every node, or \
                   `cluster-preferred-endpoint-type ip`";
    new(Unavailable, message).with_source(ServerMessage(reply.chars().take(200).collect()))
}

/// The peer is a proxy without script support.
pub(crate) fn no_scripts(address: &Address) -> Error {
    let message = format!(
        "{address} closes the connection at SCRIPT LOAD: it is a proxy without scripts and subscriptions, such as \
         twemproxy. Connect to the server itself"
    );
    new(Config, message)
}

fn classify(reply: &str) -> (ErrorKind, String) {
    let found = ERROR_CODES.iter().find(|(code, ..)| has_code(reply, code));
    found.map_or_else(
        || (Protocol, "the server answered with an error".into()),
        |(_, kind, message)| (*kind, (*message).into()),
    )
}

/// Text of an error reply.
#[derive(Debug)]
struct ServerMessage(String);

impl std::fmt::Display for ServerMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for ServerMessage {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_replies_from_within_a_script_have_the_same_kind() {
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
    fn replica_is_recognised_by_the_messages_of_redis_6_too() {
        for reply in [
            "READONLY You can't write against a read only replica.",
            "ERR Error running script (call to f_5a): @user_script:6: @user_script: 6: -READONLY You can't write \
             against a read only replica.",
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        ] {
            assert!(is_not_master(reply), "{reply}");
            assert_eq!(reply_of(&refused(reply)), Some(reply));
        }
        assert!(!is_not_master("OOM command not allowed when used memory > 'maxmemory'."));
    }

    #[test]
    fn refused_login_does_not_repeat_the_password() {
        let error = login("ERR wrong number of arguments for 'auth hunter2'");
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(!format!("{error:?}").contains("hunter2"));
    }
}
