//! What a session knows of its own hold. The table has ids only. From the version follows which tenure a row
//! is in, and whether an unanswered write of ours was carried out.

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

    /// Returns the version of the row. After an unanswered write it is not known.
    pub(crate) fn version(&self) -> Option<u64> {
        self.0.filter(|hold| hold.low == hold.high).map(|hold| hold.low)
    }

    /// Returns whether the remembered hold and our writes since account for this version.
    pub(crate) fn accounts_for(&self, version: u64) -> bool {
        self.0.is_some_and(|hold| (hold.low..=hold.high).contains(&version))
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

    /// Records that the last write was carried out, which left this version. Every earlier write is void.
    pub(crate) fn applied(&mut self, version: u64) {
        if let Some(hold) = &mut self.0 {
            (hold.low, hold.high) = (version, version);
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
        own_hold.applied(8);
        assert_eq!((own_hold.token(), own_hold.version()), (Some(FencingToken::new(7)), Some(8)));
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
    fn after_an_unanswered_write_the_version_is_unknown_until_another_is_carried_out() {
        let mut own_hold = held(7);
        own_hold.sent();
        assert_eq!(own_hold.version(), None);
        own_hold.sent();
        own_hold.applied(9);
        assert_eq!((own_hold.version(), own_hold.token()), (Some(9), Some(FencingToken::new(7))));
    }

    #[test]
    fn a_forgotten_hold_accounts_for_no_version() {
        let mut own_hold = held(7);
        own_hold.forget();
        assert!(!own_hold.accounts_for(7));
        assert_eq!(own_hold.token(), None);
    }
}
