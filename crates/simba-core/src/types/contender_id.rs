use std::sync::{Arc, OnceLock};

use super::text::{check, text};
use crate::error::{Error, Result};

/// The id of one contender at the store. Never used twice.
///
/// The engine generates a new id for every lock, every start and after every step-down, so two contenders never
/// take each other's hold for their own. [`generate`](Self::generate) returns
/// `<12 random characters>.<pid>@<host>`, which shows the machine and the process to a person who reads the
/// store. With a label (see [`Locker::with_label`](crate::Locker::with_label)) the id is
/// `<label>.<12 random characters>` instead.
///
/// An id is at most 32 characters of `a-z 0-9 . _ : @ -`, without `@@` and without an `@` at its end, since
/// JVM peers split their messages there.
///
/// # Examples
///
/// ```
/// use simba_core::ContenderId;
///
/// let (one, other) = (ContenderId::generate(), ContenderId::generate());
/// assert_ne!(one, other);
/// assert_eq!(one.pid(), Some(std::process::id()));
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContenderId(Arc<str>);

/// Lower case and digits, without characters that look alike.
const BASE32: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
const NONCE_LEN: usize = 12;

impl ContenderId {
    /// The maximum length of an id: the width of the oldest owner column.
    pub const MAX_LEN: usize = 32;

    /// The maximum length of a peer's id, in bytes.
    pub const MAX_FOREIGN_LEN: usize = 512;

    /// Generates a new id.
    #[must_use]
    pub fn generate() -> Self {
        static SUFFIX: OnceLock<(u32, String)> = OnceLock::new();
        let pid = std::process::id();
        // A forked child inherits the cache. Its pid differs, so it computes the suffix again.
        let cached = SUFFIX.get_or_init(|| (pid, suffix(pid)));
        let mut id = String::with_capacity(Self::MAX_LEN);
        id.extend(nonce());
        match cached {
            (cached, suffix) if *cached == pid => id.push_str(suffix),
            _ => id.push_str(&suffix(pid)),
        }
        Self(id.into())
    }

    /// Generates a new id that begins with this label.
    pub(crate) fn labelled(label: &Label) -> Self {
        let mut id = String::with_capacity(Self::MAX_LEN);
        id.push_str(label.as_str());
        id.push('.');
        id.extend(nonce());
        Self(id.into())
    }

    /// Creates an id from text, such as in a test or an operator's command.
    ///
    /// Lockers and contentions generate their own ids; see [`Locker::with_label`](crate::Locker::with_label).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid), with the violated rule and the position.
    pub fn new(id: impl AsRef<str>) -> Result<Self> {
        let id = id.as_ref();
        check("contender id", id, "a-z 0-9 . _ : @ -", is_plain, "")?;
        if id.len() > Self::MAX_LEN {
            return Err(Error::invalid(format!("a contender id has at most {} characters", Self::MAX_LEN)));
        }
        if id.contains("@@") || id.ends_with('@') {
            return Err(Error::invalid(
                "a contender id has no `@@` and no `@` at its end: peers split their messages there",
            ));
        }
        Ok(Self(id.into()))
    }

    /// Creates the id of a peer from its text in the store. For backends.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Protocol`](crate::ErrorKind::Protocol) if it cannot be an id: empty, longer than
    /// 512 bytes, or with control characters.
    pub fn foreign(id: impl AsRef<str>) -> Result<Self> {
        let id = id.as_ref();
        if id.is_empty() || id.len() > Self::MAX_FOREIGN_LEN || id.chars().any(char::is_control) {
            return Err(Error::new(
                crate::ErrorKind::Protocol,
                "the store names an owner that is no contender id: another program uses this name",
            ));
        }
        Ok(Self(id.into()))
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the host part, if the id has one.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        self.0.rsplit_once('@').map(|(_, host)| host).filter(|host| !host.is_empty())
    }

    /// Returns the process id, if the id has one: in the form `nonce.pid@host`, or `n:pid@host` of the JVM.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        let (front, _) = self.0.rsplit_once('@')?;
        if let Some((nonce, pid)) = front.rsplit_once('.') {
            return if nonce.len() == NONCE_LEN { u32::from_str_radix(pid, 36).ok() } else { None };
        }
        front.rsplit_once(':').and_then(|(_, pid)| pid.parse().ok())
    }
}

/// The user's part of a contender's id.
///
/// It has no `@`: in an id, the host follows an `@`, and the process may precede it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Label(Arc<str>);

impl Label {
    /// The length of an id without the dot and the random characters.
    const MAX_LEN: usize = ContenderId::MAX_LEN - NONCE_LEN - 1;

