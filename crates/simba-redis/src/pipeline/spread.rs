//! Probe that shows whether keys of different mutexes are on one server.
//!
//! A proxy may spread keys over several servers by their hash tags, and run a script on the server of its first key. A
//! script for several mutexes would then acquire a mutex on the wrong server, while another handle acquires it on the
//! right one. So every connection first writes keys with different tags one by one, and reads them back in one script.

use std::sync::{Mutex, PoisonError};

use simba_core::ErrorKind;

use crate::error;
use crate::resp::{self, Reply};

/// Number of keys. The probability that a server with a tenth of all keys gets none of them is 1 in 850; with 16 keys
/// it would be 1 in 5.
const KEYS: usize = 64;
/// Lifetime of a key in milliseconds, if the probe does not delete it.
const LIFETIME_MS: &str = "10000";
/// Counts the keys that hold the nonce, and deletes all.
const SCRIPT: &str = "
local found = 0
for _, value in ipairs(redis.call('MGET', unpack(KEYS))) do
  if value == ARGV[1] then found = found + 1 end
end
redis.call('DEL', unpack(KEYS))
return found";

/// Returns the commands of a probe with unique keys: writes, whose replies are ignored, and the command whose reply
/// [`verdict`] evaluates.
pub(crate) fn commands() -> (Vec<Vec<u8>>, Vec<u8>) {
    let nonce = format!("{:016x}", fastrand::u64(..));
    let keys: Vec<String> = (0..KEYS).map(|n| format!("simba:{{{nonce}-{n}}}:probe")).collect();
    let writes = keys.iter().map(|key| resp::command(&["SET", key, &nonce, "PX", LIFETIME_MS])).collect();
    let count = KEYS.to_string();
    let mut words = vec!["EVAL", SCRIPT, &count];
    words.extend(keys.iter().map(String::as_str));
    words.push(&nonce);
    (writes, resp::command(&words))
}

/// Result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    OneServer,
    Spread,
    /// Inconclusive because the server accepts no writes now. The probe has to be repeated.
    Unknown,
    /// Inconclusive because the user lacks a right.
    Refused,
}

/// Evaluates the reply to a probe.
pub(crate) fn verdict(reply: &Reply) -> Verdict {
    match reply {
        // The script runs on the server of its first key, so it finds at least that one, unless the writes were
        // refused.
        Reply::Int(0) => Verdict::Unknown,
        Reply::Int(found) if usize::try_from(*found) == Ok(KEYS) => Verdict::OneServer,
        Reply::Error(words) => match error::refused(words) {
            // For example out of memory, which may affect some keys only.
            refused if refused.is_transient() => Verdict::Unknown,
            refused if refused.kind() == ErrorKind::Denied => Verdict::Refused,
            _ => Verdict::Spread,
        },
        _ => Verdict::Spread,
    }
}

/// Whether keys of different mutexes are on different servers, by the last conclusive probe of a handle. Unknown at
/// first.
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

    /// Records the result of a probe. Warns, and returns true, if it found spread keys and the last conclusive probe did not.
    pub(crate) fn record(&self, verdict: Verdict) -> bool {
        let spread = match verdict {
            Verdict::OneServer => false,
            Verdict::Spread => true,
            Verdict::Unknown | Verdict::Refused => return false,
        };
        let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(spread);
        let is_new = spread && before != Some(true);
        if is_new {
            tracing::warn!(
                "redis: keys of different mutexes are on different servers, most likely behind a proxy; calls are not \
                 batched. Fix: connect to the server itself, or with redis+cluster:// to a cluster"
            );
        }
        is_new
    }

    fn get(&self) -> Option<bool> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_writes_and_missing_rights_are_inconclusive() {
        let error = |words: &str| Reply::Error(words.into());
        assert_eq!(verdict(&Reply::Int(64)), Verdict::OneServer);
        assert_eq!(verdict(&Reply::Int(31)), Verdict::Spread);
        assert_eq!(verdict(&error("CROSSSLOT Keys in request don't hash to the same slot")), Verdict::Spread);
        assert_eq!(verdict(&Reply::Int(0)), Verdict::Unknown);
        assert_eq!(verdict(&error("OOM command not allowed")), Verdict::Unknown);
        assert_eq!(verdict(&error("NOPERM No permissions to access a key")), Verdict::Refused);
    }

    #[test]
    fn keys_are_neither_spread_nor_on_one_server_before_a_conclusive_probe() {
        let spread = Spread::default();
        for verdict in [Verdict::Unknown, Verdict::Refused] {
            assert!(!spread.record(verdict));
            assert!(!spread.is_spread() && !spread.is_one_server());
        }
        assert!(!spread.record(Verdict::OneServer));
        assert!(spread.is_one_server());
        assert!(spread.record(Verdict::Spread), "the first result is reported");
        assert!(!spread.record(Verdict::Spread), "a repeated result is not reported");
        spread.record(Verdict::Refused);
        assert!(spread.is_spread(), "an inconclusive probe changes nothing");
    }
}
