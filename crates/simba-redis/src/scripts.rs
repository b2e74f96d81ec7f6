//! Lua scripts that run in the server. Their text is constant and they declare every key.
//!
//! # Values in the server
//!
//! The fence `simba:{<mutex>}:fence` has one of these forms. Any other text counts as no fence.
//!
//! | form | text | meaning |
//! |---|---|---|
//! | hold | `<token><mark><session> <transition> <contender>` | the last acquisition; kept after its release |
//! | reservation | `!<end> <token> <waiter>` | free; only `<waiter>` may acquire it until `<end>` |
//! | token | `<token>` | free; the reservation was cancelled |
//!
//! | part | text |
//! |---|---|
//! | token | the last fencing token, 16 digits; `0` in a reservation without a last token |
//! | mark | a space, or `*` if observers want the release published |
//! | session | random number of the session, 16 hexadecimal digits |
//! | transition | of the lease, in ms, 11 digits |
//! | contender | id of the holder |
//! | end | server time in ms, 13 digits |
//! | waiter | id of the woken waiter |
//!
//! The score of a waiter in `simba:{<mutex>}:contender` is its position: server time in seconds, less half a second. The
//! score in `simba:{<mutex>}:alive` is the expiry of its entry: server time in ms, plus 0.5 if it has subscribed.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use simba_core::{FencingToken, MutexName};

use crate::resp::{self, Reply};
use crate::supervisor::Via;

/// A script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    Contend,
    Release,
    Inspect,
    Evict,
    /// A batch of fast-path calls.
    Many,
    /// A renewal that declares only existing keys.
    Renew,
}

impl Script {
    pub(crate) const ALL: [Self; 6] =
        [Self::Contend, Self::Release, Self::Inspect, Self::Evict, Self::Many, Self::Renew];

    /// Returns the text of the script's file.
    const fn text(self) -> &'static str {
        match self {
            Self::Contend => include_str!("scripts/contend.lua"),
            Self::Release => include_str!("scripts/release.lua"),
            Self::Inspect => include_str!("scripts/inspect.lua"),
            Self::Evict => include_str!("scripts/evict.lua"),
            Self::Many => include_str!("scripts/many.lua"),
            Self::Renew => include_str!("scripts/renew.lua"),
        }
    }
}

/// Constants, before every script.
const LAYOUT: &str = include_str!("scripts/layout.lua");
/// Functions, where a script includes them.
const SHARED: &str = include_str!("scripts/shared.lua");
const INCLUDE_SHARED: &str = "-- include shared.lua\n";
/// How late the expiry of a fence may be extended, so that not every use of a mutex has to. The scripts rely on it.
const FENCE_SLACK: Duration = Duration::from_secs(1000);

/// Scripts of one handle, in the order of [`Script::ALL`].
pub(crate) struct Scripts {
    sources: [String; Script::ALL.len()],
    /// SHA-1 digests, which are the same on every server. Known after the first connection.
    digests: OnceLock<[String; Script::ALL.len()]>,
}

impl Scripts {
    /// Creates scripts that keep a fence for `fence_retention` after the last use of its mutex.
    pub(crate) fn new(fence_retention: Duration) -> Self {
        let retention_ms = (fence_retention + FENCE_SLACK).as_millis();
        let layout = LAYOUT.replace("$FENCE_KEPT", &retention_ms.to_string());
        let source = |script: Script| format!("{layout}{}", script.text().replace(INCLUDE_SHARED, SHARED));
        Self { sources: Script::ALL.map(source), digests: OnceLock::new() }
    }

    pub(crate) fn source(&self, script: Script) -> &str {
        &self.sources[script as usize]
    }

    pub(crate) fn digest(&self, script: Script) -> Option<&str> {
        self.digests.get().map(|digests| digests[script as usize].as_str())
    }

    /// Returns the commands that load the scripts into a server.
    pub(crate) fn load_commands(&self) -> Vec<Vec<&str>> {
        self.sources.iter().map(|source| vec!["SCRIPT", "LOAD", source]).collect()
    }

    /// Stores the digests from the replies to [`load_commands`](Self::load_commands). Returns `None` if they are not
    /// digests.
    pub(crate) fn store_digests(&self, replies: &[Reply]) -> Option<()> {
        let digests: Option<Vec<String>> = replies.iter().map(|reply| reply.text().map(Into::into)).collect();
        let digests = digests?.try_into().ok()?;
        self.digests.get_or_init(|| digests);
        Some(())
    }
}

/// An argument of a script.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    Text(&'a str),
    Number(u64),
    Caller(Caller<'a>),
    /// A hold as it is in the fence.
    Hold(FencingToken, Caller<'a>),
}

/// Part of the fence that identifies a session as the holder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller<'a> {
    /// Random number that distinguishes sessions with the same contender id.
    pub(crate) nonce: u64,
    /// Transition of the lease in milliseconds.
    pub(crate) transition: u64,
    pub(crate) contender: &'a str,
}

