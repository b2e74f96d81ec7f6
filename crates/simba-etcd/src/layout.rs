//! Names of the keys in the store.

use simba_core::{Error, ErrorKind, MutexName, Result};

/// The prefix of all mutexes, below the prefix of the URL.
const ROOT: &str = "simba/";

/// Checks that no key of a mutex with this name belongs to another mutex.
///
/// # Errors
///
/// [`ErrorKind::Invalid`] for a name with a slash, which only legacy names have: its keys would be among those of
/// another mutex.
pub(crate) fn check(mutex: &MutexName) -> Result<()> {
    if !mutex.as_str().contains('/') {
        return Ok(());
    }
    let message = "the name of a mutex in etcd has no `/`: its keys would lie among those of another mutex";
    Err(Error::new(ErrorKind::Invalid, message).with_mutex(mutex))
}

/// The keys below one prefix, which is empty or ends with a slash.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keys<'a> {
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    pub(crate) const fn under(prefix: &'a str) -> Self {
        Self { prefix }
    }

    /// Returns the prefix of all keys.
    pub(crate) fn root(self) -> String {
        format!("{}{ROOT}", self.prefix)
    }

    /// Returns the prefix of the keys of a mutex whose name passed [`check`].
    pub(crate) fn mutex(self, mutex: &MutexName) -> String {
        format!("{}{ROOT}{mutex}/", self.prefix)
    }

    /// Returns the mutex that a key belongs to; `None` for a key that does not follow the layout.
    pub(crate) fn mutex_of(self, key: &[u8]) -> Option<MutexName> {
        let below = key.strip_prefix(self.prefix.as_bytes())?.strip_prefix(ROOT.as_bytes())?;
        let end = below.iter().position(|byte| *byte == b'/')?;
        MutexName::legacy(std::str::from_utf8(&below[..end]).ok()?).ok()
    }
}

/// Returns the first key after all keys with this prefix, which ends with a slash.
pub(crate) fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> MutexName {
        MutexName::legacy(name).unwrap()
    }

    #[test]
    fn a_mutex_has_a_prefix_of_its_own() {
        assert_eq!(Keys::under("teams/").mutex(&name("orders")), "teams/simba/orders/");
        assert_eq!(Keys::under("").root(), "simba/");
        assert_eq!(end_of("simba/a/"), b"simba/a0");
        assert!(b"simba/a/zzz".as_slice() < end_of("simba/a/").as_slice());
        assert!(b"simba/ab/1".as_slice() > end_of("simba/a/").as_slice());
        assert!(check(&name("orders")).is_ok());
        assert_eq!(check(&name("a/b")).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn only_a_key_of_the_layout_names_a_mutex() {
        let keys = Keys::under("teams/");
        assert_eq!(keys.mutex_of(b"teams/simba/orders/1-a"), Some(name("orders")));
        for other in ["simba/orders/1-a", "teams/simba/orders", "teams/simba//x"] {
            assert_eq!(keys.mutex_of(other.as_bytes()), None, "{other}");
        }
        assert_eq!(keys.mutex_of(b"\xff"), None);
        assert_eq!(keys.mutex_of(b"teams/simba/\xff/1-a"), None);
        assert_eq!(keys.mutex_of(b"teams/simba/orders/\xff"), Some(name("orders")), "it holds the mutex");
    }
}
