//! A store with one queue in memory, on virtual time, that can fail, lose answers and delay.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use simba_core::spi::{Subscription, Wakeups};
use simba_core::{Clock as _, Lease, MutexName, TokioClock};
use tokio::sync::oneshot;

use super::super::*;

pub(super) const LEASE: Duration = Duration::from_secs(10);
/// The topic of every creation. Other topics are the numbers of entries, for their end.
const CREATED: u64 = 0;

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The store does not execute it.
    Refused,
    /// The store executes it, and the answer is lost.
    Unanswered,
}

/// A store with one queue, on virtual time.
pub(super) struct Store {
    pub(super) clock: TokioClock,
    pub(super) state: Mutex<State>,
    pub(super) wakeups: Wakeups<u64>,
    pub(super) requests: AtomicUsize,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) entries: BTreeMap<u64, Entry>,
    pub(super) created: u64,
    pub(super) nonces: u64,
    pub(super) fault: Option<Fault>,
    /// How long a request takes to the store.
    pub(super) delay: Duration,
    /// A foreign entry that is created right before the next one.
    pub(super) rival: Option<ContenderId>,
}

pub(super) struct Entry {
    nonce: u64,
    owner: ContenderId,
    expires: Moment,
}

impl Store {
    pub(super) fn new() -> Arc<Self> {
        let (state, requests) = (Mutex::default(), AtomicUsize::new(0));
        Arc::new(Self { clock: TokioClock::new(), state, wakeups: Wakeups::local(), requests })
    }

    /// Returns the state without the entries whose lease has ended.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap();
        let now = self.clock.now();
        state.entries.retain(|number, entry| {
            let lives = entry.expires > now;
            if !lives {
                self.wakeups.notify(number);
            }
            lives
        });
        state
    }

    /// Executes a request after the delay, with the next fault.
    async fn request<T>(&self, execute: impl FnOnce(&mut State) -> T + Send) -> Result<T> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let (delay, fault) = {
            let mut state = self.state();
            (state.delay, state.fault.take())
        };
        self.clock.sleep_until(self.clock.now() + delay).await;
        let broken = || Error::new(ErrorKind::Unavailable, "the connection broke");
        if fault == Some(Fault::Refused) {
            return Err(broken());
        }
        let answer = execute(&mut self.state());
        if fault == Some(Fault::Unanswered) { Err(broken()) } else { Ok(answer) }
    }

    fn create(&self, state: &mut State, nonce: u64, owner: &ContenderId) -> u64 {
        let expires = self.clock.now() + LEASE;
        if let Some((number, entry)) = state.entries.iter_mut().find(|(_, entry)| entry.nonce == nonce) {
            entry.expires = expires;
            return *number;
        }
        state.created += 1;
        let entry = Entry { nonce, owner: owner.clone(), expires };
        state.entries.insert(state.created, entry);
        self.wakeups.notify(&CREATED);
        state.created
    }

    fn delete(&self, state: &mut State, nonce: u64) {
        let found = state.entries.iter().find(|(_, entry)| entry.nonce == nonce).map(|(number, _)| *number);
        if let Some(number) = found {
            state.entries.remove(&number);
            self.wakeups.notify(&number);
        }
    }

    /// Deletes the first entry, as an operator does.
    pub(super) fn evict(&self) {
        let (number, _) = self.state().entries.pop_first().unwrap();
        self.wakeups.notify(&number);
    }

    pub(super) fn fail_next(&self, fault: Fault) {
        self.state().fault = Some(fault);
    }

    pub(super) fn owners(&self) -> Vec<String> {
        self.state().entries.values().map(|entry| entry.owner.to_string()).collect()
    }

    fn queue(self: &Arc<Self>) -> MemoryQueue {
        MemoryQueue { store: Arc::clone(self), own: None, proven: Moment::ZERO, watch: None, own_watch: None }
    }

    pub(super) fn session(self: &Arc<Self>, id: &str, intent: Intent) -> QueueSession<MemoryQueue> {
        let (mutex, id) = (MutexName::new("orders").unwrap(), ContenderId::foreign(id).unwrap());
        let lease = Lease::new(LEASE / 2, LEASE / 2).unwrap();
        QueueSession::new(self.queue(), Claim::new(mutex, id, lease).with_intent(intent))
    }

    /// Advances the clock and lets the background tasks run.
    pub(super) async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
        drop(self.state());
    }
}

pub(super) struct MemoryQueue {
    store: Arc<Store>,
    own: Option<Own>,
    /// The end of the last proof.
    proven: Moment,
    watch: Option<(u64, Subscription<u64>)>,
    own_watch: Option<Subscription<u64>>,
}

struct Own {
    nonce: u64,
    number: Option<u64>,
    pending: Option<oneshot::Receiver<Result<u64>>>,
}

impl Own {
    async fn outcome(&mut self) -> Result<()> {
        if let Some(pending) = &mut self.pending {
            let outcome = pending.await.unwrap();
            self.pending = None;
            self.number = Some(outcome?);
        }
        Ok(())
    }
}

