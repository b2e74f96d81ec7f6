//! The protocol: what answers, failures and deadlines make of a tenure.

use super::*;
use crate::backend::Holding;
use crate::error::{Error, ErrorKind};
use crate::types::Loss;

fn unavailable() -> Reply<Answer> {
    Some(Err(Error::new(ErrorKind::Unavailable, "the store is down")))
}

/// Returns what a stop at `now` releases.
fn released(contender: &mut Contender, now: u64) -> Holding {
    let shutdown = Input { shutdown: true, ..HOLD };
    loop {
        match contender.machine.next(at(now), shutdown) {
            Action::Close(_) | Action::Conclude(_) => {}
            Action::Release(holding, _) => return holding,
            action => panic!("{action:?}"),
        }
    }
}

/// Releases and starts anew, as after an old token.
fn start_anew(contender: &mut Contender, now: u64, name: &str) -> Holding {
    let Action::Release(holding, _) = contender.next(now) else { panic!() };
    contender.machine.released(at(now), Some(Ok(())), 0.0);
    assert!(matches!(contender.next(now), Action::StartAnew(Ok(()))));
    contender.machine.start_anew(at(now), id(name));
    holding
}

#[test]
fn the_deadline_counts_from_before_the_request() {
    let mut contender = Contender::forever();
    let News::Acquired(grant) = contender.call(100, 250, ours(1)).news else { panic!() };
    assert_eq!(grant.deadline, at(1_090));
    assert_eq!(contender.wait(250).until, at(500), "renewal at two thirds of the ttl");
}

#[test]
fn a_renewal_keeps_the_token_and_moves_the_deadline() {
    let News::Renewed(grant) = Contender::holding(1).call(400, 410, ours(1)).news else { panic!() };
    assert_eq!((grant.token.get(), grant.deadline), (1, at(1_390)));
}

#[test]
fn a_failure_is_neither_a_loss_nor_a_renewal() {
    for reply in [None, unavailable()] {
        let mut contender = Contender::holding(1);
        contender.send(400);
        let step = contender.reply(600, reply);
        assert!(step.lost.is_none() && matches!(step.news, News::Failed(_)));
        assert!(contender.is_holding(989) && !contender.is_holding(990));
    }
}

#[test]
fn expired_hold_is_renewed_as_lapsed_only() {
    let mut contender = Contender::holding(7);
    assert_eq!(contender.send(400), Prior::Held);
    // The answer to the renewal arrives late.
    let step = contender.reply(1_001, Some(Ok(ours(7))));
    assert_eq!(step.lost, Some(Loss::Deadline));
    assert!(matches!(step.news, News::Nothing));
    assert_eq!(contender.send(1_001), Prior::Lapsed(FencingToken::new(7)));
    assert!(matches!(contender.reply(1_002, Some(Ok(ours(8)))).news, News::Acquired(_)));
}

#[test]
fn renewal_answered_with_another_holder_is_a_loss_that_names_it() {
    let lost = |answer| Contender::holding(1).call(400, 410, answer).lost;
    assert_eq!(lost(theirs(2)), Some(Loss::TakenBy(id("other"))));
    assert_eq!(lost(Answer::Vacant), Some(Loss::Vanished));
}

#[test]
fn new_token_in_a_renewal_is_a_new_tenure() {
    let step = Contender::holding(1).call(400, 410, ours(2));
    assert_eq!(step.lost, Some(Loss::Vanished));
    assert!(matches!(step.news, News::Acquired(_)));
}

#[test]
fn new_token_in_a_renewal_ends_a_contender_for_one_tenure() {
    let mut contender = Contender::new(settings(Mode::Once(CALL)));
    contender.call(0, 10, ours(1));
    let step = contender.call(400, 410, ours(2));
    assert_eq!(step.lost, Some(Loss::Vanished));
    assert!(matches!(step.news, News::Nothing), "no guard waits for it");
    assert!(matches!(contender.next(410), Action::Conclude(Err(_))));
    let Action::Release(holding, _) = contender.next(410) else { panic!() };
    assert_eq!(holding, Holding::Under(FencingToken::new(2)), "what the store has now");
}

#[test]
fn unanswered_call_may_still_acquire_later() {
    let mut contender = Contender::forever();
    contender.send(0);
    contender.reply(200, None);
    contender.call(300, 301, theirs(1));
    let next = contender.wait(301).until;
    assert_eq!(contender.send(ms(next)), Prior::Unknown, "the first call may still arrive and acquire");
}

fn ms(moment: Moment) -> u64 {
    u64::try_from((moment - Moment::ZERO).as_millis()).unwrap() + 1
}

