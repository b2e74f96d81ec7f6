//! Where things are in the tree.

use std::sync::Arc;

use simba_core::{Error, ErrorKind, MutexName, Result};

/// The node with all mutexes, under the chroot.
const ROOT: &str = "/simba";

/// Whether a node can have this name. Servers look at 16 bits at a time, and refuse halves of longer ones.
pub(crate) fn is_node(name: &str) -> bool {
    let allowed = |char: char| {
        !char.is_control() && !matches!(u32::from(char), 0xe000..=0xf8ff | 0xfff0..) && char != '/'
    };
    !matches!(name, "" | "." | "..") && name.chars().all(allowed)
}

/// The paths under one chroot.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    pub(crate) chroot: Arc<str>,
}

impl Paths {
    pub(crate) fn root(&self) -> String {
        format!("{}{ROOT}", self.chroot)
    }

    /// The node of a mutex.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a name that would be another place in the tree: only names from elsewhere can.
    pub(crate) fn mutex(&self, mutex: &MutexName) -> Result<Arc<str>> {
        let name = mutex.as_str();
        if !is_node(name) {
            let message = "a mutex in ZooKeeper is one node: its name has no `/`, is not `.` or `..`, and has no \
                           control characters, emoji or other characters beyond 16 bits";
            return Err(Error::new(ErrorKind::Invalid, message).with_mutex(mutex));
        }
        Ok(format!("{}{ROOT}/{name}", self.chroot).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mutex_is_one_node_under_the_chroot() {
        let paths = Paths { chroot: "/teams".into() };
        let path = |name: &str| paths.mutex(&MutexName::legacy(name).unwrap());
        assert_eq!(&*path("orders").unwrap(), "/teams/simba/orders");
        assert_eq!(Paths { chroot: "".into() }.root(), "/simba");
        assert_eq!(path("a/b").unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_name_that_no_node_can_have_is_told() {
        for name in ["", ".", "..", "a/b", "a\u{7}", "\u{1f981}", "\u{e000}", "\u{fff0}"] {
            assert!(!is_node(name), "{name:?}");
        }
        assert!(is_node("orders") && is_node("Bestellungen für Köln") && is_node("注文"));
    }
}
