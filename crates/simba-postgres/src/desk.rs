//! Calls that come together go out together.
//!
//! The connection carries one transaction after the other, and each waits for the disk. So while some calls are
//! on their way, those that come meanwhile are gathered and make one statement. A call that comes alone goes
//! out at once and by itself.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures_util::stream::{FuturesUnordered, StreamExt};
use simba_core::{ContenderId, Error, MutexName, Result, within};
use tokio::sync::{Notify, oneshot};
use tokio_postgres::Row;

use crate::error::{Trouble, closed, lost, unavailable};
use crate::handle::{Handle, State};
use crate::rows::get;
use crate::statements::Query;
use crate::wire::Wire;

/// How many statements of a desk are on their way at once.
const DEPTH: usize = 2;
/// How many calls go out in one statement at the most.
const MOST: usize = 256;

/// What a row of the answer says after the name of its session; what it does not say is zero.
pub(crate) type Numbers = [i64; 4];

/// One call.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) mutex: MutexName,
    pub(crate) owner: ContenderId,
    pub(crate) session: Arc<str>,
    pub(crate) ttl: f64,
    pub(crate) total: f64,
    /// To take: the one that lapsed; to free: the one that it is held under. Negative for none.
    pub(crate) token: i64,
    /// Whether a mutex that is free may be taken, or one that is ours only renewed.
    pub(crate) takes: bool,
}

type Answer = Result<Option<Numbers>>;

/// A call that waits to be sent.
#[derive(Debug)]
struct Pending {
    wish: Wish,
    answer: oneshot::Sender<Answer>,
}

/// Where calls of one kind come together.
#[derive(Debug)]
pub(crate) struct Desk {
    one: Query,
    many: Query,
    under_way: AtomicUsize,
    pending: Mutex<Vec<Pending>>,
    /// Whether any are pending, for those who only end a statement: mostly none are, and nobody need wake up.
    any: AtomicBool,
    bell: Notify,
}

/// One statement under way; its end lets the next one go.
struct Turn<'a>(&'a Desk);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::SeqCst);
        if self.0.any.load(Ordering::SeqCst) {
            self.0.bell.notify_one();
        }
    }
}

impl Desk {
    pub(crate) fn new(one: Query, many: Query) -> Self {
        Self {
            one,
            many,
            under_way: AtomicUsize::new(0),
            pending: Mutex::default(),
            any: AtomicBool::new(false),
            bell: Notify::new(),
        }
    }

    /// Sends a call, alone or with others, in a statement that is formed after it was made. Nothing if the
    /// server has no row for it; unless it asks `surely`, also if that row is locked.
    ///
    /// Calls for a row that was locked for long go with others for a while: what goes together waits for no row,
    /// so a holder can try again and again and hold nobody up.
    ///
    /// # Cancel safety
    ///
    /// A call that was not sent yet never is.
    pub(crate) async fn ask(&self, handle: &Handle, wish: Wish, surely: bool) -> Answer {
        let stuck = handle.admit(&wish.mutex);
        let queued = {
            let mut pending = self.pending();
            if stuck.is_ok() && pending.is_empty() && self.has_room() {
                self.under_way.fetch_add(1, Ordering::SeqCst);
                None
            } else {
                let (answer, answered) = oneshot::channel();
                pending.push(Pending { wish: wish.clone(), answer });
                self.any.store(true, Ordering::SeqCst);
                self.bell.notify_one();
                Some(answered)
            }
        };
        let Some(answered) = queued else {
            let _turn = Turn(self);
            return self.alone(handle, &wish).await;
        };
        match answered.await.map_err(|_| closed())?? {
            None if stuck.is_err() => stuck.map(|()| None),
            None if surely => self.alone(handle, &wish).await,
            numbers => Ok(numbers),
        }
    }