#[test]
fn own_id_under_an_ended_store_session_is_a_loss_without_another_holder() {
    let gone = || Answer::Held(ownership("me", 1));
    assert_eq!(Contender::forever().call(0, 1, gone()).lost, None);
    assert_eq!(Contender::holding(1).call(400, 410, gone()).lost, Some(Loss::Vanished));
}

#[test]
fn no_tenure_begins_under_the_token_of_the_last_one() {
    let mut contender = Contender::holding(7);
    assert!(!contender.is_holding(1_000));
    let step = contender.call(1_000, 1_002, ours(7));
    assert!(step.lost.is_none() && matches!(step.news, News::OldToken(_)));
    assert_eq!(start_anew(&mut contender, 1_002, "new"), Holding::Under(FencingToken::new(7)), "given back");
    // The same holds under a new id, after a pause.
    assert_eq!(contender.wait(1_003).until, at(1_502));
    contender.machine.hinted(at(1_003), &Ok(()));
    assert_eq!(contender.wait(1_003).until, at(1_502), "no hint shortens it");
    assert!(matches!(contender.call(1_502, 1_503, ours(6)).news, News::OldToken(_)));
    start_anew(&mut contender, 1_503, "newer");
    assert!(matches!(contender.call(3_000, 3_001, ours(8)).news, News::Acquired(_)));
}

#[test]
fn a_renewal_under_a_smaller_token_ends_the_tenure() {
    let mut contender = Contender::holding(7);
    let step = contender.call(400, 410, ours(6));
    assert_eq!(step.lost, Some(Loss::Vanished));
    assert!(matches!(step.news, News::OldToken(_)));
}

#[test]
fn an_old_token_ends_a_contender_for_one_tenure_and_is_given_back() {
    let mut contender = Contender::new(settings(Mode::Once(CALL)));
    contender.call(0, 10, ours(7));
    assert_eq!(contender.call(400, 410, ours(6)).lost, Some(Loss::Vanished));
    let Action::Conclude(Err(error)) = contender.next(410) else { panic!() };
    assert_eq!(error.kind(), ErrorKind::Lost);
    let Action::Release(holding, _) = contender.next(410) else { panic!() };
    assert_eq!(holding, Holding::Under(FencingToken::new(6)));
}

#[test]
fn mutex_without_a_token_is_a_protocol_error() {
    let none = Answer::Ours(Ownership::new(id("me"), None, Duration::from_secs(1)));
    let News::Failed(error) = Contender::forever().call(0, 10, none).news else { panic!() };
    assert_eq!(error.kind(), ErrorKind::Protocol);
}

/// A store that grants less than the lease, as one whose clock was set.
fn short_grant(token: u64) -> Answer {
    Answer::Ours(Ownership::new(id("me"), Some(FencingToken::new(token)), Duration::from_millis(150)))
}

