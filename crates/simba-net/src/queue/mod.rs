//! A session on a store that keeps the contenders of a mutex in a queue of entries, such as ZooKeeper and etcd.
//!
//! Each contender creates an entry. The store orders entries by their creation, and deletes an entry when its lease (or
//! its session with the store) ends. The first entry holds the mutex, and stays the first for as long as it exists. The
//! number that the store gives to the creation is the fencing token. A [`Queue`] says how one store does that.
//! [`QueueSession`] does the rest, in the same way for every store:
//!
//! 1. **Join.** [`contend`](Session::contend) creates an entry, or finds the one of an earlier call, and reads its
//!    position.
//! 2. **Wait.** Behind another entry it watches the entry right ahead, so that a release wakes one waiter. It returns
//!    the holder. A session that does not queue deletes its entry again.
//! 3. **Acquire.** The first entry holds the mutex, but an answer grants it only until the moment up to which the store
//!    has proven to keep the entry. If less than half of a lease is left of the last proof, another one is made first.
//! 4. **Renew.** A renewal is a new proof. If the entry does not exist any more, the tenure is lost, and the call joins
//!    the queue again.
//! 5. **Leave.** [`release`](Session::release) deletes the entry. So does the next `contend` after a tenure that lapsed
//!    here before it did at the store: an entry that held again would give two tenures the same token.
//!
//! # What happens to a call
//!
//! | event | creating an entry | reading, proving | deleting the entry |
//! |---|---|---|---|
//! | the call is dropped, or times out in the engine | the queue keeps the request; the next call waits for its outcome, and the next deletion covers the entry | nothing to undo | the entry is not used again, since the deletion may be executed at any time |
//! | the connection breaks before the answer | outcome unknown: the call fails, and the next one searches the entry or repeats the request in a way that creates one entry at most | fails; a holder keeps its deadline | fails; the engine repeats it |
//! | the store refuses it | the call fails, there is no entry | fails | fails |
//! | the entry has ended | – | the call joins the queue again | succeeds |
//! | the session is dropped | deleted in the background, also if it is created later | – | repeated in the background |
//!
//! # Hints
//!
//! [`changed`](Session::changed) completes once without a change, since a change before its first call may have been
//! missed. After that it completes when the watched event has happened or may have: a [`Queue`] also completes its
//! watches after a reconnect. A hint that comes while nothing awaits it is kept. A holder waits for the loss of its own
//! entry only.
//!
//! A process may hold thousands of mutexes, so a session is small, a renewal allocates no more than the one box of its
//! call, and a [`Queue`] boxes what only waiters need.

use std::fmt;
use std::time::Duration;

use simba_core::operate::MutexRecord;
use simba_core::spi::{Answer, Claim, Holding, Intent, Ownership, Prior, Session, async_trait};
use simba_core::{ContenderId, Error, ErrorKind, FencingToken, Moment, MutexName, Result};

/// The number of attempts to act on a queue that changes in between.
pub const MAX_ATTEMPTS: usize = 8;

/// The queue of one mutex at one store, with the entry of one contender.
///
/// # For implementors
///
/// Every call may be dropped at any await point. See the [module documentation](self) for what has to happen then.
pub trait Queue: Send + Sync + 'static {
    /// The entry right ahead of the own one, as [`locate`](Self::locate) found it.
    type Ahead: Send;

    /// Returns the current time of the clock that proofs refer to.
    fn now(&self) -> Moment;

    /// Returns the longest time that one proof grants.
    fn lease(&self) -> Duration;

    /// Returns the token of the own entry, if there is one that may still exist.
    fn token(&self) -> Option<FencingToken>;

    /// Returns the position of the own entry. Creates the entry if there is none: at the end of the queue if the session
    /// `queues`, otherwise only if the queue seems to be empty.
    ///
    /// # Errors
    ///
    /// The position is unknown, and an entry may have been created.
    fn locate(
        &mut self,
        contender: &ContenderId,
        queues: bool,
    ) -> impl Future<Output = Result<Position<Self::Ahead>>> + Send;

    /// Proves that the own entry exists, by a call that the store cannot answer without knowing that. Returns `None` if
    /// the entry does not exist. `renews` says that a tenure is renewed: the call may wait for others to share its
    /// request.
    ///
    /// # Errors
    ///
    /// Whether the entry exists is unknown.
    fn prove(&mut self, renews: bool) -> impl Future<Output = Result<Option<Proof>>> + Send;

    /// Deletes the own entry, also one whose creation has not been answered. Succeeds if there is none.
    ///
    /// # Errors
    ///
    /// The entry may still exist.
    fn delete(&mut self) -> impl Future<Output = Result<()>> + Send;

    /// Deletes the own entry in the background, also if it is created later.
    fn delete_in_background(&mut self);

    /// Returns the first entry, which holds the mutex.
    ///
    /// # Errors
    ///
    /// The holder is unknown.
    fn read_head(&mut self) -> impl Future<Output = Result<Option<Holder>>> + Send;

    /// Watches for the end of the entry right ahead, and returns the first entry. Returns `None` if one of them has
    /// ended: the queue has to be read again.
    ///
    /// # Errors
    ///
    /// The watch may not be set.
    fn watch_ahead(&mut self, ahead: Self::Ahead) -> impl Future<Output = Result<Option<Holder>>> + Send;

    /// Watches for the next change of the holder since the last [`read_head`](Self::read_head), unless it is watched
    /// already. Returns false if the holder has changed.
    ///
    /// # Errors
    ///
    /// The watch may not be set.
    fn watch_head(&mut self) -> impl Future<Output = Result<bool>> + Send;

    /// Completes when the watched event has happened or may have, at the latest after the next reconnect.
    ///
    /// # Cancel safety
    ///
    /// A wake-up is kept for the next call.
    fn notified(&mut self) -> impl Future<Output = ()> + Send;

    /// Drops the watch, and whatever else only a waiter needs.
    fn stop_waiting(&mut self);

    /// Completes when the own entry does not exist any more, or ends sooner than the last proof says.
    ///
    /// # Cancel safety
    ///
    /// A wake-up is kept for the next call.
    fn lost(&mut self) -> impl Future<Output = ()> + Send;
}

