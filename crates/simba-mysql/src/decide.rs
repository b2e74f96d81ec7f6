//! What to do about a row: the rules of the table as a pure function.

use simba_core::{ContenderId, Prior};

use crate::row::Row;
use crate::standing::Standing;

/// The one write that a row allows, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// Free: take it.
    Take,
    /// Ours, and the tenure that we remember: renew it, its token stays.
    Renew,
    /// Ours, but of a tenure whose first reply was not seen: renew it, the version of that write is the token.
    Adopt,
    /// Ours under the very token that was given up for lost: begin a new tenure.
    Retake,
    /// Somebody else's, or of a stranger with our id.
    Yield,
    /// Nobody's for another millisecond.
    Wait,
}

/// What a session that may have `prior` does about `row`. Never claims a hold whose lease has passed.
pub(crate) fn decide(prior: Prior, standing: &Standing, me: &ContenderId, row: &Row) -> Move {
    if row.is_free() {
        return Move::Take;
    }
    if !row.is_held() {
        return Move::Wait;
    }
    if !row.is_held_by(me) {
        return Move::Yield;
    }
    match prior {
        Prior::Nothing => Move::Yield,
        Prior::Lapsed(token) if standing.token() == Some(token) => Move::Retake,
        _ if standing.explains(row.version) => Move::Renew,
        _ => Move::Adopt,
    }
}

#[cfg(test)]
mod tests {
    use simba_core::FencingToken;

    use super::*;

    fn row(owner: &str, transition_at: u64, version: u64) -> Row {
        Row::from(("m".into(), 0, 0, transition_at, owner.into(), version, 1_000))
    }

    fn me() -> ContenderId {
        ContenderId::new("me").unwrap()
    }

    fn held(version: u64) -> Standing {
        let mut standing = Standing::default();
        standing.began(version);
        standing
    }

    const LAPSED: Prior = Prior::Lapsed(FencingToken::new(7));
    const PRIORS: [Prior; 4] = [Prior::Nothing, Prior::Unknown, Prior::Held, LAPSED];

    #[test]
    fn what_is_free_is_taken_and_what_is_another_s_is_left_whatever_was_before() {
        for prior in PRIORS {
            assert_eq!(decide(prior, &held(7), &me(), &row("", 0, 9)), Move::Take);
            assert_eq!(decide(prior, &held(7), &me(), &row("other", 2_000, 9)), Move::Yield);
            assert_eq!(decide(prior, &held(7), &me(), &row("me", 1_000, 9)), Move::Wait);
        }
    }

    #[test]
    fn an_own_lease_that_has_passed_is_no_hold() {
        assert_eq!(decide(Prior::Held, &held(7), &me(), &row("me", 999, 7)), Move::Take);
    }

    #[test]
    fn a_stranger_with_our_id_is_left_alone() {
        assert_eq!(decide(Prior::Nothing, &Standing::default(), &me(), &row("me", 2_000, 7)), Move::Yield);
    }

    #[test]
    fn our_own_unanswered_renewal_keeps_the_tenure_and_anything_else_begins_a_new_one() {
        let mut standing = held(7);
        standing.sent();
        for prior in [Prior::Held, Prior::Unknown] {
            assert_eq!(decide(prior, &standing, &me(), &row("me", 2_000, 8)), Move::Renew);
            assert_eq!(decide(prior, &standing, &me(), &row("me", 2_000, 9)), Move::Adopt);
        }
        assert_eq!(decide(Prior::Unknown, &Standing::default(), &me(), &row("me", 2_000, 8)), Move::Adopt);
    }

    #[test]
    fn only_the_token_that_lapsed_is_replaced() {
        assert_eq!(decide(LAPSED, &held(7), &me(), &row("me", 2_000, 7)), Move::Retake);
        assert_eq!(decide(LAPSED, &held(8), &me(), &row("me", 2_000, 8)), Move::Renew);
    }
}
