//! Who is to be woken when a node changes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
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
    /// Adds a topic, and forgets those whose contender is gone: behind a node that stays, they would add up.
    fn add(&mut self, topic: Topic, is_there: impl Fn(Topic) -> bool) {
        match self {
            Self::One(one) if !is_there(*one) => *self = Self::One(topic),
            Self::One(one) if *one == topic => {}
            Self::One(one) => *self = Self::Many(Box::new(vec![*one, topic])),
            Self::Many(many) => {
                many.retain(|one| *one != topic && is_there(*one));
                many.push(topic);
            }
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
    /// Records that the server has this watch now.
    pub(super) fn add(&mut self, path: &str, topic: Topic, is_there: impl Fn(Topic) -> bool) {
        let topics = match self.of.entry(self.hash.hash_one(path)) {
            Entry::Vacant(vacant) => {
                self.turns += usize::from(topic.ring == Ring::Turn);
                vacant.insert(Topics::One(topic));
                return;
            }
            Entry::Occupied(occupied) => occupied.into_mut(),
        };
        let waited = topics.wait();
        topics.add(topic, is_there);
        self.turns = self.turns + usize::from(topics.wait()) - usize::from(waited);
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
            watches.add("/a", topic, |_| true);
        }
        assert_eq!(watches.fired("/a"), [two, one]);
        assert!(watches.fired("/a").is_empty());
    }

    #[test]
    fn a_node_that_is_waited_for_is_told_from_an_own_one() {
        let ear = Arc::new(Bells::default()).ear();
        let mut watches = Watches::default();
        watches.add("/own", ear.topic(Ring::Own), |_| true);
        assert!(!watches.anybody_waits(|_| true));
        watches.add("/before", ear.topic(Ring::Turn), |_| true);
        watches.add("/before", ear.topic(Ring::Turn), |_| true);
        assert!(watches.anybody_waits(|_| true));
        assert!(!watches.anybody_waits(|_| false), "nobody is left");
        watches.fired("/before");
        assert!(!watches.anybody_waits(|_| true));
    }

    #[test]
    fn contenders_that_are_gone_do_not_add_up_behind_a_node() {
        let bells = Arc::new(Bells::default());
        let stays = bells.ear();
        let mut watches = Watches::default();
        watches.add("/before", stays.topic(Ring::Turn), |topic| bells.has(topic));
        let mut last = None;
        for _ in 0..100 {
            let ear = bells.ear();
            watches.add("/before", ear.topic(Ring::Turn), |topic| bells.has(topic));
            last = Some(ear.topic(Ring::Turn));
        }
        assert_eq!(watches.fired("/before"), [stays.topic(Ring::Turn), last.unwrap()]);
        assert!(!watches.anybody_waits(|_| true));
    }
}
