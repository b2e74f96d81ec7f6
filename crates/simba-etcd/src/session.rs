//! One contender's key in the queue of a mutex. [`QueueSession`](simba_net::queue::QueueSession) decides what is done
//! with it.

use std::sync::Arc;
use std::time::Duration;

use simba_core::{ContenderId, FencingToken, Moment, Result};
use simba_net::queue::{Holder, Position, Proof, Queue};

use crate::client::{Client, Failure, TxnResponse, Watch, WatchTarget};
use crate::entry::Entry;
use crate::error::{failed, unexpected_answer};
use crate::layout::end_of;
use crate::lease::SharedLease;
use crate::queue::{self, Ahead, Head, revision_of};

/// The queue of one mutex. A process may hold thousands of mutexes, so the fields of waiters are boxed.
pub(crate) struct EtcdQueue {
    lease: Arc<SharedLease>,
    /// The prefix of all keys of the mutex.
    prefix: String,
    entry: Option<Entry>,
    /// Notified when the own key is deleted.
    own_watch: Option<Watch>,
    /// Notified when the entry may be the first, or the owner may have changed.
    turn_watch: Option<Box<TurnWatch>>,
    /// The result of the last read, for sessions without an entry.
    observed: Option<Box<Observed>>,
}

/// The watch of a waiter.
struct TurnWatch {
    /// The key of the entry right ahead; empty if another event is watched.
    key: Vec<u8>,
    watch: Watch,
}

/// The first entry of the queue, if any, and the revision of that state.
struct Observed {
    key: Option<Vec<u8>>,
    at: i64,
}

impl EtcdQueue {
    pub(crate) const fn new(lease: Arc<SharedLease>, prefix: String) -> Self {
        Self { lease, prefix, entry: None, own_watch: None, turn_watch: None, observed: None }
    }

    fn client(&self) -> &Arc<Client> {
        self.lease.client()
    }

    fn revision(&self) -> Option<i64> {
        self.entry.as_ref().and_then(|entry| entry.revision)
    }

    /// Clears the entry, whose key does not exist any more.
    fn clear_entry(&mut self) {
        if let Some(entry) = self.entry.take_if(|entry| entry.is_ambiguous) {
            // An unanswered request may create the key once more.
            entry.delete_in_background(&self.lease);
        }
        (self.entry, self.own_watch) = (None, None);
    }

    /// Checks the key if its lease has ended by the own clock. Returns whether it does not exist any more.
    ///
    /// After an outage most keys do not. A check shares its call with other sessions, which saves a call for each.
    async fn is_gone(&mut self) -> Result<bool> {
        let now = self.client().now();
        let has_ended = |entry: &Entry| entry.revision.is_some() && entry.lease.until() <= now;
        Ok(self.entry.as_ref().is_some_and(has_ended) && self.prove(false).await?.is_none())
    }

    async fn read_position(&mut self, revision: i64) -> Result<Position<Ahead>> {
        if self.is_gone().await? {
            return Ok(Position::Missing);
        }
        let Some(entry) = &self.entry else { return Ok(Position::Missing) };
        let read = self.client().txn(queue::read_position(&self.prefix, &entry.key, revision)).await;
        let answer = read.map_err(|failure| failed("read the queue", failure))?;
        let position = queue::position(answer, revision, entry.proof(revision))?;
        if position == Position::Missing {
            self.clear_entry();
        }
        Ok(position)
    }

    async fn join(&mut self, contender: &ContenderId, queues: bool) -> Result<Position<Ahead>> {
        let Some(answer) = self.join_outcome(contender, queues).await? else { return Ok(Position::Missing) };
        self.after_join(answer, queues)
    }

    /// Waits for the pending request that creates the entry, or sends one. Returns `None` if the lease has ended.
    async fn join_outcome(&mut self, contender: &ContenderId, queues: bool) -> Result<Option<TxnResponse>> {
        let outcome = match &mut self.entry {
            Some(entry) => entry.outcome().await,
            None => None,
        };
        let outcome = match outcome {
            Some(outcome) => outcome,
            None => self.send_join(contender, queues).await?,
        };
        match outcome {
            Ok(answer) => Ok(Some(answer)),
            Err(failure) if failure.is_lease_gone() => {
                self.entry.take().iter().for_each(|entry| self.lease.set_ended(&entry.lease));
                Ok(None)
            }
            // The next call requests the same key, so that it is created once.
            Err(failure) => Err(failed("join the queue", failure)),
        }
    }

    async fn send_join(
        &mut self,
        contender: &ContenderId,
        queues: bool,
    ) -> Result<Result<TxnResponse, Failure>> {
        let lease = self.lease.get_or_grant().await?;
        // The key of an earlier lease was deleted with it.
        let entry = match self.entry.take_if(|entry| Arc::ptr_eq(&entry.lease, &lease)) {
            Some(entry) => entry,
            None => Entry::new(&self.prefix, lease, self.client())?,
        };
        let txn = if queues { queue::join } else { queue::take };
        let txn = txn(&self.prefix, &entry.key, contender, entry.lease.id);
        let pending = Some(self.client().start_txn(txn));
        let entry = self.entry.insert(entry);
        entry.pending = pending;
        Ok(entry.outcome().await.unwrap_or(Err(Failure::Closed)))
    }

