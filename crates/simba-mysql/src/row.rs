//! A row of the table, as one statement saw it.

use std::time::Duration;

use simba_core::{ContenderId, Ownership, Result};

/// What the columns hold, in their order, and the server's time of the look.
pub(crate) type Columns = (String, u64, u64, u64, String, u64, u64);

/// One mutex, with the server's time at which it looked so. Times are milliseconds since 1970.
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
    /// Whether anyone may take it. In the very millisecond in which a lease ends nobody may act: JVM peers
    /// compare that way, so we do.
    pub(crate) fn is_free(&self) -> bool {
        self.transition_at < self.now
    }

    /// Whether its owner may still renew it.
    pub(crate) fn is_held(&self) -> bool {
        self.transition_at > self.now && !self.owner.is_empty()
    }

    pub(crate) fn is_held_by(&self, id: &ContenderId) -> bool {
        self.is_held() && self.owner == id.as_str()
    }

    /// How long it keeps others out: through the millisecond in which nobody may act.
    pub(crate) fn remaining(&self) -> Duration {
        Duration::from_millis(self.transition_at.saturating_add(1).saturating_sub(self.now))
    }

    /// Who owns it, as others see it: whose version began the tenure, the table does not tell.
    ///
    /// # Errors
    ///
    /// The owner is no contender's id.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn row(transition_at: u64, owner: &str) -> Row {
        Row::from(("m".into(), 0, 0, transition_at, owner.into(), 1, 1_000))
    }

    #[test]
    fn in_the_millisecond_of_its_end_a_lease_is_nobody_s() {
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