    async fn alone(&self, handle: &Handle, wish: &Wish) -> Answer {
        let (mutex, owner, session) = (wish.mutex.as_str(), wish.owner.as_str(), &*wish.session);
        let rows = if self.one == Query::Take {
            let params: [crate::wire::Param<'_>; 7] =
                [&mutex, &owner, &session, &wish.ttl, &wish.total, &wish.token, &wish.takes];
            handle.ask(&wish.mutex, self.one, &params).await?
        } else {
            handle.ask(&wish.mutex, self.one, &[&mutex, &session, &wish.token]).await?
        };
        rows.first().map(numbers).transpose()
    }

    /// Sends what has gathered, whenever there is room for it.
    pub(crate) async fn run(&self, handle: &Handle) {
        let mut under_way = FuturesUnordered::new();
        let mut state = handle.state.subscribe();
        loop {
            under_way.extend(poll_fn(|context| Poll::Ready(self.form_all(handle, context))).await);
            tokio::select! {
                biased;
                Some(()) = under_way.next(), if !under_way.is_empty() => {}
                () = self.bell.notified() => {}
                // Those who wait for a connection go out with it.
                changed = state.changed() => if changed.is_err() { return },
            }
        }
    }

    fn form_all<'a>(&'a self, handle: &'a Handle, context: &mut Context<'_>) -> Vec<Batch<'a>> {
        std::iter::from_fn(|| self.form(handle, context)).collect()
    }

    /// Makes one statement of what has gathered, and sends it: under the lock, so that whoever gives up is left
    /// out, or sends what it sends next after it.
    fn form<'a>(&'a self, handle: &'a Handle, context: &mut Context<'_>) -> Option<Batch<'a>> {
        let wire = match &*handle.state.borrow() {
            State::Up(wire) if !wire.is_closed() => Ok(Arc::clone(wire)),
            State::Up(_) | State::Connecting => return None,
            State::Failing(error) => Err(error.clone()),
            State::Closed => Err(closed()),
        };
        let mut pending = self.pending();
        pending.retain(|pending| !pending.answer.is_closed());
        self.any.store(!pending.is_empty(), Ordering::SeqCst);
        if pending.is_empty() || !self.has_room() {
            return None;
        }
        let many = pending.len().min(MOST);
        let gathered: Vec<_> = pending.drain(..many).collect();
        self.any.store(!pending.is_empty(), Ordering::SeqCst);
        let wire = match wire {
            Ok(wire) => wire,
            Err(error) => {
                refuse(gathered, &error);
                return None;
            }
        };
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let mut batch: Batch<'a> = Box::pin(self.send(handle, wire, gathered));
        // The first poll hands it to the connection.
        let sent = batch.as_mut().poll(context);
        drop(pending);
        Some(if sent.is_ready() { Box::pin(std::future::ready(())) } else { batch })
    }

    async fn send(&self, handle: &Handle, wire: Arc<Wire>, gathered: Vec<Pending>) {
        let _turn = Turn(self);
        let rows = within(&*handle.clock, handle.config.silence(), self.many(handle, &wire, &gathered)).await;
        match rows {
            Some(Ok(rows)) => answer(gathered, &rows),
            Some(Err(Trouble::Refused(error))) => refuse(gathered, &error),
            Some(Err(_)) if wire.is_closed() => refuse(gathered, &lost()),
            // A full queue of notifications fails no call: sent alone, it is sent again without notifications.
            Some(Err(trouble)) if gathered.len() == 1 && !trouble.is_notify_queue_full() => {
                refuse(gathered, &handle.failed(&wire, trouble));
            }
            // Each call is sent again alone, so that one bad call does not fail the rest.
            Some(Err(trouble)) => {
                tracing::debug!(error = %trouble, "calls that came together go out one by one");
                let alone = gathered.into_iter().map(|Pending { wish, answer }| async move {
                    let _ = answer.send(self.alone(handle, &wish).await);
                });
                futures_util::future::join_all(alone).await;
            }
            None => refuse(gathered, &unavailable("the server does not answer")),
        }
    }

    async fn many(&self, handle: &Handle, wire: &Wire, gathered: &[Pending]) -> Result<Vec<Row>, Trouble> {
        let wishes = || gathered.iter().map(|pending| &pending.wish);
        let mutexes: Vec<&str> = wishes().map(|wish| wish.mutex.as_str()).collect();
        let sessions: Vec<&str> = wishes().map(|wish| &*wish.session).collect();
        let tokens: Vec<i64> = wishes().map(|wish| wish.token).collect();
        if self.many == Query::FreeMany {
            return wire.rows(&handle.statements, self.many, &[&mutexes, &sessions, &tokens]).await;
        }
        let owners: Vec<&str> = wishes().map(|wish| wish.owner.as_str()).collect();
        let ttls: Vec<f64> = wishes().map(|wish| wish.ttl).collect();
        let totals: Vec<f64> = wishes().map(|wish| wish.total).collect();
        let takes: Vec<bool> = wishes().map(|wish| wish.takes).collect();
        let params: [crate::wire::Param<'_>; 7] =
            [&mutexes, &owners, &sessions, &ttls, &totals, &tokens, &takes];
        wire.rows(&handle.statements, self.many, &params).await
    }

    fn has_room(&self) -> bool {
        self.under_way.load(Ordering::SeqCst) < DEPTH
    }

    fn pending(&self) -> MutexGuard<'_, Vec<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Batch<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// The numbers of a row after its session.
fn numbers(row: &Row) -> Result<Numbers> {
    let mut numbers = Numbers::default();
    for (at, number) in numbers.iter_mut().enumerate().take(row.len() - 1) {
        *number = get(row, at + 1)?;
    }
    Ok(numbers)
}

fn answer(gathered: Vec<Pending>, rows: &[Row]) {
    let read = |row| Ok((get::<&str>(row, 0)?, numbers(row)?));
    let answers: Result<HashMap<&str, Numbers>> = rows.iter().map(read).collect();
    match answers {
        Ok(answers) => {
            for Pending { wish, answer } in gathered {
                // Nobody waits for it any more: its next call comes.
                let _ = answer.send(Ok(answers.get(&*wish.session).copied()));
            }
        }
        Err(error) => refuse(gathered, &error),
    }
}

fn refuse(gathered: Vec<Pending>, error: &Error) {
    for Pending { answer, .. } in gathered {
        let _ = answer.send(Err(error.clone()));
    }
}
