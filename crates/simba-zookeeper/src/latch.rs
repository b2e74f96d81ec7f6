//! The layout that Curator's `LeaderLatch` has, as far as names and their order go.

use std::fmt;

use crate::client::Names;

/// What every contender's node has in its name.
const LATCH: &str = "latch-";

/// The random part of a node's name, which finds it again when the answer to its creation is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark([u8; 16]);

impl Mark {
    /// A new one; nothing if the system has no random numbers.
    pub(crate) fn random() -> Option<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).ok()?;
        // A random UUID says so.
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Some(Self(bytes))
    }

    /// The node of this mark, by its name.
    pub(crate) fn find(self, name: &str) -> Option<Name> {
        let number = name.strip_prefix(&*self.to_string())?;
        Some(Name { mark: self, number: number.parse().ok()? })
    }
}

/// The beginning of a node's name.
impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("_c_")?;
        for (at, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" })?;
        }
        write!(f, "-{LATCH}")
    }
}

/// The name of a node of ours, in a third of its letters: a process may have thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    mark: Mark,
    number: i32,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:010}", self.mark, self.number)
    }
}

/// What nodes are ordered by: the text after the last `latch-`, compared as text, as all peers do.
fn key(name: &str) -> &str {
    // From the end, hyphen by hyphen: a queue has thousands of names, and a search for a text is slow to begin.
    let ends = name.rmatch_indices('-').map(|(at, _)| at + 1);
    ends.map(|end| name.split_at(end))
        .find(|(before, _)| before.ends_with(LATCH))
        .map_or(name, |(_, key)| key)
}

/// The first of the queue: whoever it is holds the mutex.
pub(crate) fn first(names: &Names) -> Option<&str> {
    names.iter().min_by_key(|name| key(name))
}

/// Where a node stands in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing<'a> {
    /// It is not there.
    Missing,
    First,
    /// Behind these two, which may be one.
    Behind {
        first: &'a str,
        next: &'a str,
    },
}

/// Finds a node in the queue. All children count, whoever made them.
pub(crate) fn standing<'a>(names: &'a Names, own: &str) -> Standing<'a> {
    let (mut there, mut ends) = (false, None);
    let turn = key(own);
    for name in names.iter() {
        there |= name == own;
        let key = key(name);
        if key < turn {
            let (first, next) = ends.unwrap_or(((key, name), (key, name)));
            ends = Some((first.min((key, name)), next.max((key, name))));
        }
    }
    match ends {
        _ if !there => Standing::Missing,
        Some(((_, first), (_, next))) => Standing::Behind { first, next },
        None => Standing::First,
    }
}

/// The last part of a path.
pub(crate) fn name_of(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(all: &[&str]) -> Names {
        all.iter().copied().collect()
    }

    #[test]
    fn a_name_begins_as_curator_s_do() {
        let prefix = Mark::random().unwrap().to_string();
        assert_eq!(prefix.len(), "_c_00000000-0000-4000-8000-000000000000-latch-".len());
        assert!(prefix.starts_with("_c_") && prefix.ends_with("-latch-"), "{prefix}");
        assert_eq!(prefix.as_bytes()[17], b'4', "{prefix}");
    }

    #[test]
    fn a_name_in_little_space_is_the_server_s() {
        let mark = Mark::random().unwrap();
        for number in ["0000000000", "0000000042", "2147483647", "-2147483648", "-000000001"] {
            let name = format!("{mark}{number}");
            assert_eq!(mark.find(&name).unwrap().to_string(), name);
        }
        for other in [format!("{}0000000001", Mark::random().unwrap()), format!("{mark}x"), "y".into()] {
            assert_eq!(mark.find(&other), None);
        }
    }

    #[test]
    fn order_is_by_the_text_after_the_last_latch() {
        let queue = names(&["_c_a-latch-0000000002", "_c_z-latch-0000000001", "_c_b-latch-0000000003"]);
        assert_eq!(first(&queue), Some("_c_z-latch-0000000001"));
        assert_eq!(standing(&queue, "_c_z-latch-0000000001"), Standing::First);
        assert_eq!(
            standing(&queue, "_c_b-latch-0000000003"),
            Standing::Behind { first: "_c_z-latch-0000000001", next: "_c_a-latch-0000000002" }
        );
        assert_eq!(standing(&queue, "_c_c-latch-0000000004"), Standing::Missing);
    }

    #[test]
    fn numbers_past_the_end_and_foreign_children_sort_as_they_do_for_curator() {
        let queue = names(&["_c_a-latch-2147483647", "_c_b-latch--2147483648"]);
        assert_eq!(first(&queue), Some("_c_b-latch--2147483648"), "a minus sorts before digits");
        let queue = names(&["_c_a-latch-0000000001", "foreign", "#foreign"]);
        assert_eq!(first(&queue), Some("#foreign"), "all children count");
        assert_eq!(["latch-1-2", "a-latch-x-latch-7", "latch-", "a-b"].map(key), ["1-2", "7", "", "a-b"]);
    }

    proptest! {
        #[test]
        fn exactly_one_is_first(numbers in proptest::collection::hash_set(any::<u32>(), 1..20)) {
            let queue: Vec<_> = numbers.iter().map(|n| format!("_c_x-latch-{n:010}")).collect();
            let names: Names = queue.iter().map(String::as_str).collect();
            let leads = queue.iter().filter(|own| standing(&names, own) == Standing::First);
            prop_assert_eq!(leads.count(), 1);
        }
    }
}
