//! Calls that wait to be sent, and what happens to them when they cannot be sent.

use std::collections::VecDeque;
use std::mem;

use tokio::sync::oneshot;

use super::failure::Failure;
use super::protocol::{Code, Mode, Reply, Request};

pub(crate) type Outcome = Result<Reply, Failure>;

/// A request, and the handling of its outcome.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) request: Request,
    pub(super) completion: Completion,
}

/// The handling of an outcome.
#[derive(Debug)]
pub(super) enum Completion {
    /// Send it to the caller.
    Answer(oneshot::Sender<Outcome>),
    /// There is no caller, or it was answered before.
    Ignore,
    /// A background call without a caller: repeat it on the next connection, until the session ends.
    Retry,
    /// As `Retry`, to delete the children whose names start with `prefix`: a `sync`, then a list.
    Sweep { parent: String, prefix: String },
}

impl Call {
    /// Creates a call with a caller.
    pub(super) const fn new(request: Request, to: oneshot::Sender<Outcome>) -> Self {
        Self { request, completion: Completion::Answer(to) }
    }

    /// Creates a call that deletes a node in the background.
    pub(super) fn delete(path: String) -> Self {
        Self { request: Request::Delete { path }, completion: Completion::Retry }
    }

    /// Creates a call that deletes in the background the node that a creation without an answer may have left.
    ///
    /// The leader may have accepted the creation from the previous server, while the current server has not received
    /// it yet. The leader answers a `sync` after everything that it has accepted before. A creation that reaches the
    /// leader after the `sync` is rejected, since the session belongs to another server by then.
    pub(super) fn sweep(parent: String, prefix: String) -> Self {
        let request = Request::Sync { path: parent.clone() };
        Self { request, completion: Completion::Sweep { parent, prefix } }
    }

    /// Returns whether the caller has dropped its receiver.
    fn is_abandoned(&self) -> bool {
        matches!(&self.completion, Completion::Answer(to) if to.is_closed())
    }

    /// Delivers the outcome, and returns the calls that follow from it.
    pub(super) fn conclude(self, outcome: Outcome) -> Vec<Self> {
        match (self.completion, outcome) {
            (Completion::Answer(to), outcome) => match to.send(outcome) {
                Ok(()) => Vec::new(),
                Err(undelivered) => undo(&self.request, &undelivered),
            },
            (Completion::Ignore, _) => Vec::new(),
            (Completion::Retry, outcome) => {
                log_leftover(&outcome);
                Vec::new()
            }
            (Completion::Sweep { parent, prefix }, Ok(Reply::Done)) => {
                let request = Request::Children { path: parent.clone(), watch: false };
                vec![Self { request, completion: Completion::Sweep { parent, prefix } }]
            }
            (Completion::Sweep { parent, prefix }, Ok(Reply::Children(names))) => names
                .iter()
                .filter(|name| name.starts_with(&prefix))
                .map(|name| Self::delete(format!("{parent}/{name}")))
                .collect(),
            (Completion::Sweep { .. }, outcome) => {
                log_leftover(&outcome);
                Vec::new()
            }
        }
    }

    /// Handles a connection that broke while the request was in flight. Returns the calls to repeat.
    pub(super) fn lost(self) -> Vec<Self> {
        match self.completion {
            Completion::Answer(_) => self.conclude(Err(Failure::Lost)),
            Completion::Ignore => Vec::new(),
            Completion::Retry => vec![self],
            // The next server needs a `sync` of its own.
            Completion::Sweep { parent, prefix } => vec![Self::sweep(parent, prefix)],
        }
    }
}

/// Logs that the server refused a background call: there is no caller to return the error to.
fn log_leftover(outcome: &Outcome) {
    match outcome {
        Err(Failure::Refused(code)) if *code != Code::NO_NODE => {
            tracing::warn!(failure = %code, "a node that is not needed stays until its session ends");
        }
        _ => {}
    }
}

/// Returns the calls that delete a node whose creator was dropped. No lease would end that node.
fn undo(request: &Request, outcome: &Outcome) -> Vec<Call> {
    let Request::Create { path, mode: Mode::EphemeralSequential, .. } = request else { return Vec::new() };
    match (outcome, path.rsplit_once('/')) {
        (Ok(Reply::Created { path, .. }), _) => vec![Call::delete(path.clone())],
        (Err(Failure::Lost), Some((parent, prefix))) => vec![Call::sweep(parent.into(), prefix.into())],
        _ => Vec::new(),
    }
}