impl MemoryQueue {
    fn start_creation(&mut self, contender: &ContenderId) {
        let store = Arc::clone(&self.store);
        let nonce = self.own.as_ref().map_or_else(
            || {
                let mut state = store.state();
                state.nonces += 1;
                state.nonces
            },
            |own| own.nonce,
        );
        let ((to, pending), contender) = (oneshot::channel(), contender.clone());
        tokio::spawn(async move {
            let created = store.request(|state| {
                if let Some(rival) = state.rival.take() {
                    state.nonces += 1;
                    store.create(state, state.nonces, &rival);
                }
                store.create(state, nonce, &contender)
            });
            let _ = to.send(created.await);
        });
        self.own = Some(Own { nonce, number: None, pending: Some(pending) });
    }

    fn number(&self) -> Option<u64> {
        self.own.as_ref().and_then(|own| own.number)
    }
}

pub(super) fn token(number: u64) -> FencingToken {
    FencingToken::new(number)
}

fn holder((number, entry): (&u64, &Entry)) -> Holder {
    Holder { owner: entry.owner.clone(), token: token(*number) }
}

impl Queue for MemoryQueue {
    type Ahead = u64;

    fn now(&self) -> Moment {
        self.store.clock.now()
    }

    fn lease(&self) -> Duration {
        LEASE
    }

    fn token(&self) -> Option<FencingToken> {
        self.number().map(token)
    }

    async fn locate(&mut self, contender: &ContenderId, queues: bool) -> Result<Position<u64>> {
        if self.number().is_none() {
            if self.own.as_ref().is_none_or(|own| own.pending.is_none()) {
                let head = self.store.state().entries.iter().next().map(holder);
                if let (false, Some(head)) = (queues, head) {
                    return Ok(Position::Taken(head));
                }
                self.start_creation(contender);
                self.proven = self.now() + LEASE;
            }
            self.own.as_mut().unwrap().outcome().await?;
        }
        let number = self.number().unwrap();
        let position = self.store.request(|state| {
            let ahead = state.entries.range(..number).next_back().map(|(ahead, _)| *ahead);
            (state.entries.contains_key(&number), ahead)
        });
        Ok(match position.await? {
            (false, _) => {
                self.own = None;
                Position::Missing
            }
            (true, Some(ahead)) => Position::Behind(ahead),
            (true, None) => Position::First(Proof { token: token(number), until: self.proven }),
        })
    }

    async fn prove(&mut self, _renews: bool) -> Result<Option<Proof>> {
        let Some(number) = self.number() else { return Ok(None) };
        let until = self.now() + LEASE;
        let store = Arc::clone(&self.store);
        let exists = store.request(|state| {
            let expires = self.now() + LEASE;
            state.entries.get_mut(&number).map(|entry| entry.expires = expires).is_some()
        });
        if !exists.await? {
            self.own = None;
            return Ok(None);
        }
        self.proven = until;
        Ok(Some(Proof { token: token(number), until }))
    }

    async fn delete(&mut self) -> Result<()> {
        let Some(own) = &mut self.own else { return Ok(()) };
        let _ = own.outcome().await;
        let (nonce, store) = (own.nonce, Arc::clone(&self.store));
        // In a task: the store executes a request whose caller is dropped.
        let deleting = async move { store.request(|state| store.delete(state, nonce)).await };
        tokio::spawn(deleting).await.unwrap()?;
        self.own = None;
        Ok(())
    }

    fn delete_in_background(&mut self) {
        let Some(mut own) = self.own.take() else { return };
        let store = Arc::clone(&self.store);
        tokio::spawn(async move {
            let _ = own.outcome().await;
            while store.request(|state| store.delete(state, own.nonce)).await.is_err() {}
        });
    }

    async fn read_head(&mut self) -> Result<Option<Holder>> {
        let head = self.store.request(|state| state.entries.iter().next().map(holder)).await?;
        let topic = head.as_ref().map_or(CREATED, |head| head.token.get());
        self.watch = Some((topic, self.store.wakeups.subscribe(topic)));
        Ok(head)
    }

    async fn watch_ahead(&mut self, ahead: u64) -> Result<Option<Holder>> {
        self.watch = Some((ahead, self.store.wakeups.subscribe(ahead)));
        let read = self.store.request(|state| {
            state.entries.contains_key(&ahead).then(|| state.entries.iter().next().map(holder)).flatten()
        });
        read.await
    }

    async fn watch_head(&mut self) -> Result<bool> {
        Ok(true)
    }

    async fn notified(&mut self) {
        let idle = || (u64::MAX, self.store.wakeups.subscribe(u64::MAX));
        self.watch.get_or_insert_with(idle).1.notified().await;
        self.watch = None;
    }

    fn stop_waiting(&mut self) {
        self.watch = None;
    }

    async fn lost(&mut self) {
        let number = self.number().unwrap_or(u64::MAX);
        let subscribe = || self.store.wakeups.subscribe(number);
        self.own_watch.get_or_insert_with(subscribe).notified().await;
    }
}
