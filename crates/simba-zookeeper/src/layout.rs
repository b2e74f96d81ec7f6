//! The paths of nodes in the tree.

use simba_core::{Error, ErrorKind, MutexName, Result};

/// The node of all mutexes, below the chroot.
const ROOT: &str = "/simba";

/// Returns whether a node can have this name. Servers check UTF-16 code units, and refuse surrogates.
pub(crate) fn is_node(name: &str) -> bool {
    let allowed = |char: char| {
        !char.is_control() && !matches!(u32::from(char), 0xe000..=0xf8ff | 0xfff0..) && char != '/'
    };
    !matches!(name, "" | "." | "..") && name.chars().all(allowed)
}

/// Checks that a mutex of this name is one node.
///
/// # Errors
///
/// [`ErrorKind::Invalid`] for a name that would be another path. Only names of [`MutexName::legacy`] can be
/// one.
pub(crate) fn check(mutex: &MutexName) -> Result<()> {
    if is_node(mutex.as_str()) {
        return Ok(());
    }
    let message = "a mutex in ZooKeeper is one node: its name has no `/`, is not `.` or `..`, and has no \
                   control characters, emoji or other characters beyond 16 bits";
    Err(Error::new(ErrorKind::Invalid, message).with_mutex(mutex))
}

/// The paths under one chroot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paths<'a> {
    chroot: &'a str,
}

impl<'a> Paths<'a> {
    pub(crate) const fn under(chroot: &'a str) -> Self {
        Self { chroot }
    }

    /// Returns the path of the node of all mutexes.
    pub(crate) fn root(self) -> String {
        format!("{}{ROOT}", self.chroot)
    }

    /// Returns the path of a mutex whose name is [checked](check).
    pub(crate) fn mutex(self, mutex: &MutexName) -> String {
        format!("{}{ROOT}/{mutex}", self.chroot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mutex_is_one_node_under_the_chroot() {
        let name = |name| MutexName::legacy(name).unwrap();
        assert_eq!(Paths::under("/teams").mutex(&name("orders")), "/teams/simba/orders");
        assert_eq!(Paths::under("").root(), "/simba");
        assert!(check(&name("orders")).is_ok());
        assert_eq!(check(&name("a/b")).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn an_invalid_name_of_a_node_is_rejected() {
        for name in ["", ".", "..", "a/b", "a\u{7}", "\u{1f981}", "\u{e000}", "\u{fff0}"] {
            assert!(!is_node(name), "{name:?}");
        }
        assert!(is_node("orders") && is_node("Bestellungen für Köln") && is_node("注文"));
    }
}