/// One call of a script on one mutex.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Invocation<'a> {
    pub(crate) script: Script,
    pub(crate) mutex: &'a MutexName,
    pub(crate) args: &'a [Arg<'a>],
    pub(crate) via: Via,
    /// The expected case, which allows the call to be batched with others.
    pub(crate) fast_path: Option<FastPath<'a>>,
}

/// The expected case of a call. A batch does nothing for a call whose mutex is in another state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FastPath<'a> {
    /// The caller still holds the mutex. Renews it for this many milliseconds.
    Renew(Caller<'a>, u64),
    /// The mutex is free and has no waiters. Acquires it for this many milliseconds.
    Acquire(Caller<'a>, u64),
    /// The caller holds the mutex under this token, and it has no waiters.
    Release(Caller<'a>, FencingToken),
}

/// Suffixes of a mutex's keys, in the order of the scripts.
pub(crate) const SUFFIXES: [&[u8]; 4] = [b"}", b"}:contender", b"}:fence", b"}:alive"];

impl<'a> Invocation<'a> {
    /// Creates a call without a fast path, on the main connection.
    pub(crate) fn new(script: Script, mutex: &'a MutexName, args: &'a [Arg<'a>]) -> Self {
        Self { script, mutex, args, via: Via::Main, fast_path: None }
    }

    /// Writes the call with the script's digest, or with its source if no digest is known.
    pub(crate) fn write(&self, out: &mut Vec<u8>, scripts: &Scripts) {
        match scripts.digest(self.script) {
            Some(digest) => self.write_as(out, b"EVALSHA", digest),
            None => self.write_source(out, scripts),
        }
    }

    /// Writes the call with the script's source, for a server that no longer has the script.
    pub(crate) fn write_source(&self, out: &mut Vec<u8>, scripts: &Scripts) {
        self.write_as(out, b"EVAL", scripts.source(self.script));
    }

    fn write_as(&self, out: &mut Vec<u8>, command: &[u8], script: &str) {
        let [mutex, _, fence, _] = SUFFIXES;
        let suffixes = if self.script == Script::Renew { &[mutex, fence][..] } else { &SUFFIXES };
        resp::write_array_header(out, 3 + suffixes.len() + self.args.len());
        resp::write_bulk(out, command);
        resp::write_bulk(out, script.as_bytes());
        resp::write_bulk_number(out, suffixes.len() as u64);
        suffixes.iter().for_each(|suffix| write_key(out, self.mutex, suffix));
        self.args.iter().for_each(|arg| arg.write(out));
    }
}

pub(crate) fn write_key(out: &mut Vec<u8>, mutex: &MutexName, suffix: &[u8]) {
    resp::write_bulk_parts(out, &[b"simba:{", mutex.as_str().as_bytes(), suffix]);
}

impl fmt::Display for Caller<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Of fixed length: the scripts cut the fence at fixed positions.
        let transition = self.transition.min(99_999_999_999);
        write!(f, "{:016x} {transition:011} {}", self.nonce, self.contender)
    }
}

impl Arg<'_> {
    pub(crate) fn write(self, out: &mut Vec<u8>) {
        match self {
            Self::Text(text) => resp::write_bulk(out, text.as_bytes()),
            Self::Number(number) => resp::write_bulk_number(out, number),
            Self::Caller(caller) => resp::write_bulk(out, caller.to_string().as_bytes()),
            Self::Hold(token, caller) => {
                resp::write_bulk(out, format!("{:016} {caller}", token.get()).as_bytes())
            }
        }
    }
}

/// Returns the key of the mutex, which is also the channel for its acquisitions.
pub(crate) fn key(mutex: &MutexName) -> String {
    format!("simba:{{{mutex}}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_declares_every_key_and_contains_its_arguments() {
        let mutex = MutexName::new("m").unwrap();
        let args = [
            Arg::Text("a@b"),
            Arg::Number(7),
            Arg::Caller(Caller { nonce: 0xab, transition: 6, contender: "a@b" }),
        ];
        let call = Invocation::new(Script::Release, &mutex, &args);
        let scripts = Scripts::new(Duration::from_secs(60));
        scripts
            .store_digests(&["0", "1", "2", "3", "4", "5"].map(|digest| Reply::Status(digest.into())))
            .unwrap();
        let mut out = Vec::new();
        call.write(&mut out, &scripts);
        let text = String::from_utf8(out).unwrap();
        let words: Vec<_> = text.split("\r\n").skip(2).step_by(2).collect();
        let wanted = [
            "EVALSHA",
            "1",
            "4",
            "simba:{m}",
            "simba:{m}:contender",
            "simba:{m}:fence",
            "simba:{m}:alive",
            "a@b",
            "7",
            "00000000000000ab 00000000006 a@b",
        ];
        assert_eq!(words, wanted);
    }
}
