//! Finds out whether keys of different mutexes are on one server.
//!
//! A proxy may spread keys over several servers by their hash tags, and run a script where its first key is. A script
//! for several mutexes would then take a mutex on a server that does not have it, while another handle takes it where
//! it is. So every connection first writes keys with tags of their own one by one, and reads them back in one script.

use std::sync::{Mutex, PoisonError};

use simba_core::ErrorKind;

use crate::error;
use crate::resp::{self, Reply};

/// How many keys are written. A server with a tenth of all keys gets none of them once in 850 times; with sixteen it
/// would be once in five.
const KEYS: usize = 64;
/// How long a key lasts if the probe does not remove it, in milliseconds.
const LASTS: &str = "10000";
/// Counts the keys that hold the nonce, and removes all.
const SCRIPT: &str = "
local found = 0
for _, value in ipairs(redis.call('MGET', unpack(KEYS))) do
  if value == ARGV[1] then found = found + 1 end
end
redis.call('DEL', unpack(KEYS))
return found";

/// The commands of one probe.
pub(crate) struct Commands {
    /// Their replies say nothing.
    pub(crate) writes: Vec<Vec<u8>>,
    /// Its reply goes to [`verdict`].
    pub(crate) read: Vec<u8>,
}

/// Returns the commands of a probe with keys that no other probe has.
pub(crate) fn commands() -> Commands {
    let nonce = format!("{:016x}", fastrand::u64(..));
    let keys: Vec<String> = (0..KEYS).map(|n| format!("simba:{{{nonce}-{n}}}:probe")).collect();
    let writes = keys.iter().map(|key| resp::command(&["SET", key, &nonce, "PX", LASTS])).collect();
    let count = KEYS.to_string();
    let mut words = vec!["EVAL", SCRIPT, &count];
    words.extend(keys.iter().map(String::as_str));
    words.push(&nonce);
    Commands { writes, read: resp::command(&words) }
}

/// What the reply to a probe shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    OneServer,
    Spread,
    /// Nothing, because the server takes no writes now: probe again.
    Unknown,
    /// Nothing, because the user lacks a right.
    Refused,
}

/// Reads the reply to a probe.
pub(crate) fn verdict(reply: &Reply) -> Verdict {
    match reply {
        // The script runs where its first key is, so it finds that one at least, unless the writes were refused.
        Reply::Int(0) => Verdict::Unknown,
        Reply::Int(found) if usize::try_from(*found) == Ok(KEYS) => Verdict::OneServer,
        Reply::Error(words) => match error::refused(words) {
            // For example out of memory. It may be so for one key and not for another, so nothing is shown.
            refused if refused.is_transient() => Verdict::Unknown,
            refused if refused.kind() == ErrorKind::Denied => Verdict::Refused,
            _ => Verdict::Spread,
        },
        _ => Verdict::Spread,
    }
}

/// Whether the keys of different mutexes are on different servers, by the last probe of a handle that showed it. Not
/// known at first.
#[derive(Debug, Default)]
pub(crate) struct Spread(Mutex<Option<bool>>);

impl Spread {
    /// Returns whether a probe found keys on different servers.
    pub(crate) fn is_spread(&self) -> bool {
        self.get() == Some(true)
    }

    /// Returns whether a probe found all keys on one server.
    pub(crate) fn is_one_server(&self) -> bool {
        self.get() == Some(false)
    }

    /// Records what a probe showed; returns whether keys are spread that were not known to be.
    pub(crate) fn record(&self, verdict: Verdict) -> bool {
        let spread = match verdict {
            Verdict::OneServer => false,
            Verdict::Spread => true,
            Verdict::Unknown | Verdict::Refused => return false,
        };
        let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(spread);
        spread && before != Some(true)
    }

    fn get(&self) -> Option<bool> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_writes_and_missing_rights_do_not_show_spread_keys() {
        let error = |words: &str| Reply::Error(words.into());
        assert_eq!(verdict(&Reply::Int(64)), Verdict::OneServer);
        assert_eq!(verdict(&Reply::Int(31)), Verdict::Spread);
        assert_eq!(verdict(&error("CROSSSLOT Keys in request don't hash to the same slot")), Verdict::Spread);
        assert_eq!(verdict(&Reply::Int(0)), Verdict::Unknown);
        assert_eq!(verdict(&error("OOM command not allowed")), Verdict::Unknown);
        assert_eq!(verdict(&error("NOPERM No permissions to access a key")), Verdict::Refused);
    }

    #[test]
    fn before_a_probe_has_shown_it_keys_are_neither_spread_nor_on_one_server() {
        let spread = Spread::default();
        for verdict in [Verdict::Unknown, Verdict::Refused] {
            assert!(!spread.record(verdict));
            assert!(!spread.is_spread() && !spread.is_one_server());
        }
        assert!(!spread.record(Verdict::OneServer));
        assert!(spread.is_one_server());
        assert!(spread.record(Verdict::Spread), "it is new");
        assert!(!spread.record(Verdict::Spread), "it is known");
        spread.record(Verdict::Refused);
        assert!(spread.is_spread(), "what shows nothing changes nothing");
    }
}
