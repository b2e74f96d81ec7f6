//! What waits to be sent, and what becomes of it when it cannot be.

use std::collections::VecDeque;
use std::mem;

use tokio::sync::oneshot;

use super::bells::Topic;
use super::failure::Failure;
use super::message::{Mode, Reply, Request};
use super::proof::Proof;

pub(crate) type Outcome = Result<Reply, Failure>;

/// A request, and what to do with its outcome.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: Request,
    /// Whom a watch that the request leaves behind is for.
    pub(super) topic: Option<Topic>,
    pub(super) then: Then,
}

/// What to do with an outcome.
#[derive(Debug)]
pub(super) enum Then {
    /// Tell who asked.
    Answer(oneshot::Sender<Outcome>),
    /// Nobody asks any more, but it has to be done: repeated for as long as the session lasts.
    Insist,
    /// The same, to delete the children whose names begin like this: a `sync`, then a list.
    Sweep { parent: String, prefix: String },
}

impl Job {
    /// Deletes a node for as long as it takes.
    pub(super) fn forget(path: String) -> Self {
        Self { request: Request::Delete { path }, topic: None, then: Then::Insist }
    }

    /// Deletes what a creation without an answer may have left behind.
    ///
    /// The leader may have accepted the creation from the server that we were connected to, while the one that we are
    /// connected to now has not heard of it. The leader answers a `sync` behind all that it has accepted. What it
    /// accepts later is refused, since the session belongs to another server by then.
    pub(super) fn sweep(parent: String, prefix: String) -> Self {
        let request = Request::Sync { path: parent.clone() };
        Self { request, topic: None, then: Then::Sweep { parent, prefix } }
    }

    /// Whether nobody wants it any more and nobody knows of it.
    fn is_abandoned(&self) -> bool {
        matches!(&self.then, Then::Answer(to) if to.is_closed())
    }

    /// Tells whoever asked what came of it, and says what is left to do.
    pub(super) fn conclude(self, outcome: Outcome) -> Vec<Self> {
        match (self.then, outcome) {
            (Then::Answer(to), outcome) => match to.send(outcome) {
                Ok(()) => Vec::new(),
                Err(unheard) => undo(&self.request, &unheard),
            },
            (Then::Insist, outcome) => {
                tell_of_leftovers(&outcome);
                Vec::new()
            }
            (Then::Sweep { parent, prefix }, Ok(Reply::Done)) => {
                let request = Request::Children { path: parent.clone(), watch: false };
                vec![Self { request, topic: None, then: Then::Sweep { parent, prefix } }]
            }
            (Then::Sweep { parent, prefix }, Ok(Reply::Children(names))) => names
                .iter()
                .filter(|name| name.starts_with(&prefix))
                .map(|name| Self::forget(format!("{parent}/{name}")))
                .collect(),
            (Then::Sweep { .. }, outcome) => {
                tell_of_leftovers(&outcome);
                Vec::new()
            }
        }
    }

    /// The connection broke while it was under way.
    pub(super) fn lost(self) -> Vec<Self> {
        match self.then {
            Then::Answer(_) => self.conclude(Err(Failure::Lost)),
            Then::Insist => vec![self],
            // The next server has to be asked for a `sync` again.
            Then::Sweep { parent, prefix } => vec![Self::sweep(parent, prefix)],
        }
    }
}

/// Nobody waits for what is done in the background: if the server refuses it, a person is told.
fn tell_of_leftovers(outcome: &Outcome) {
    match outcome {
        Err(failure @ Failure::Refused(_)) if !failure.is_no_node() => {
            tracing::warn!(%failure, "a node that is not needed stays until its session ends");
        }
        _ => {}
    }
}

/// A node whose creator does not listen any more is deleted: no lease would end it.
fn undo(request: &Request, outcome: &Outcome) -> Vec<Job> {
    let Request::Create { path, mode: Mode::EphemeralSequential, .. } = request else { return Vec::new() };
    match (outcome, path.rsplit_once('/')) {
        (Ok(Reply::Created { path, .. }), _) => vec![Job::forget(path.clone())],
        (Err(Failure::Lost), Some((parent, prefix))) => vec![Job::sweep(parent.into(), prefix.into())],
        _ => Vec::new(),
    }
}

/// Whether a node exists, by a quorum.
#[derive(Debug)]
pub(super) struct Check {
    pub(super) path: String,
    /// Takes what the answer proves.
    pub(super) to: oneshot::Sender<Result<Proof, Failure>>,
}

impl Check {
    pub(super) fn conclude(self, outcome: Result<Proof, Failure>) {
        // Who does not listen any more has nothing to undo: a check changes nothing.
        let _ = self.to.send(outcome);
    }
}

/// What waits to be sent.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) jobs: VecDeque<Job>,
    pub(super) checks: Vec<Check>,
    /// What is sent in a moment, if somebody still waits for it then.
    pub(super) later: Vec<Job>,
    /// A check that somebody waits for to begin its work.
    pub(super) urgent: bool,
}

