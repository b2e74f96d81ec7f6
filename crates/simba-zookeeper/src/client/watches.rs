//! Who is to be woken when a node changes.

use std::collections::HashMap;

use super::Topic;

/// The watches of one connection. Each fires once; all of them are gone with the connection.
#[derive(Debug, Default)]
pub(super) struct Watches {
    of: HashMap<Box<str>, Topics>,
}

/// Nearly always one: no two contenders wait for the same node.
#[derive(Debug)]
enum Topics {
    One(Topic),
    Many(Vec<Topic>),
}

impl Topics {
    fn add(&mut self, topic: Topic) {
        match self {
            Self::One(one) if *one == topic => {}
            Self::One(one) => *self = Self::Many(vec![*one, topic]),
            Self::Many(many) if many.contains(&topic) => {}
            Self::Many(many) => many.push(topic),
        }
    }
}

impl Watches {
    /// The server has this watch now.
    pub(super) fn add(&mut self, path: &str, topic: Topic) {
        match self.of.get_mut(path) {
            Some(topics) => topics.add(topic),
            None => {
                self.of.insert(path.into(), Topics::One(topic));
            }
        }
    }

    /// The server had them, and they fired.
    pub(super) fn fired(&mut self, path: &str) -> Vec<Topic> {
        match self.of.remove(path) {
            Some(Topics::One(topic)) => vec![topic],
            Some(Topics::Many(topics)) => topics,
            None => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_fires_once_for_everybody_who_waits() {
        let mut watches = Watches::default();
        for topic in [Topic::Turn(1), Topic::Turn(2), Topic::Turn(1)] {
            watches.add("/a", topic);
        }
        assert_eq!(watches.fired("/a"), [Topic::Turn(1), Topic::Turn(2)]);
        assert!(watches.fired("/a").is_empty());
    }
}
