//! What a session knows of its own hold. The table knows ids only: which tenure a row is in, and whether a
//! write of ours that nobody answered was carried out, follows from the version.

use std::ops::RangeInclusive;

use simba_core::FencingToken;

/// A session's memory between its calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    hold: Option<Hold>,
    /// The row was locked by a peer: others must not have to wait for it again.
    pub(crate) suspect: bool,
}

/// A hold whose first reply was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hold {
    token: u64,
    /// The version after our last write that was answered.
    seen: u64,
    /// How many writes of ours were sent since without an answer. Each is conditional on a version, so each
    /// counted the version up by one or did nothing.
    unanswered: u64,
}

impl Standing {
    /// The token of the hold, if one is remembered.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        self.hold.map(|hold| FencingToken::new(hold.token))
    }

    /// The version to renew or release by, if a hold is remembered.
    pub(crate) fn seen(&self) -> Option<u64> {
        self.hold.map(|hold| hold.seen)
    }

    /// The version to renew by together with others: only if nothing is in doubt.
    pub(crate) fn seen_for_sure(&self) -> Option<u64> {
        self.hold.filter(|hold| hold.unanswered == 0 && !self.suspect).map(|hold| hold.seen)
    }

    /// The versions that the remembered hold and our own writes since account for, if any of those is in doubt.
    pub(crate) fn doubtful(&self) -> Option<RangeInclusive<u64>> {
        let hold = self.hold.filter(|hold| hold.unanswered > 0)?;
        Some(hold.seen..=hold.seen.saturating_add(hold.unanswered))
    }

    /// Whether the remembered hold and our own writes since account for this version.
    pub(crate) fn explains(&self, version: u64) -> bool {
        self.hold.is_some_and(|hold| {
            version.checked_sub(hold.seen).is_some_and(|writes| writes <= hold.unanswered)
        })
    }

    /// Continues at the version that was read from the row. Returns false if the remembered hold and our own writes
    /// since do not account for it. Writes that are still without an answer may count it up.
    pub(crate) fn found(&mut self, version: u64) -> bool {
        let explained = self.explains(version);
        if let Some(hold) = self.hold.as_mut().filter(|_| explained) {
            hold.unanswered -= version - hold.seen;
            hold.seen = version;
        }
        explained
    }

    /// Nothing is held, or what is held began with a write whose reply was not seen.
    pub(crate) fn forget(&mut self) {
        self.hold = None;
    }

    /// A tenure begins with this version.
    pub(crate) fn began(&mut self, version: u64) {
        self.hold = Some(Hold { token: version, seen: version, unanswered: 0 });
        self.unlocked();
    }

    /// A write about the remembered hold goes out.
    pub(crate) fn sent(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.unanswered = hold.unanswered.saturating_add(1);
        }
    }

    /// The last write that went out changed nothing, for sure.
    pub(crate) fn missed(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.unanswered = hold.unanswered.saturating_sub(1);
        }
    }

    /// The last write that went out made this version.
    pub(crate) fn renewed(&mut self, version: u64) {
        if let Some(hold) = &mut self.hold {
            (hold.seen, hold.unanswered) = (version, 0);
        }
        self.unlocked();
    }

    /// No peer has locked the row now.
    pub(crate) fn unlocked(&mut self) {
        self.suspect = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(version: u64) -> Standing {
        let mut standing = Standing::default();
        standing.began(version);
        standing
    }

    #[test]
    fn renewals_keep_the_token_and_move_the_version() {
        let mut standing = held(7);
        standing.sent();
        standing.renewed(8);
        assert_eq!((standing.token(), standing.seen()), (Some(FencingToken::new(7)), Some(8)));
    }

    #[test]
    fn only_our_own_unanswered_writes_explain_a_greater_version() {
        let mut standing = held(7);
        assert_eq!(standing.doubtful(), None);
        assert!(standing.explains(7) && !standing.explains(8) && !standing.explains(6));
        standing.sent();
        standing.sent();
        assert!(standing.explains(8) && standing.explains(9) && !standing.explains(10));
        assert_eq!(standing.doubtful(), Some(7..=9));
        standing.missed();
        assert!(!standing.explains(9), "a write that did nothing explains nothing");
        assert_eq!(standing.seen_for_sure(), None);
    }

    #[test]
    fn a_version_that_was_read_settles_the_writes_before_it() {
        let mut standing = held(7);
        standing.sent();
        standing.sent();
        assert!(!standing.found(6) && !standing.found(10));
        assert_eq!(standing.doubtful(), Some(7..=9));
        assert!(standing.found(8));
        assert_eq!(standing.doubtful(), Some(8..=9));
        assert!(standing.found(9));
        assert_eq!((standing.doubtful(), standing.seen_for_sure()), (None, Some(9)));
        assert_eq!(standing.token(), Some(FencingToken::new(7)));
    }

    #[test]
    fn what_is_forgotten_explains_nothing() {
        let mut standing = held(7);
        standing.forget();
        assert!(!standing.explains(7));
        assert_eq!(standing.token(), None);
    }

    #[test]
    fn a_suspect_shares_no_statement_until_it_was_renewed() {
        let mut standing = held(7);
        standing.suspect = true;
        assert_eq!(standing.seen_for_sure(), None);
        standing.sent();
        standing.renewed(8);
        assert_eq!(standing.seen_for_sure(), Some(8));
    }
}
