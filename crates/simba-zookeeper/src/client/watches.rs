//! Who is to be woken when a node changes.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};

use super::bells::{Ring, Topic};

/// The watches of one connection. Each fires once; all of them are gone with the connection.
///
/// Known by the hash of their path, for the sake of space: two that have one in common would wake each other's
/// contenders, once in an age, and a hint is never a fact.
#[derive(Debug, Default)]
pub(super) struct Watches {
    of: HashMap<u64, Topics>,
    hash: RandomState,
    /// How many nodes somebody waits behind.
    turns: usize,
}

/// Nearly always one: no two contenders wait for the same node. The others are boxed for its sake.
#[derive(Debug)]
enum Topics {
    One(Topic),
    #[expect(clippy::box_collection, reason = "a vector would make every entry larger")]
    Many(Box<Vec<Topic>>),
}

impl Topics {
    fn add(&mut self, topic: Topic) {
        match self {
            Self::One(one) if *one == topic => {}
            Self::One(one) => *self = Self::Many(Box::new(vec![*one, topic])),
            Self::Many(many) if many.contains(&topic) => {}
            Self::Many(many) => many.push(topic),
        }
    }

    fn all(&self) -> &[Topic] {
        match self {
            Self::One(topic) => std::slice::from_ref(topic),
            Self::Many(topics) => topics,
        }
    }

    /// Whether somebody waits for a turn.
    fn wait(&self) -> bool {
        self.all().iter().any(|topic| topic.ring == Ring::Turn)
    }
}

impl Watches {
    /// The server has this watch now.
    pub(super) fn add(&mut self, path: &str, topic: Topic) {
        let (mut waited, waits) = (false, topic.ring == Ring::Turn);
        self.of
            .entry(self.hash.hash_one(path))
            .and_modify(|topics| {
                waited = topics.wait();
                topics.add(topic);
            })
            .or_insert(Topics::One(topic));
        self.turns += usize::from(waits && !waited);
    }

    /// The server had them, and they fired.
    pub(super) fn fired(&mut self, path: &str) -> Vec<Topic> {
        let Some(topics) = self.of.remove(&self.hash.hash_one(path)) else { return Vec::new() };
        self.turns -= usize::from(topics.wait());
        topics.all().to_vec()
    }

    /// Whether one of those who are still there waits for its turn.
    pub(super) fn anybody_waits(&self, is_there: impl Fn(Topic) -> bool) -> bool {
        let waits = |topic: &Topic| topic.ring == Ring::Turn && is_there(*topic);
        self.turns > 0 && self.of.values().any(|topics| topics.all().iter().any(waits))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::client::bells::Bells;

    #[test]
    fn a_watch_fires_once_for_everybody_who_waits() {
        let bells = Arc::new(Bells::default());
        let (one, two) = (bells.ear(), bells.ear());
        let (one, two) = (one.topic(Ring::Turn), two.topic(Ring::Turn));
        let mut watches = Watches::default();
        for topic in [one, two, one] {
            watches.add("/a", topic);
        }
        assert_eq!(watches.fired("/a"), [one, two]);
        assert!(watches.fired("/a").is_empty());
    }

    #[test]
    fn a_node_that_is_waited_for_is_told_from_an_own_one() {
        let ear = Arc::new(Bells::default()).ear();
        let mut watches = Watches::default();
        watches.add("/own", ear.topic(Ring::Own));
        assert!(!watches.anybody_waits(|_| true));
        watches.add("/before", ear.topic(Ring::Turn));
        watches.add("/before", ear.topic(Ring::Turn));
        assert!(watches.anybody_waits(|_| true));
        assert!(!watches.anybody_waits(|_| false), "nobody is left");
        watches.fired("/before");
        assert!(!watches.anybody_waits(|_| true));
    }
}
