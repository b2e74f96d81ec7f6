//! Finds out whether keys of different mutexes are on one server.
//!
//! A proxy may spread keys over several servers by their hash tags, and run a script where its first key is. A script
//! for several mutexes would then take a mutex on a server that does not have it, while another handle takes it where
//! it is. So every connection first writes keys with tags of their own one by one, and reads them back in one script.

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

/// Returns whether all keys were on one server; `None` if the reply does not say.
pub(crate) fn verdict(reply: &Reply) -> Option<bool> {
    match reply {
        Reply::Int(found) => Some(usize::try_from(*found) == Ok(KEYS)),
        // For example out of memory. It may be so for one key and not for another, so nothing is shown.
        Reply::Error(words) if error::refused(words).is_transient() => None,
        _ => Some(false),
    }
}