    /// Checks a label. Fails with [`ErrorKind::Invalid`](crate::ErrorKind::Invalid), which names rule and position.
    pub(crate) fn new(label: &str) -> Result<Self> {
        check("label", label, "a-z 0-9 . _ : -", |c| is_plain(c) && c != '@', "")?;
        if label.len() > Self::MAX_LEN {
            return Err(Error::invalid(format!(
                "a label has at most {} characters, and `{label}` has {}",
                Self::MAX_LEN,
                label.len()
            )));
        }
        Ok(Self(label.into()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_plain(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '_' | ':' | '@' | '-')
}

/// Returns 60 random bits from the operating system, so that two containers with equal state get different ids.
fn nonce() -> [char; NONCE_LEN] {
    let mut bits = getrandom::u64().unwrap_or_else(|_| fastrand::u64(..));
    [(); NONCE_LEN].map(|()| {
        let c = BASE32[(bits % 32) as usize];
        bits /= 32;
        char::from(c)
    })
}

/// Returns `.<pid in base 36>@<host>`, with the host truncated so that the id has at most 32 characters.
fn suffix(pid: u32) -> String {
    let mut suffix = format!(".{}@", base36(pid));
    let room = ContenderId::MAX_LEN - NONCE_LEN - suffix.len();
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let host: String = host.chars().take(room).map(|c| if is_host(c) { c } else { '-' }).collect();
    suffix.push_str(if host.is_empty() { "host" } else { &host });
    suffix
}

fn is_host(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-')
}

fn base36(mut number: u32) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(char::from_digit(number % 36, 36).unwrap_or('0'));
        number /= 36;
        if number == 0 {
            return digits.iter().rev().collect();
        }
    }
}

text!(ContenderId);

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn generated_ids_are_valid_distinct_and_have_host_and_process() {
        let ids: HashSet<_> = (0..1000).map(|_| ContenderId::generate()).collect();
        assert_eq!(ids.len(), 1000);
        for id in ids {
            assert_eq!(ContenderId::new(id.as_str()).unwrap(), id);
            assert_eq!(id.pid(), Some(std::process::id()));
            assert!(id.host().is_some());
        }
    }

    #[test]
    fn ids_with_one_label_are_valid_distinct_and_have_no_host_or_process() {
        for label in ["a", "node-1", "3:4711", "abcdefghijkm.1a", "nineteen_characters"] {
            let label = Label::new(label).unwrap();
            let ids: HashSet<_> = (0..1000).map(|_| ContenderId::labelled(&label)).collect();
            assert_eq!(ids.len(), 1000);
            for id in ids {
                assert_eq!(ContenderId::new(id.as_str()).unwrap(), id);
                let (front, nonce) = id.as_str().rsplit_once('.').unwrap();
                assert_eq!((front, nonce.len()), (label.as_str(), NONCE_LEN));
                assert_eq!((id.host(), id.pid()), (None, None));
            }
        }
    }

    #[test]
    fn invalid_labels_are_rejected_with_the_rule_and_never_truncated() {
        let refusal = |label: &str| Label::new(label).unwrap_err().to_string();
        assert!(refusal("").contains("at least one"));
        assert!(refusal("Node").contains("`N` at position 0"));
        assert!(refusal("me@host").contains("`@` at position 2"));
        assert!(refusal("a b").contains("` ` at position 1"));
        assert!(refusal("é").contains("position 0"));
        assert!(refusal(&"a".repeat(20)).contains("at most 19"));
    }

    #[test]
    fn greatest_pid_fits_into_an_id() {
        assert!(NONCE_LEN + suffix(u32::MAX).len() <= ContenderId::MAX_LEN);
        assert_eq!(u32::from_str_radix(&base36(u32::MAX), 36), Ok(u32::MAX));
        assert_eq!(base36(0), "0");
    }

    #[test]
    fn invalid_ids_are_rejected_with_the_rule() {
        let refusal = |id: &str| ContenderId::new(id).unwrap_err().to_string();
        assert!(refusal("").contains("at least one"));
        assert!(refusal("A").contains("`A` at position 0"));
        assert!(refusal(&"a".repeat(33)).contains("at most 32"));
        assert!(refusal("a@@b").contains("@@"));
        assert!(refusal("a@").contains("end"));
    }

    #[test]
    fn ids_of_jvm_peers_have_host_and_pid() {
        let id = ContenderId::foreign("3:4711@10.0.0.7").unwrap();
        assert_eq!((id.host(), id.pid()), (Some("10.0.0.7"), Some(4711)));
        let opaque = ContenderId::foreign("7f3a0c").unwrap();
        assert_eq!((opaque.host(), opaque.pid()), (None, None));
    }

    #[test]
    fn impossible_id_in_the_store_is_a_protocol_error() {
        for id in ["", "a\0b", &"x".repeat(513)] {
            assert_eq!(ContenderId::foreign(id).unwrap_err().kind(), crate::ErrorKind::Protocol);
        }
    }
}
