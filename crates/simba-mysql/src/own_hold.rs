//! What a session knows of its own hold. The table has ids only. From the version follows which tenure a row
//! is in, and whether an unanswered write of ours was carried out.

use std::ops::RangeInclusive;

use simba_core::FencingToken;

/// What a session remembers between its calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OwnHold(Option<Hold>);

/// A hold whose first reply was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hold {
    token: u64,
    /// The version if none of our unanswered writes was carried out.
    low: u64,
    /// The version if all of them were. Each is conditional on a version, so each adds one or changes nothing.
    high: u64,
}

impl OwnHold {
    /// Returns the token of the hold, if one is remembered.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        self.0.map(|hold| FencingToken::new(hold.token))
    }

    /// Returns the versions that the row of the hold may have: more than one after an unanswered write.
    pub(crate) fn versions(&self) -> Option<RangeInclusive<u64>> {
        self.0.map(|hold| hold.low..=hold.high)
    }

    /// Returns whether the remembered hold and our writes since account for this version.
    pub(crate) fn accounts_for(&self, version: u64) -> bool {
        self.versions().is_some_and(|versions| versions.contains(&version))
    }

    /// Forgets the hold: nothing is held, or the first reply of the tenure is outstanding.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }

    /// Begins a tenure at this version.
    pub(crate) fn begin(&mut self, version: u64) {
        self.0 = Some(Hold { token: version, low: version, high: version });
    }

    /// Counts a write about the hold that is being sent.
    pub(crate) fn sent(&mut self) {
        if let Some(hold) = &mut self.0 {
            hold.high = hold.high.saturating_add(1);
        }
    }

    /// Records that the last write changed nothing.
    pub(crate) fn not_applied(&mut self) {
        if let Some(hold) = &mut self.0 {
            hold.high = hold.high.saturating_sub(1).max(hold.low);
        }
    }

    /// Records that the last write, which was conditional on these versions, was carried out. One that named a
    /// single version leaves no doubt: every earlier write is void.
    pub(crate) fn applied(&mut self, versions: &RangeInclusive<u64>) {
        if let Some(hold) = &mut self.0 {
            hold.low = versions.start().saturating_add(1);
            hold.high = if versions.start() == versions.end() { hold.low } else { hold.high.max(hold.low) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(version: u64) -> OwnHold {
        let mut own_hold = OwnHold::default();
        own_hold.begin(version);
        own_hold
    }

    #[test]
    fn renewals_keep_the_token_and_advance_the_version() {
        let mut own_hold = held(7);
        own_hold.sent();
        own_hold.applied(&(7..=7));
        assert_eq!((own_hold.token(), own_hold.versions()), (Some(FencingToken::new(7)), Some(8..=8)));
    }

    #[test]
    fn only_own_unanswered_writes_account_for_a_greater_version() {
        let mut own_hold = held(7);
        assert!(own_hold.accounts_for(7) && !own_hold.accounts_for(8) && !own_hold.accounts_for(6));
        own_hold.sent();
        own_hold.sent();
        assert!(own_hold.accounts_for(8) && own_hold.accounts_for(9) && !own_hold.accounts_for(10));
        own_hold.not_applied();
        assert!(!own_hold.accounts_for(9), "a write that changed nothing accounts for no version");
    }

    #[test]
    fn write_that_allows_several_versions_keeps_the_doubt_and_an_exact_one_ends_it() {
        let mut own_hold = held(7);
        own_hold.sent();
        own_hold.sent();
        own_hold.applied(&(7..=8));
        assert_eq!(own_hold.versions(), Some(8..=9), "the first write was carried out or is void");
        own_hold.sent();
        own_hold.applied(&(9..=9));
        assert_eq!((own_hold.versions(), own_hold.token()), (Some(10..=10), Some(FencingToken::new(7))));
    }

    #[test]
    fn a_forgotten_hold_accounts_for_no_version() {
        let mut own_hold = held(7);
        own_hold.forget();
        assert!(!own_hold.accounts_for(7));
        assert_eq!(own_hold.token(), None);
    }
}