#[test]
fn answer_with_too_little_of_the_lease_left_starts_no_tenure() {
    let News::Failed(error) = Contender::forever().call(0, 150, short_grant(1)).news else { panic!() };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

#[test]
fn lock_that_is_always_granted_too_little_fails_after_its_patience() {
    let mut contender = Contender::new(settings(Mode::Once(Duration::from_millis(500))));
    let mut now = 0;
    loop {
        contender.call(now, now + 150, short_grant(1));
        now += 150;
        assert!(now <= 1_000, "it is retried for ever");
        match contender.next(now) {
            Action::Wait(wait) => now = ms(wait.until),
            Action::Conclude(outcome) => break assert!(outcome.is_err()),
            action => panic!("{action:?}"),
        }
    }
    assert!(now >= 500, "after {now} ms");
}

#[test]
fn hold_that_was_acquired_too_late_is_released() {
    let held = || {
        let mut contender = Contender::holding(7);
        assert!(!contender.is_holding(1_000));
        assert!(matches!(contender.call(1_000, 1_150, short_grant(8)).news, News::Failed(_)));
        contender
    };
    assert_eq!(released(&mut held(), 1_150), Holding::Unknown, "not under 7, which the store no longer has");
    assert!(matches!(held().call(1_800, 1_801, ours(8)).news, News::Acquired(_)), "8 was never used");
}

#[test]
fn hold_that_a_renewal_acquired_again_after_the_loss_is_released() {
    let mut contender = Contender::holding(7);
    contender.send(400);
    assert_eq!(contender.reply(1_001, Some(Ok(ours(9)))).lost, Some(Loss::Deadline));
    assert_eq!(released(&mut contender, 1_001), Holding::Unknown);
}

#[test]
fn release_names_the_token_where_it_is_known() {
    let token = Holding::Under(FencingToken::new(5));
    assert_eq!(released(&mut Contender::holding(5), 20), token);
    let mut lapsed = Contender::holding(5);
    lapsed.machine.lapsed(at(300));
    assert_eq!(released(&mut lapsed, 300), token);
    let mut unanswered = Contender::holding(5);
    unanswered.send(400);
    unanswered.reply(600, None);
    assert_eq!(released(&mut unanswered, 600), Holding::Unknown, "it may have acquired the mutex again");
}

#[test]
fn stop_during_a_release_ends_with_the_result_of_that_release() {
    let stop = Input { request: Request::Stop, ..HOLD };
    let shutdown = Input { shutdown: true, ..HOLD };
    let step_down = Input { request: Request::StepDown(CALL), ..HOLD };
    let denied = || Err(Error::new(ErrorKind::Denied, "no right to release"));
    for (old_token, stop, reply) in
        [(false, stop, Ok(())), (false, shutdown, denied()), (true, stop, denied()), (true, shutdown, Ok(()))]
    {
        let mut contender = Contender::holding(7);
        if old_token {
            assert!(matches!(contender.call(400, 410, ours(6)).news, News::OldToken(_)));
        } else {
            assert!(matches!(contender.machine.next(at(410), step_down), Action::Close(Loss::SteppedDown)));
        }
        assert!(matches!(contender.next(410), Action::Release(..)));
        contender.machine.released(at(420), Some(reply.clone()), 0.0);
        assert!(matches!(contender.machine.next(at(420), stop), Action::Conclude(Ok(()))));
        let Action::Finish(left) = contender.machine.next(at(420), stop) else { panic!() };
        assert_eq!(left.map_err(|error| error.kind()), reply.map_err(|error| error.kind()));
    }
}

#[test]
fn unconfirmed_release_is_reported_by_a_stop_until_its_lease_ends_or_a_tenure_begins() {
    let stop = Input { request: Request::Stop, ..HOLD };
    let step_down = Input { request: Request::StepDown(Duration::ZERO), ..HOLD };
    let denied = || Some(Err(Error::new(ErrorKind::Denied, "no right to release")));
    let finished = |contender: &mut Contender, now| loop {
        match contender.machine.next(at(now), stop) {
            Action::Close(_) | Action::Conclude(Ok(())) => {}
            Action::Release(..) => contender.machine.released(at(now), Some(Ok(())), 0.0),
            Action::Finish(left) => break left.is_ok(),
            action => panic!("{action:?}"),
        }
    };
    let unconfirmed = || {
        let mut contender = Contender::holding(7);
        assert!(matches!(contender.machine.next(at(100), step_down), Action::Close(_)));
        assert!(matches!(contender.next(100), Action::Release(..)));
        contender.machine.released(at(110), denied(), 0.0);
        assert!(matches!(contender.next(110), Action::StartAnew(Err(_))));
        contender.machine.start_anew(at(110), id("anew"));
        contender
    };
    assert!(!finished(&mut unconfirmed(), 1_099));
    assert!(finished(&mut unconfirmed(), 1_100));
    let mut waiter = unconfirmed();
    waiter.call(110, 120, theirs(7));
    assert!(!finished(&mut waiter, 130), "that the new id left the queue does not confirm it");
    let mut holder = unconfirmed();
    holder.call(110, 120, ours(8));
    assert!(finished(&mut holder, 130));
}

#[test]
fn contender_that_never_called_releases_nothing() {
    let mut contender = Contender::forever();
    let stop = Input { request: Request::Stop, ..HOLD };
    assert!(matches!(contender.machine.next(at(0), stop), Action::Close(Loss::Released)));
    assert!(matches!(contender.machine.next(at(0), stop), Action::Conclude(Ok(()))));
    assert!(matches!(contender.machine.next(at(0), stop), Action::Finish(Ok(()))));
}

#[test]
fn long_leases_are_renewed_together() {
    let long = Lease::new(Duration::from_secs(10), Duration::from_secs(6)).unwrap();
    let mut contender = Contender::new(Settings::new(Mode::Forever, long));
    let lease = Ownership::new(id("me"), Some(FencingToken::new(1)), long.total());
    contender.call(0, 1, Answer::Ours(lease));
    assert!(contender.wait(1).approximate);
    assert!(!Contender::holding(1).wait(20).approximate, "there is less than a second to spare");
}

#[test]
fn one_hint_is_enough_for_a_wait() {
    let mut contender = Contender::forever();
    contender.call(0, 10, theirs(1));
    assert!(contender.wait(10).hints);
    contender.machine.hinted(at(20), &Err(Error::new(ErrorKind::Unavailable, "no hints")));
    let wait = contender.wait(20);
    assert!(!wait.hints && wait.until > at(100), "an error is no hint");
    let later = ms(wait.until);
    contender.call(later, later, theirs(1));
    contender.machine.hinted(at(later + 5), &Ok(()));
    assert!(matches!(contender.next(later + 5), Action::Contend(..)));
}
