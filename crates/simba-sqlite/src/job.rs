//! What the worker is asked to do, and the way back.

use std::fmt;
use std::time::Duration;

use simba_core::backend::{Answer, Claim, Holding, Ownership, Prior};
use simba_core::operate::{EvictIf, Eviction, Finding, MutexRecord};
use simba_core::{Error, MutexName, Result};
use tokio::sync::oneshot;

use crate::table::{Fault, News, SessionId, Tables};

/// The way back to the caller, who may have gone.
pub(crate) struct Reply<T>(oneshot::Sender<Result<T>>);

impl<T> Reply<T> {
    pub(crate) fn pair() -> (Self, oneshot::Receiver<Result<T>>) {
        let (sender, receiver) = oneshot::channel();
        (Self(sender), receiver)
    }

    /// Nobody waits for it any more.
    pub(crate) fn is_moot(&self) -> bool {
        self.0.is_closed()
    }

    pub(crate) fn send(self, outcome: Result<T>) {
        let _ = self.0.send(outcome);
    }
}

/// One thing for the worker to do.
pub(crate) enum Job {
    Write(Write),
    Read(Read),
    /// A session waits for hints about the mutex from here on; told when nothing can be missed any more.
    Listen(MutexName, Reply<()>),
    Unlisten(MutexName),
    /// The bell was rung, or a check is due.
    Look,
    /// Close the file and end. The reply comes when that is done.
    End(Option<Reply<()>>),
}

/// What changes the file.
pub(crate) enum Write {
    Contend {
        session: SessionId,
        claim: Claim,
        prior: Prior,
        reply: Reply<Answer>,
    },
    Release {
        session: SessionId,
        claim: Claim,
        holding: Holding,
        queued: bool,
        reply: Reply<()>,
    },
    /// A session was dropped while it may have been in the queue.
    Leave {
        session: SessionId,
        mutex: MutexName,
    },
    Evict {
        mutex: MutexName,
        condition: EvictIf,
        reply: Reply<Eviction>,
    },
    ApplySchema(Reply<()>),
}

/// What only looks at it.
pub(crate) enum Read {
    Inspect(MutexName, Reply<Option<Ownership>>),
    Record(MutexName, Reply<MutexRecord>),
    List(Reply<Vec<MutexRecord>>),
    Findings(Reply<Vec<Finding>>),
}

/// A change that is made and not committed yet: whom to tell how that went.
pub(crate) type Settle = Box<dyn FnOnce(Result<()>)>;

/// What came of a change.
pub(crate) enum Outcome {
    /// Made, or refused without a trace.
    Made(Settle),
    /// SQLite failed: so has the whole transaction.
    Broken(Settle, rusqlite::Error),
}

impl Write {
    /// A call that was dropped before it began need not begin.
    pub(crate) fn is_moot(&self) -> bool {
        match self {
            Self::Contend { reply, .. } => reply.is_moot(),
            Self::Release { reply, .. } | Self::ApplySchema(reply) => reply.is_moot(),
            Self::Evict { reply, .. } => reply.is_moot(),
            Self::Leave { .. } => false,
        }
    }

    /// Returns the session that leaves and its mutex, if that is what this does: nobody else would ask for it again.
    pub(crate) fn leaving(&self) -> Option<(SessionId, MutexName)> {
        match self {
            Self::Leave { session, mutex } => Some((*session, mutex.clone())),
            _ => None,
        }
    }

    /// The time in which the caller renews, if it depends on the answer.
    pub(crate) fn ttl(&self) -> Option<Duration> {
        match self {
            Self::Contend { claim, .. } | Self::Release { claim, .. } => Some(claim.lease.ttl()),
            Self::Leave { .. } | Self::Evict { .. } | Self::ApplySchema(_) => None,
        }
    }

    /// Makes the change, within a transaction.
    pub(crate) fn make(self, tables: &Tables<'_>, news: &mut Vec<News>) -> Outcome {
        match self {
            Self::Contend { session, claim, prior, reply } => {
                settle(reply, tables.contend(session, &claim, prior, news))
            }
            Self::Release { session, claim, holding, queued, reply } => {
                let left =
                    if queued { tables.leave_queue(session, &claim.mutex).map(|_| ()) } else { Ok(()) };
                settle(reply, left.and_then(|()| tables.release(session, &claim.mutex, holding, news)))
            }
            Self::Leave { session, mutex } => {
                let left = tables.leave_queue(session, &mutex);
                let passed = left.and_then(|left| if left { tables.pass_on(&mutex, news) } else { Ok(()) });
                settle(Reply::pair().0, passed)
            }
            Self::Evict { mutex, condition, reply } => settle(reply, tables.evict(&mutex, &condition, news)),
            Self::ApplySchema(reply) => settle(reply, tables.apply_schema()),
        }
    }

    /// Tells the caller that there was no transaction to be part of.
    pub(crate) fn fail(self, error: Error) {
        match self {
            Self::Contend { reply, .. } => reply.send(Err(error)),
            Self::Release { reply, .. } | Self::ApplySchema(reply) => reply.send(Err(error)),
            Self::Evict { reply, .. } => reply.send(Err(error)),
            Self::Leave { .. } => {}
        }
    }
}

fn settle<T: 'static>(reply: Reply<T>, outcome: Result<T, Fault>) -> Outcome {
    match outcome {
        Ok(value) => {
            Outcome::Made(Box::new(move |committed: Result<()>| reply.send(committed.map(|()| value))))
        }
        Err(Fault::Row(error)) => Outcome::Made(Box::new(move |_| reply.send(Err(error)))),
        Err(Fault::Sqlite(error)) => Outcome::Broken(
            Box::new(move |committed: Result<()>| {
                if let Err(error) = committed {
                    reply.send(Err(error));
                }
            }),
            error,
        ),
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write(_) => "Write",
            Self::Read(_) => "Read",
            Self::Listen(..) => "Listen",
            Self::Unlisten(_) => "Unlisten",
            Self::Look => "Look",
            Self::End(_) => "End",
        })
    }
}
