//! The layout that Curator's `LeaderLatch` has, as far as names and their order go.

use std::fmt::Write as _;

/// What every contender's node has in its name.
const LATCH: &str = "latch-";

/// The beginning of a new node's name. The random part finds it again when the answer to its creation is lost.
pub(crate) fn prefix() -> Option<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).ok()?;
    // A random UUID says so.
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut name = String::from("_c_");
    for (at, byte) in bytes.iter().enumerate() {
        let _ = write!(name, "{}{byte:02x}", if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" });
    }
    name.push('-');
    name.push_str(LATCH);
    Some(name)
}

/// What nodes are ordered by: the text after the last `latch-`, compared as text, as all peers do.
fn key(name: &str) -> &str {
    name.rsplit_once(LATCH).map_or(name, |(_, number)| number)
}

/// The first of the queue: whoever it is holds the mutex.
pub(crate) fn first(names: &[String]) -> Option<&str> {
    names.iter().min_by_key(|name| key(name)).map(String::as_str)
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
pub(crate) fn standing<'a>(names: &'a [String], own: &str) -> Standing<'a> {
    if !names.iter().any(|name| name == own) {
        return Standing::Missing;
    }
    let before = || names.iter().filter(|name| key(name) < key(own)).map(String::as_str);
    match (before().min_by_key(|name| key(name)), before().max_by_key(|name| key(name))) {
        (Some(first), Some(next)) => Standing::Behind { first, next },
        _ => Standing::First,
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

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_name_begins_as_curator_s_do() {
        let prefix = prefix().unwrap();
        assert_eq!(prefix.len(), "_c_00000000-0000-4000-8000-000000000000-latch-".len());
        assert!(prefix.starts_with("_c_") && prefix.ends_with("-latch-"), "{prefix}");
        assert_eq!(prefix.as_bytes()[17], b'4', "{prefix}");
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
    }

    proptest! {
        #[test]
        fn exactly_one_is_first(numbers in proptest::collection::hash_set(any::<u32>(), 1..20)) {
            let queue: Vec<_> = numbers.iter().map(|n| format!("_c_x-latch-{n:010}")).collect();
            let leads = queue.iter().filter(|own| standing(&queue, own) == Standing::First);
            prop_assert_eq!(leads.count(), 1);
        }
    }
}