/// The position of the own entry in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)]
pub enum Position<A> {
    /// There is no entry, or its position is unknown: it has to be located again.
    Missing,
    /// The entry is the first. The proof may be an old one.
    First(Proof),
    /// Another entry is ahead.
    Behind(A),
    /// No entry was created, since this one is the first.
    Taken(Holder),
}

/// The time until which the store keeps an entry, even if it receives nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Proof {
    /// The number of the entry's creation.
    pub token: FencingToken,
    /// The end of that time.
    pub until: Moment,
}

/// The first entry of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Holder {
    /// Its contender.
    pub owner: ContenderId,
    /// The number of its creation.
    pub token: FencingToken,
}

impl Holder {
    /// Returns the holder of an entry with this value and key. Never fails, since other programs may create entries of
    /// any bytes, and the first one holds the mutex in any case.
    ///
    /// The owner is the value, as the contenders of Simba write it. If that cannot be an id, it is the part of the key
    /// after the last `/`, else the whole key with escapes, cut to the longest id.
    #[must_use]
    pub fn of(value: &[u8], key: &[u8], token: FencingToken) -> Self {
        let id = |bytes: &[u8]| ContenderId::foreign(std::str::from_utf8(bytes).ok()?.trim()).ok();
        let name = key.rsplit(|byte| *byte == b'/').next().unwrap_or(key);
        let owner = id(value).or_else(|| id(name)).unwrap_or_else(|| {
            let escaped = key.escape_ascii().map(char::from).take(ContenderId::MAX_FOREIGN_LEN);
            // Fails only for an empty key, which no store has.
            ContenderId::foreign(escaped.collect::<String>()).unwrap_or_else(|_| ContenderId::generate())
        });
        Self { owner, token }
    }
}

/// Returns the record of a mutex by the first entry of its queue and the number of entries.
#[must_use]
pub fn record(mutex: MutexName, head: Option<Holder>, entries: usize) -> MutexRecord {
    let mut record = MutexRecord::free(mutex);
    record.waiters = Some(entries.saturating_sub(1));
    (record.owner, record.token) = head.map(|head| (head.owner, head.token)).unzip();
    record
}

/// One contender or observer of a [`Queue`]. See the [module documentation](self).
pub struct QueueSession<Q: Queue> {
    queue: Q,
    contender: ContenderId,
    intent: Intent,
    /// Whether the own entry is the first. It stays so for as long as it exists.
    is_holder: bool,
    /// Whether a deletion of the own entry was requested and not confirmed. The store may execute it at any time, so the
    /// entry is not used again.
    is_leaving: bool,
    /// Whether another session with the same id holds the mutex. This one does not queue behind it.
    is_duplicate: bool,
    /// Whether `changed` has completed once, as it does after a new subscription.
    gave_first_hint: bool,
}

impl<Q: Queue> QueueSession<Q> {
    /// Creates a session without an entry.
    pub fn new(queue: Q, claim: Claim) -> Self {
        let Claim { contender, intent, .. } = claim;
        let (is_holder, is_leaving, is_duplicate, gave_first_hint) = (false, false, false, false);
        Self { queue, contender, intent, is_holder, is_leaving, is_duplicate, gave_first_hint }
    }

    async fn acquire(&mut self, prior: Prior) -> Result<Answer> {
        let began = self.queue.now();
        for _ in 0..MAX_ATTEMPTS {
            if let Some(answer) = self.attempt(prior, began).await? {
                return Ok(answer);
            }
        }
        Err(unstable_queue())
    }