/// No request has more checks than this: a server takes ten milliseconds for them.
const MOST_CHECKS: usize = 1000;

impl Work {
    /// The next request to send; those that nobody wants any more are left out.
    pub(super) fn next_job(&mut self) -> Option<Job> {
        loop {
            let job = self.jobs.pop_front()?;
            if !job.is_abandoned() {
                return Some(job);
            }
        }
    }

    /// The checks that fit into one request.
    pub(super) fn next_checks(&mut self) -> Vec<Check> {
        self.checks.retain(|check| !check.to.is_closed());
        let rest = self.checks.split_off(self.checks.len().min(MOST_CHECKS));
        mem::replace(&mut self.checks, rest)
    }

    /// The moment has come for what was put off.
    pub(super) fn hurry(&mut self) {
        self.jobs.extend(mem::take(&mut self.later));
    }

    /// Fails what somebody waits for, and keeps what has to be done anyway.
    pub(super) fn fail(&mut self, failure: &Failure) {
        self.hurry();
        for job in mem::take(&mut self.jobs) {
            match job.then {
                Then::Answer(_) => {
                    job.conclude(Err(failure.clone()));
                }
                Then::Insist | Then::Sweep { .. } => self.jobs.push_back(job),
            }
        }
        self.fail_checks(failure);
    }

    fn fail_checks(&mut self, failure: &Failure) {
        mem::take(&mut self.checks).into_iter().for_each(|check| check.conclude(Err(failure.clone())));
    }

    /// The session is over, and all that it had with it.
    pub(super) fn forget_the_dead(&mut self) {
        self.jobs.retain(|job| matches!(job.then, Then::Answer(_)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::message::{Access, Stat};

    fn creation() -> (Job, oneshot::Receiver<Outcome>) {
        let (to, outcome) = oneshot::channel();
        let request = Request::Create {
            path: "/simba/m/_c_1-latch-".into(),
            data: Vec::new(),
            mode: Mode::EphemeralSequential,
            access: Access::Open,
        };
        (Job { request, topic: None, then: Then::Answer(to) }, outcome)
    }

    fn created() -> Outcome {
        let path = String::from("/simba/m/_c_1-latch-0000000007");
        Ok(Reply::Created { path, stat: Stat { czxid: 1, owner: 1 } })
    }

    #[test]
    fn a_creation_that_nobody_waits_for_is_undone() {
        let (job, outcome) = creation();
        drop(outcome);
        let [left] = &job.conclude(created())[..] else { panic!("one thing is left to do") };
        let Request::Delete { path } = &left.request else { panic!("it is deleted") };
        assert_eq!(path, "/simba/m/_c_1-latch-0000000007");
    }

    /// The one thing that is left to do.
    fn only(left: Vec<Job>) -> Job {
        let [left] = <[Job; 1]>::try_from(left).unwrap();
        left
    }

    #[test]
    fn a_creation_without_an_answer_is_searched_for_behind_a_sync() {
        let (job, outcome) = creation();
        drop(outcome);
        let sync = only(job.lost());
        assert!(matches!(&sync.request, Request::Sync { path } if path == "/simba/m"), "{sync:?}");
        let list = only(sync.conclude(Ok(Reply::Done)));
        assert!(matches!(&list.request, Request::Children { path, .. } if path == "/simba/m"), "{list:?}");
        let again = only(list.lost());
        assert!(matches!(&again.request, Request::Sync { .. }), "a new connection needs a sync of its own");
        let list = only(again.conclude(Ok(Reply::Done)));
        let names = ["_c_2-latch-0", "_c_1-latch-1"].into_iter().collect();
        let found = only(list.conclude(Ok(Reply::Children(names))));
        assert!(matches!(&found.request, Request::Delete { path } if path == "/simba/m/_c_1-latch-1"));
    }

    #[test]
    fn a_creation_that_somebody_waits_for_is_theirs() {
        let (job, mut outcome) = creation();
        assert!(job.conclude(created()).is_empty());
        assert!(outcome.try_recv().unwrap().is_ok());
        let (job, mut outcome) = creation();
        assert!(job.lost().is_empty());
        assert!(matches!(outcome.try_recv(), Ok(Err(Failure::Lost))));
    }

    #[test]
    fn what_has_to_be_done_outlives_a_connection_and_not_its_session() {
        let mut work = Work::default();
        work.jobs.push_back(Job::forget("/a".into()));
        work.jobs.extend([creation().0]);
        work.fail(&Failure::Lost);
        assert_eq!(work.jobs.len(), 1);
        work.forget_the_dead();
        assert!(work.next_job().is_none());
    }

    #[test]
    fn a_request_has_at_most_a_thousand_checks() {
        let mut work = Work::default();
        let mut answers = Vec::new();
        for _ in 0..1500 {
            let (to, answer) = oneshot::channel();
            answers.push(answer);
            work.checks.push(Check { path: "/a".into(), to });
        }
        answers.truncate(1400);
        assert_eq!((work.next_checks().len(), work.next_checks().len()), (1000, 400));
    }
}
