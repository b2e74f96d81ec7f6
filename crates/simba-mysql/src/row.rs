//! A row of the table, as one statement read it.

use std::collections::HashMap;
use std::time::Duration;

use simba_core::spi::Ownership;
use simba_core::{ContenderId, MutexName, Result};

/// The values of the columns, in order, and the server's time of the read.
pub(crate) type Columns = (String, u64, u64, u64, String, u64, u64);

/// One mutex, with the server's time of the read. Times are milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) mutex: String,
    pub(crate) acquired_at: u64,
    pub(crate) ttl_at: u64,
    pub(crate) transition_at: u64,
    pub(crate) owner: String,
    pub(crate) version: u64,
    pub(crate) now: u64,
}

impl Row {
    /// Returns whether any contender may take it. In the millisecond in which a lease ends neither a take nor
    /// a renewal is allowed: JVM peers compare this way.
    pub(crate) fn is_free(&self) -> bool {
        self.transition_at < self.now
    }

    /// Returns whether its owner may still renew it.
    pub(crate) fn is_held(&self) -> bool {
        self.transition_at > self.now && !self.owner.is_empty()
    }

    pub(crate) fn is_held_by(&self, id: &ContenderId) -> bool {
        self.is_held() && self.owner == id.as_str()
    }

    /// Returns how long no other contender can take it: through the millisecond in which the lease ends.
    pub(crate) fn remaining(&self) -> Duration {
        Duration::from_millis(self.transition_at.saturating_add(1).saturating_sub(self.now))
    }

    /// Returns the owner, without a token: the table does not record the version that began the tenure.
    ///
    /// # Errors
    ///
    /// The owner is not a valid contender id.
    pub(crate) fn ownership(&self) -> Result<Option<Ownership>> {
        if !self.is_held() {
            return Ok(None);
        }
        Ok(Some(Ownership::new(ContenderId::foreign(&self.owner)?, None, self.remaining())))
    }
}

impl From<Columns> for Row {
    fn from((mutex, acquired_at, ttl_at, transition_at, owner, version, now): Columns) -> Self {
        Self { mutex, acquired_at, ttl_at, transition_at, owner, version, now }
    }
}

/// The rows of a read by name. The spelling in the table may differ from ours: most collations ignore case.
pub(crate) struct RowsByName<'a> {
    exact: HashMap<&'a str, &'a Row>,
    folded: HashMap<String, &'a Row>,
}

impl<'a> RowsByName<'a> {
    pub(crate) fn new(rows: &'a [Row]) -> Self {
        let exact = rows.iter().map(|row| (row.mutex.as_str(), row)).collect();
        let upper = |row: &&Row| row.mutex.chars().any(char::is_uppercase);
        let folded = rows.iter().filter(upper).map(|row| (row.mutex.to_lowercase(), row)).collect();
        Self { exact, folded }
    }

    pub(crate) fn row(&self, mutex: &MutexName) -> Option<&'a Row> {
        let folded = || {
            let name = mutex.as_str().to_lowercase();
            self.exact.get(name.as_str()).or_else(|| self.folded.get(&name)).copied()
        };
        self.exact.get(mutex.as_str()).copied().or_else(folded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(transition_at: u64, owner: &str) -> Row {
        Row::from(("m".into(), 0, 0, transition_at, owner.into(), 1, 1_000))
    }

    #[test]
    fn in_the_last_millisecond_a_lease_is_neither_held_nor_free() {
        let (before, at, after) = (row(1_001, "a"), row(1_000, "a"), row(999, "a"));
        assert!(before.is_held() && !before.is_free());
        assert!(!at.is_held() && !at.is_free());
        assert!(!after.is_held() && after.is_free());
        assert_eq!(before.remaining(), Duration::from_millis(2));
    }

    #[test]
    fn a_released_row_has_no_owner() {
        assert_eq!(row(0, "").ownership().unwrap(), None);
        assert!(row(0, "").is_free());
    }
}