/// The calls that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) calls: VecDeque<Call>,
}

impl Outbox {
    /// Returns the next call to send, and drops those whose callers were dropped.
    pub(super) fn next_call(&mut self) -> Option<Call> {
        loop {
            let call = self.calls.pop_front()?;
            if !call.is_abandoned() {
                return Some(call);
            }
        }
    }

    /// Removes the checks that have a caller, and returns them.
    pub(super) fn take_checks(&mut self) -> Vec<Call> {
        self.calls.retain(|call| !call.is_abandoned());
        let is_check = |call: &Call| matches!(call.request, Request::Check { .. });
        let (checks, others): (Vec<_>, Vec<_>) = mem::take(&mut self.calls).into_iter().partition(is_check);
        self.calls = others.into();
        checks
    }

    /// Fails the calls that have a caller, and keeps the background calls.
    pub(super) fn fail(&mut self, failure: &Failure) {
        for call in mem::take(&mut self.calls) {
            match call.completion {
                Completion::Answer(_) => {
                    call.conclude(Err(failure.clone()));
                }
                Completion::Ignore => {}
                Completion::Retry | Completion::Sweep { .. } => self.calls.push_back(call),
            }
        }
    }

    /// Drops the background calls. Called when the session has ended, which deletes its nodes.
    pub(super) fn discard_background(&mut self) {
        self.calls.retain(|call| matches!(call.completion, Completion::Answer(_)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::protocol::{Access, Stat};

    fn creation() -> (Call, oneshot::Receiver<Outcome>) {
        let (to, outcome) = oneshot::channel();
        let request = Request::Create {
            path: "/simba/m/_c_1-latch-".into(),
            data: Vec::new(),
            mode: Mode::EphemeralSequential,
            access: Access::Open,
        };
        (Call { request, completion: Completion::Answer(to) }, outcome)
    }

    fn created() -> Outcome {
        let path = String::from("/simba/m/_c_1-latch-0000000007");
        Ok(Reply::Created { path, stat: Stat { czxid: 1, owner: 1 } })
    }

    #[test]
    fn the_node_of_a_dropped_creation_is_deleted() {
        let (call, outcome) = creation();
        drop(outcome);
        let [left] = &call.conclude(created())[..] else { panic!("one call follows") };
        let Request::Delete { path } = &left.request else { panic!("it is a deletion") };
        assert_eq!(path, "/simba/m/_c_1-latch-0000000007");
    }

    fn only(left: Vec<Call>) -> Call {
        let [left] = <[Call; 1]>::try_from(left).unwrap();
        left
    }

    #[test]
    fn the_node_of_a_creation_without_an_answer_is_looked_up_after_a_sync() {
        let (call, outcome) = creation();
        drop(outcome);
        let sync = only(call.lost());
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
    fn a_creation_with_a_caller_is_not_deleted() {
        let (call, mut outcome) = creation();
        assert!(call.conclude(created()).is_empty());
        assert!(outcome.try_recv().unwrap().is_ok());
        let (call, mut outcome) = creation();
        assert!(call.lost().is_empty());
        assert!(matches!(outcome.try_recv(), Ok(Err(Failure::Lost))));
    }

    #[test]
    fn background_calls_survive_a_connection_but_not_their_session() {
        let mut outbox = Outbox::default();
        outbox.calls.push_back(Call::delete("/a".into()));
        outbox.calls.extend([creation().0]);
        outbox.fail(&Failure::Lost);
        assert_eq!(outbox.calls.len(), 1);
        outbox.discard_background();
        assert!(outbox.next_call().is_none());
    }

    #[test]
    fn only_checks_with_a_caller_are_taken() {
        let check = || {
            let (to, outcome) = oneshot::channel();
            (Call::new(Request::Check { paths: vec!["/a".into()] }, to), outcome)
        };
        let ((kept, _outcome), (dropped, _)) = (check(), check());
        let mut outbox = Outbox::default();
        outbox.calls.extend([kept, Call::delete("/a".into()), dropped]);
        assert_eq!((outbox.take_checks().len(), outbox.calls.len()), (1, 1));
    }
}
