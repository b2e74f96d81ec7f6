//! Checks by a quorum that nodes exist, of many callers in one request.

use std::time::Duration;

use simba_core::{Error, ErrorKind};
use simba_net::batch::{Answers, BatchError, BatchLimits, Batcher, SendBatch};
use tokio::sync::{mpsc, oneshot};

use super::failure::Failure;
use super::outbox::{Call, Outcome};
use super::protocol::{Code, Reply, Request};
use super::{Command, recv};

/// The longest time that a renewal waits for others to share its request.
const WINDOW: Duration = Duration::from_millis(20);
/// The most checks in one request: a server needs ten milliseconds for them.
const MAX_CHECKS: usize = 1_000;
const MAX_IN_FLIGHT: usize = 16;

/// The result of a check. After a success, the session of the request has a new proof.
pub(crate) type Checked = Result<(), Failure>;

/// Collects the paths of nodes to check.
pub(super) type Checks = Batcher<String, Checked>;

/// Returns the limits for sessions of this length.
pub(super) fn limits(timeout: Duration) -> BatchLimits {
    let window = WINDOW.min(timeout / 100);
    BatchLimits { calls: MAX_CHECKS, in_flight: MAX_IN_FLIGHT, time: timeout, window }
}

/// Returns the result of a request with one check.
pub(crate) fn checked(outcome: Outcome) -> Checked {
    match outcome? {
        Reply::Checked(errors) => errors.first().copied().and_then(Code::of).map_or(Ok(()), refused),
        _ => Err(unanswered()),
    }
}

const fn refused(code: Code) -> Checked {
    Err(Failure::Refused(code))
}

fn unanswered() -> Failure {
    let error = Error::new(ErrorKind::Protocol, "the server did not answer a check");
    Failure::Unsent(error)
}

/// Sends checks to the task of the session.
#[derive(Debug)]
pub(super) struct CheckSender {
    /// Weak: the session ends when its client is dropped.
    pub(super) commands: mpsc::WeakUnboundedSender<Command>,
}

impl CheckSender {
    /// Returns the error of each check. Fails if the session has ended, since every check fails then.
    async fn request(&self, paths: Vec<String>) -> Result<Vec<Option<Code>>, Failure> {
        let (to, mut outcome) = oneshot::channel();
        if let Some(commands) = self.commands.upgrade() {
            let _ = commands.send(Command::Send(Call::new(Request::Check { paths }, to)));
        }
        let Reply::Checked(errors) = recv(&mut outcome).await? else { return Err(unanswered()) };
        let codes: Vec<_> = errors.into_iter().map(Code::of).collect();
        match codes.contains(&Some(Code::SESSION_EXPIRED)) {
            true => Err(Failure::Refused(Code::SESSION_EXPIRED)),
            false => Ok(codes),
        }
    }
}

impl SendBatch for CheckSender {
    type Call = String;
    type Answer = Checked;

    /// If a check fails, the server does not perform the others, so they are sent again without it.
    async fn send(&self, paths: &[String]) -> Result<Answers<Checked>, BatchError> {
        let mut answers: Answers<Checked> = paths.iter().map(|_| Ok(Err(unanswered()))).collect();
        let mut open: Vec<usize> = (0..paths.len()).collect();
        while !open.is_empty() {
            let sent = std::mem::take(&mut open);
            let codes = self.request(sent.iter().map(|at| paths[*at].clone()).collect()).await;
            let all_exist = codes.as_ref().is_ok_and(|codes| codes.iter().all(Option::is_none));
            for (n, at) in sent.iter().enumerate() {
                let answer = match &codes {
                    Err(failure) => Err(failure.clone()),
                    Ok(_) if all_exist => Ok(()),
                    Ok(codes) => match codes[n] {
                        Some(code) if code != Code::NOT_REACHED => refused(code),
                        _ => {
                            open.push(*at);
                            continue;
                        }
                    },
                };
                answers[*at] = Ok(answer);
            }
            if open.len() == sent.len() {
                break;
            }
        }
        Ok(answers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers each request with these errors. Returns the results and the number of checks in each request.
    async fn send(paths: usize, replies: Vec<Result<Vec<i32>, Failure>>) -> (Vec<Checked>, Vec<usize>) {
        let (commands, mut inbox) = mpsc::unbounded_channel();
        let sender = CheckSender { commands: commands.downgrade() };
        let paths: Vec<String> = (0..paths).map(|n| format!("/simba/m/{n}")).collect();
        let mut counts = Vec::new();
        let server = async {
            for reply in replies {
                let Some(Command::Send(call)) = inbox.recv().await else { panic!("no request") };
                let Request::Check { paths } = &call.request else { panic!("{call:?}") };
                counts.push(paths.len());
                assert!(call.conclude(reply.map(Reply::Checked)).is_empty());
            }
        };
        let (answers, ()) = tokio::join!(sender.send(&paths), server);
        (answers.unwrap().into_iter().map(Result::unwrap).collect(), counts)
    }

    #[tokio::test]
    async fn after_a_failed_check_the_other_checks_are_sent_again() {
        let (answers, counts) = send(3, vec![Ok(vec![0, -101, -2]), Ok(vec![0, 0])]).await;
        assert_eq!(counts, [3, 2]);
        assert!(answers[0].is_ok() && answers[2].is_ok());
        assert!(matches!(answers[1], Err(Failure::Refused(Code::NO_NODE))));
    }

    #[tokio::test]
    async fn an_expired_session_fails_all_checks_without_another_request() {
        let (answers, counts) = send(3, vec![Ok(vec![-112, -2, -2])]).await;
        assert_eq!(counts, [3]);
        let is_expired = |answer: &Checked| matches!(answer, Err(Failure::Refused(Code::SESSION_EXPIRED)));
        assert!(answers.iter().all(is_expired), "{answers:?}");
    }

    #[tokio::test]
    async fn checks_without_an_answer_or_a_progress_fail() {
        let (answers, _) = send(2, vec![Err(Failure::Lost)]).await;
        assert!(answers.iter().all(|answer| matches!(answer, Err(Failure::Lost))), "{answers:?}");
        let (answers, counts) = send(2, vec![Ok(vec![-2, -2])]).await;
        assert!(answers.iter().all(Result::is_err) && counts == [2], "{answers:?}");
    }

    #[tokio::test]
    async fn checks_on_a_closed_session_fail() {
        let (commands, inbox) = mpsc::unbounded_channel();
        drop(inbox);
        let answers = CheckSender { commands: commands.downgrade() }.send(&["/simba/m/n".into()]).await;
        assert!(matches!(answers.unwrap()[..], [Ok(Err(Failure::Closed))]));
    }
}