    /// Handles the answer to [`queue::join`] or [`queue::take`].
    fn after_join(&mut self, mut answer: TxnResponse, queues: bool) -> Result<Position<Ahead>> {
        let made = revision_of(answer.header.as_ref())?;
        let Some(entry) = &mut self.entry else { return Ok(Position::Missing) };
        if answer.succeeded {
            let proof = entry.proof(made);
            return if queues { queue::new_position(answer, proof) } else { Ok(Position::First(proof)) };
        }
        let found = answer.ranges().next().ok_or_else(unexpected_answer)?;
        let Some(first) = found.first() else { return Ok(Position::Missing) };
        if first.key == entry.key.as_bytes() {
            // An earlier request, whose answer was lost, has created the key.
            entry.set_created(first.create_revision);
            return Ok(Position::Missing);
        }
        self.delete_in_background();
        Ok(Position::Taken(Head::of(first).holder))
    }
}

impl Queue for EtcdQueue {
    type Ahead = Ahead;

    fn now(&self) -> Moment {
        self.client().now()
    }

    fn lease(&self) -> Duration {
        self.lease.length()
    }

    fn token(&self) -> Option<FencingToken> {
        self.revision().map(queue::token)
    }

    async fn locate(&mut self, contender: &ContenderId, queues: bool) -> Result<Position<Ahead>> {
        match self.revision() {
            Some(revision) => self.read_position(revision).await,
            None => self.join(contender, queues).await,
        }
    }

    /// Renews the lease and confirms by a quorum that the key exists.
    async fn prove(&mut self, _renews: bool) -> Result<Option<Proof>> {
        let Some(revision) = self.revision() else { return Ok(None) };
        let Some(entry) = &mut self.entry else { return Ok(None) };
        let Some(checked) = self.lease.check(&entry.lease, &entry.key, revision).await? else {
            self.clear_entry();
            return Ok(None);
        };
        entry.seen_at = checked.at;
        Ok(Some(Proof { token: queue::token(revision), until: checked.until }))
    }

    async fn delete(&mut self) -> Result<()> {
        if let Some(entry) = &mut self.entry {
            entry.outcome().await;
        }
        if self.is_gone().await? {
            return Ok(());
        }
        let Some(entry) = &self.entry else { return Ok(()) };
        let deleted = self.lease.client().delete(&entry.key).await;
        deleted.map_err(|failure| failed("leave the queue", failure))?;
        self.clear_entry();
        Ok(())
    }

    fn delete_in_background(&mut self) {
        self.own_watch = None;
        self.entry.take().into_iter().for_each(|entry| entry.delete_in_background(&self.lease));
    }

    async fn read_head(&mut self) -> Result<Option<Holder>> {
        let read = self.client().range(queue::first(&self.prefix)).await;
        let answer = read.map_err(|failure| failed("read the queue", failure))?;
        let head = answer.kvs.first().map(Head::of);
        let at = revision_of(answer.header.as_ref())?;
        let key = head.as_ref().map(|head| head.key.clone());
        self.observed = Some(Box::new(Observed { key, at }));
        Ok(head.map(|head| head.holder))
    }

    async fn watch_ahead(&mut self, ahead: Ahead) -> Result<Option<Holder>> {
        let Ahead { first, key, at } = ahead;
        if self.turn_watch.as_ref().is_none_or(|turn| turn.key != key) {
            // From the revision after the read, so that no event is missed.
            let watch = self.client().watch(WatchTarget::deletion_of(&key, at + 1), key != first.key);
            self.turn_watch = Some(Box::new(TurnWatch { key, watch }));
        }
        Ok(Some(first.holder))
    }

    async fn watch_head(&mut self) -> Result<bool> {
        let (None, Some(observed)) = (&self.turn_watch, &self.observed) else { return Ok(true) };
        let from = observed.at + 1;
        let target = match &observed.key {
            Some(key) => WatchTarget::deletion_of(key, from),
            None => WatchTarget::creation_under(&self.prefix, end_of(&self.prefix), from),
        };
        let watch = self.client().watch(target, true);
        self.turn_watch = Some(Box::new(TurnWatch { key: Vec::new(), watch }));
        Ok(true)
    }

    async fn notified(&mut self) {
        let idle = || Box::new(TurnWatch { key: Vec::new(), watch: self.lease.client().watch_reconnect() });
        self.turn_watch.get_or_insert_with(idle).watch.notified().await;
        self.turn_watch = None;
    }

    fn stop_waiting(&mut self) {
        (self.turn_watch, self.observed) = (None, None);
    }

    async fn lost(&mut self) {
        loop {
            let Some(entry) = &mut self.entry else { return };
            let Some(revision) = entry.revision else { return };
            let target = || WatchTarget::deletion_of(entry.key.as_bytes(), entry.seen_at + 1);
            let watch = self.own_watch.get_or_insert_with(|| self.lease.client().watch_deferred(target()));
            watch.notified().await;
            // Boxed: rarely needed, and the future of a waiting session has to be small.
            let checked = Box::pin(self.lease.check(&entry.lease, &entry.key, revision)).await;
            match checked {
                Ok(None) => return,
                Ok(Some(checked)) => entry.seen_at = checked.at,
                // Unknown: the next connection notifies the watch again.
                Err(_) => {}
            }
            self.own_watch = None;
        }
    }
}
