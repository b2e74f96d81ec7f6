//! The names of Curator's `LeaderLatch` and their order.

use std::fmt;

use simba_net::queue::{Position, Proof};

use crate::client::Names;

/// The part that the name of every contender's node contains.
const LATCH: &str = "latch-";

/// The beginning of a node's name. Its random part identifies the node if the answer to the creation is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamePrefix([u8; 16]);

impl NamePrefix {
    /// Creates a random prefix. Returns `None` if the system provides no random numbers.
    pub(crate) fn random() -> Option<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).ok()?;
        // Version and variant of a random UUID.
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Some(Self(bytes))
    }

    /// Parses the name of a node. Returns `None` if it does not start with this prefix.
    pub(crate) fn parse(self, name: &str) -> Option<NodeName> {
        let number = name.strip_prefix(&*self.to_string())?;
        Some(NodeName { prefix: self, number: number.parse().ok()? })
    }
}

impl fmt::Display for NamePrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("_c_")?;
        for (at, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" })?;
        }
        write!(f, "-{LATCH}")
    }
}

/// The name of a contender's node in a third of its memory: a process may have thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeName {
    prefix: NamePrefix,
    number: i32,
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:010}", self.prefix, self.number)
    }
}

/// Returns the sort key of a node: the text after the last `latch-`, which Curator compares as text, too. That text can
/// be the same in the name of another program's node. The whole name then decides, so that exactly one node is first.
fn key(name: &str) -> (&str, &str) {
    // Hyphen by hyphen from the end: a queue has thousands of names, and the setup of a substring search is slow.
    let ends = name.rmatch_indices('-').map(|(at, _)| at + 1);
    let parts = ends.map(|end| name.split_at(end)).find(|(before, _)| before.ends_with(LATCH));
    (parts.map_or(name, |(_, key)| key), name)
}

/// Returns the first node of the queue, which holds the mutex.
pub(crate) fn first(names: &Names) -> Option<&str> {
    names.iter().min_by_key(|name| key(name))
}

/// The first node, which holds the mutex, and the one directly before the own node. They may be the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    pub(crate) first: String,
    pub(crate) next: String,
}

/// Returns the position of a node in the queue. All children count, including those of other programs.
pub(crate) fn position(names: &Names, own: &str, proof: Proof) -> Position<Ahead> {
    let (mut is_present, mut ends) = (false, None);
    let own_key = key(own);
    for name in names.iter() {
        is_present |= name == own;
        let key = key(name);
        if key < own_key {
            let (first, next) = ends.unwrap_or((key, key));
            ends = Some((first.min(key), next.max(key)));
        }
    }
    match ends {
        _ if !is_present => Position::Missing,
        Some(((_, first), (_, next))) => {
            Position::Behind(Ahead { first: first.to_owned(), next: next.to_owned() })
        }
        None => Position::First(proof),
    }
}

/// Returns the last part of a path.
pub(crate) fn name_of(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use simba_core::{FencingToken, Moment};

    use super::*;

    const PROOF: Proof = Proof { token: FencingToken::new(7), until: Moment::ZERO };

    fn names(all: &[&str]) -> Names {
        all.iter().copied().collect()
    }

    #[test]
    fn a_name_starts_as_in_curator() {
        let prefix = NamePrefix::random().unwrap().to_string();
        assert_eq!(prefix.len(), "_c_00000000-0000-4000-8000-000000000000-latch-".len());
        assert!(prefix.starts_with("_c_") && prefix.ends_with("-latch-"), "{prefix}");
        assert_eq!(prefix.as_bytes()[17], b'4', "{prefix}");
    }

    #[test]
    fn a_parsed_name_is_displayed_as_the_server_wrote_it() {
        let prefix = NamePrefix::random().unwrap();
        for number in ["0000000000", "0000000042", "2147483647", "-2147483648", "-000000001"] {
            let name = format!("{prefix}{number}");
            assert_eq!(prefix.parse(&name).unwrap().to_string(), name);
        }
        let other = NamePrefix::random().unwrap();
        for name in [format!("{other}0000000001"), format!("{prefix}x"), "y".into()] {
            assert_eq!(prefix.parse(&name), None);
        }
    }

    #[test]
    fn nodes_are_ordered_by_the_text_after_the_last_latch() {
        let queue = names(&["_c_a-latch-0000000002", "_c_z-latch-0000000001", "_c_b-latch-0000000003"]);
        assert_eq!(first(&queue), Some("_c_z-latch-0000000001"));
        assert_eq!(position(&queue, "_c_z-latch-0000000001", PROOF), Position::First(PROOF));
        let ahead = Ahead { first: "_c_z-latch-0000000001".into(), next: "_c_a-latch-0000000002".into() };
        assert_eq!(position(&queue, "_c_b-latch-0000000003", PROOF), Position::Behind(ahead));
        assert_eq!(position(&queue, "_c_c-latch-0000000004", PROOF), Position::Missing);
    }

    #[test]
    fn overflowed_numbers_and_foreign_children_sort_as_in_curator() {
        let queue = names(&["_c_a-latch-2147483647", "_c_b-latch--2147483648"]);
        assert_eq!(first(&queue), Some("_c_b-latch--2147483648"), "a minus sorts before digits");
        let queue = names(&["_c_a-latch-0000000001", "foreign", "#foreign"]);
        assert_eq!(first(&queue), Some("#foreign"), "all children count");
        assert_eq!(
            ["latch-1-2", "a-latch-x-latch-7", "latch-", "a-b"].map(|name| key(name).0),
            ["1-2", "7", "", "a-b"]
        );
    }

    #[test]
    fn of_two_nodes_with_the_same_sort_key_one_is_first() {
        let (own, foreign) = ("_c_x-latch-0000000007", "_c_y-latch-0000000007");
        let ahead = Ahead { first: own.into(), next: own.into() };
        for queue in [names(&[own, foreign]), names(&[foreign, own])] {
            assert_eq!(first(&queue), Some(own));
            assert_eq!(position(&queue, own, PROOF), Position::First(PROOF));
            assert_eq!(position(&queue, foreign, PROOF), Position::Behind(ahead.clone()));
        }
    }

    proptest! {
        #[test]
        fn exactly_one_is_first(numbers in proptest::collection::hash_set(any::<u32>(), 1..20)) {
            let queue: Vec<_> = numbers.iter().map(|n| format!("_c_x-latch-{n:010}")).collect();
            let names: Names = queue.iter().map(String::as_str).collect();
            let leads = queue.iter().filter(|own| position(&names, own, PROOF) == Position::First(PROOF));
            prop_assert_eq!(leads.count(), 1);
        }
    }
}
