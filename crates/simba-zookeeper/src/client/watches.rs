//! Who is to be woken when a node changes.

use std::collections::HashMap;

use super::Topic;

/// The watches of one connection. Each fires once; all of them are gone with the connection.
#[derive(Debug, Default)]
pub(super) struct Watches {
    of: HashMap<String, Vec<Topic>>,
}

impl Watches {
    /// The server has this watch now.
    pub(super) fn add(&mut self, path: &str, topic: Topic) {
        match self.of.get_mut(path) {
            Some(topics) if topics.contains(&topic) => {}
            Some(topics) => topics.push(topic),
            None => {
                self.of.insert(path.to_owned(), vec![topic]);
            }
        }
    }

    /// The server had them, and they fired.
    pub(super) fn fired(&mut self, path: &str) -> Vec<Topic> {
        self.of.remove(path).unwrap_or_default()
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