    /// Makes one attempt. Returns `None` if the queue has changed and has to be read again.
    async fn attempt(&mut self, prior: Prior, began: Moment) -> Result<Option<Answer>> {
        if std::mem::take(&mut self.is_leaving) {
            self.queue.delete_in_background();
        }
        match self.queue.token() {
            // The entry of a lapsed tenure: the next tenure needs a greater token, hence a new entry.
            Some(token) if prior == Prior::Lapsed(token) => {
                self.leave().await?;
                Ok(None)
            }
            Some(_) if self.is_holder => self.renew(prior, began).await,
            None if self.is_duplicate => self.check_duplicate().await,
            _ => {
                self.is_holder = false;
                let position = self.queue.locate(&self.contender, self.intent == Intent::Queue).await?;
                self.act_on(position, prior, began).await
            }
        }
    }

    async fn renew(&mut self, prior: Prior, began: Moment) -> Result<Option<Answer>> {
        let proof = self.queue.prove(prior == Prior::Held).await?;
        Ok(proof.map(|proof| self.granted(proof, began)))
    }

    async fn check_duplicate(&mut self) -> Result<Option<Answer>> {
        let head = self.queue.read_head().await?.filter(|head| head.owner == self.contender);
        self.is_duplicate = head.is_some();
        Ok(head.map(|head| self.held(head)))
    }

    async fn act_on(
        &mut self,
        position: Position<Q::Ahead>,
        prior: Prior,
        began: Moment,
    ) -> Result<Option<Answer>> {
        match position {
            Position::Missing => Ok(None),
            Position::Taken(head) => Ok(Some(self.held(head))),
            Position::First(proof) if proof.until.saturating_since(began) >= self.queue.lease() / 2 => {
                Ok(Some(self.granted(proof, began)))
            }
            Position::First(_) => self.renew(Prior::Nothing, began).await,
            Position::Behind(ahead) => self.wait(ahead, prior).await,
        }
    }

    /// Watches the entry right ahead, or leaves the queue if this session does not wait.
    async fn wait(&mut self, ahead: Q::Ahead, prior: Prior) -> Result<Option<Answer>> {
        if self.intent != Intent::Queue {
            self.leave().await?;
            let head = self.queue.read_head().await?;
            return Ok(head.map(|head| self.held(head)));
        }
        let Some(head) = self.queue.watch_ahead(ahead).await? else { return Ok(None) };
        if head.owner == self.contender && prior == Prior::Nothing {
            self.is_duplicate = true;
            self.leave().await?;
        }
        Ok(Some(self.held(head)))
    }

    async fn leave(&mut self) -> Result<()> {
        (self.is_holder, self.is_leaving) = (false, true);
        self.queue.delete().await?;
        self.is_leaving = false;
        self.queue.stop_waiting();
        Ok(())
    }

    /// Records that this session holds the mutex. The remaining time counts from `began`, the beginning of the call.
    fn granted(&mut self, proof: Proof, began: Moment) -> Answer {
        self.is_holder = true;
        self.queue.stop_waiting();
        let remaining = proof.until.saturating_since(began).min(self.queue.lease());
        Answer::Ours(Ownership::new(self.contender.clone(), Some(proof.token), remaining))
    }

    /// Returns the ownership of another contender. The rest of its lease is unknown; the own length stands for it.
    fn ownership(&self, head: Holder) -> Ownership {
        Ownership::new(head.owner, Some(head.token), self.queue.lease())
    }

    fn held(&self, head: Holder) -> Answer {
        Answer::Held(self.ownership(head))
    }

    async fn until_turn(&mut self) -> Result<()> {
        if self.intent != Intent::Queue && !self.queue.watch_head().await? {
            return Ok(());
        }
        if self.gave_first_hint {
            self.queue.notified().await;
        }
        self.gave_first_hint = true;
        Ok(())
    }
}

#[async_trait]
impl<Q: Queue> Session for QueueSession<Q> {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        // Thousands of renewals may be in flight at once: only their small future is not boxed once more.
        if self.is_holder && prior == Prior::Held && self.queue.token().is_some() {
            let began = self.queue.now();
            if let Some(answer) = self.renew(prior, began).await? {
                return Ok(answer);
            }
        }
        Box::pin(self.acquire(prior)).await
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let head = self.queue.read_head().await?;
        Ok(head.map(|head| self.ownership(head)))
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        match (holding, self.queue.token()) {
            (Holding::Under(token), Some(own)) if self.is_holder && own != token => Ok(()),
            _ => self.leave().await,
        }
    }

    async fn changed(&mut self) -> Result<()> {
        if self.is_holder {
            self.queue.lost().await;
            return Ok(());
        }
        Box::pin(self.until_turn()).await
    }
}

impl<Q: Queue> Drop for QueueSession<Q> {
    fn drop(&mut self) {
        self.queue.delete_in_background();
    }
}

impl<Q: Queue> fmt::Debug for QueueSession<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueSession").field("contender", &self.contender).finish_non_exhaustive()
    }
}

/// Returns the error for a queue that changed during every attempt to read it.
#[must_use]
pub fn unstable_queue() -> Error {
    Error::new(ErrorKind::Unavailable, "the queue of the mutex changed during every attempt to read it")
}

#[cfg(test)]
mod tests;
