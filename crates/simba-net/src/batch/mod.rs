//! Combines calls that arrive together into one request.
//!
//! A server that waits for its disk at every request serves a hundred calls in one request nearly as fast as one call.
//! While requests are in flight, a [`Batcher`] collects new calls and sends them together. A call that arrives alone is
//! sent at once, from the caller's task.
//!
//! | event | what happens to a call |
//! |---|---|
//! | its future is dropped before it was sent | it is removed before the drop returns, and is never sent |
//! | its future is dropped after it was sent with others | it stays in its request; the answer is discarded |
//! | its future is dropped after it was sent from its caller's task | [`SendBatch::send`] is dropped too: the outcome is unknown |
//! | its request takes longer than the limit | it fails with [`ErrorKind::Unavailable`](simba_core::ErrorKind) |
//! | it was sent from its caller's task, and nothing polls its future any more | it holds up others until the limit has passed, as a request without an answer does |
//! | its request fails as a whole | it fails, or waits again and is sent alone if the [`SendBatch`] says so |
//! | the task of [`Batcher::run`] ends | it fails with [`ErrorKind::Closed`](simba_core::ErrorKind) if it was sent, otherwise it waits for the next `run` |
//! | [`Batcher::close`] | it fails if it was not sent yet, or would be sent again |
//!
//! The first row makes it safe to send another call for the same session right after a dropped one: the store receives
//! the dropped call first or not at all, as long as requests are processed in the order in which they are sent.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use simba_core::clock::Sleep;
use simba_core::spi::within;
use simba_core::{Clock, Error, ErrorKind, Moment, Result};
use tokio::sync::{Notify, oneshot};

use crate::error::{closed, timed_out};

/// Sends several calls as one request.
///
/// # For implementors
///
/// [`send`](Self::send) writes the request to the connection when it is first polled, so that a call that is made later
/// is sent later. It may be dropped at any await point: when the limit has passed, when [`Batcher::run`] is dropped, and for
/// a call that was sent from its caller's task, with its caller.
pub trait SendBatch: Sync {
    /// One call.
    type Call: Send + Sync;
    /// The answer to one call.
    type Answer: Send;

    /// Sends the calls together. Returns one answer for each of them, in their order.
    ///
    /// # Errors
    ///
    /// The request failed as a whole.
    fn send(
        &self,
        calls: &[Self::Call],
    ) -> impl Future<Output = Result<Answers<Self::Answer>, BatchError>> + Send;
}

/// The answers to the calls of one request, in their order.
pub type Answers<T> = Vec<Result<T>>;

/// The failure of a whole request.
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_enums)]
pub enum BatchError {
    /// Every call fails with this error.
    Fail(Error),
    /// Each call is sent again alone, so that a bad call does not fail the others. A request with one call fails.
    RetryAlone(Error),
}

impl From<Error> for BatchError {
    fn from(error: Error) -> Self {
        Self::Fail(error)
    }
}

/// The limits of a [`Batcher`].
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct BatchLimits {
    /// The largest number of calls in one request; at least one.
    pub calls: usize,
    /// The largest number of requests in flight; at least one.
    pub in_flight: usize,
    /// The longest time that a request may take.
    pub time: Duration,
    /// How long a call waits for others to share its request with. Zero sends a lone call at once.
    pub window: Duration,
}

/// Collects calls and sends them together. See the [module documentation](self).
pub struct Batcher<C, A> {
    limits: BatchLimits,
    clock: Arc<dyn Clock>,
    state: Mutex<State<C, A>>,
    /// Notified when a call was added, and when a request ended while calls were waiting.
    wakeup: Notify,
}

struct State<C, A> {
    next: u64,
    waiting: VecDeque<Waiting<C, A>>,
    in_flight: Vec<Slot>,
    /// Why no call is accepted any more.
    closed: Option<Error>,
}

/// A request in flight.
struct Slot {
    number: u64,
    /// The end of its limit. After that it does not count any more, even if its caller is never polled again.
    until: Moment,
}

/// A call that is not sent yet.
struct Waiting<C, A> {
    number: u64,
    call: C,
    answer: oneshot::Sender<Result<A>>,
    /// Whether a request that it shared with others has failed, so that it shares none any more.
    alone: bool,
}

type Request<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl<C: Send + Sync, A: Send> Batcher<C, A> {
    /// Creates a batcher without calls. [`run`](Self::run) has to be polled for calls to be sent together.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, limits: BatchLimits) -> Self {
        // With zero calls, empty requests would be sent again and again; with zero requests, none.
        let (calls, in_flight) = (limits.calls.max(1), limits.in_flight.max(1));
        let limits = BatchLimits { calls, in_flight, ..limits };
        let state = State { next: 0, waiting: VecDeque::new(), in_flight: Vec::new(), closed: None };
        Self { limits, clock, state: Mutex::new(state), wakeup: Notify::new() }
    }

    /// Makes a call, alone or together with others, in a request that is sent after this call was made.
    ///
    /// # Errors
    ///
    /// The answer is an error, the request failed or took too long, or [`run`](Self::run) has ended.
    ///
    /// # Cancel safety
    ///
    /// See the [module documentation](self).
    pub async fn call<S>(&self, sender: &S, call: C) -> Result<A>
    where
        S: SendBatch<Call = C, Answer = A>,
    {
        match self.add(call)? {
            Added::SendNow(call, _in_flight) => self.send_alone(sender, &call).await,
            Added::Waiting(waiting) => waiting.answer().await,
        }
    }

    /// Makes a call like [`call`](Self::call), but always in a request that [`run`](Self::run) sends. The call is added
    /// before this returns. The future is small: it does not contain the one of [`SendBatch::send`].
    ///
    /// # Errors
    ///
    /// As [`call`](Self::call).
    ///
    /// # Cancel safety
    ///
    /// See the [module documentation](self).
    pub fn call_batched(&self, call: C) -> impl Future<Output = Result<A>> + Send {
        let added = self.open().map(|state| self.push(state, call));
        async move { added?.answer().await }
    }

    /// Sends the collected calls, whenever the number of requests in flight allows it. Never completes.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the requests in flight, whose calls fail. Calls that wait are kept for the next `run`.
    pub async fn run<S>(&self, sender: &S)
    where
        S: SendBatch<Call = C, Answer = A>,
    {
        let mut requests = FuturesUnordered::new();
        // Calls that came before the first poll wait for others, too.
        let (mut window, mut slot) = (self.window(), None);
        loop {
            if window.is_none() {
                requests.extend(poll_fn(|context| Poll::Ready(self.send_waiting(sender, context))).await);
                slot = slot.or_else(|| self.next_slot());
            }
            tokio::select! {
                biased;
                Some(()) = requests.next(), if !requests.is_empty() => {}
                () = self.wakeup.notified(), if window.is_none() => window = self.window(),
                () = end_of(&mut window), if window.is_some() => window = None,
                () = end_of(&mut slot), if slot.is_some() => slot = None,
            }
        }
    }

    /// Fails all calls that wait, as when the store cannot be reached.
    pub fn fail_waiting(&self, error: &Error) {
        for waiting in self.state().waiting.drain(..) {
            let _ = waiting.answer.send(Err(error.clone()));
        }
    }

    /// Fails all calls that wait, and every later call. [`run`](Self::run) may be dropped afterwards.
    pub fn close(&self, error: &Error) {
        self.state().closed = Some(error.clone());
        self.fail_waiting(error);
    }

    fn add(&self, call: C) -> Result<Added<'_, C, A>> {
        let mut state = self.open()?;
        if state.waiting.is_empty()
            && self.limits.window.is_zero()
            && let Some(number) = self.take_slot(&mut state)
        {
            return Ok(Added::SendNow(call, InFlight { batcher: self, number }));
        }
        Ok(Added::Waiting(self.push(state, call)))
    }

    /// Returns the state, unless the batcher is closed.
    fn open(&self) -> Result<MutexGuard<'_, State<C, A>>> {
        let state = self.state();
        match &state.closed {
            Some(error) => Err(error.clone()),
            None => Ok(state),
        }
    }

    fn push(&self, mut state: MutexGuard<'_, State<C, A>>, call: C) -> Ticket<'_, C, A> {
        let (answer, receiver) = oneshot::channel();
        let number = state.next_number();
        state.waiting.push_back(Waiting { number, call, answer, alone: false });
        drop(state);
        self.wakeup.notify_one();
        Ticket { batcher: self, number, answer: receiver }
    }

    /// Counts a request as in flight, unless there are too many, and returns its number.
    fn take_slot(&self, state: &mut State<C, A>) -> Option<u64> {
        let now = self.clock.now();
        if state.in_flight.len() >= self.limits.in_flight {
            state.in_flight.retain(|slot| slot.until > now);
        }
        (state.in_flight.len() < self.limits.in_flight).then(|| {
            let number = state.next_number();
            state.in_flight.push(Slot { number, until: now + self.limits.time });
            number
        })
    }

    /// Returns the time until the limit of a request in flight has passed, if calls wait for that.
    fn next_slot(&self) -> Option<Sleep> {
        let state = self.state();
        let until = state.in_flight.iter().map(|slot| slot.until).min();
        until.filter(|_| !state.waiting.is_empty()).map(|until| self.clock.sleep_until(until))
    }

    /// Returns the time to wait for more calls, if any.
    fn window(&self) -> Option<Sleep> {
        let window = self.limits.window;
        (!window.is_zero()).then(|| self.clock.sleep_until(self.clock.now() + window))
    }

    fn send_waiting<'a, S>(&'a self, sender: &'a S, context: &mut Context<'_>) -> Vec<Request<'a>>
    where
        S: SendBatch<Call = C, Answer = A>,
    {
        std::iter::from_fn(|| self.send_next(sender, context)).collect()
    }

    /// Sends one request. The first poll writes it to the connection, under the lock: the drop of one of its calls waits
    /// for that, so that the next call of the same session is sent later.
    fn send_next<'a, S>(&'a self, sender: &'a S, context: &mut Context<'_>) -> Option<Request<'a>>
    where
        S: SendBatch<Call = C, Answer = A>,
    {
        let mut state = self.state();
        if state.waiting.is_empty() {
            return None;
        }
        let number = self.take_slot(&mut state)?;
        let count = match state.waiting.iter().position(|waiting| waiting.alone) {
            Some(0) => 1,
            Some(others) => others.min(self.limits.calls),
            None => state.waiting.len().min(self.limits.calls),
        };
        let calls = state.waiting.drain(..count).collect();
        let mut sent = Box::pin(self.send_together(sender, calls));
        let Poll::Ready(again) = sent.as_mut().poll(context) else {
            drop(state);
            let in_flight = InFlight { batcher: self, number };
            return Some(Box::pin(async move {
                let again = sent.await;
                self.state().wait_again(again);
                drop(in_flight);
            }));
        };
        state.end(number);
        state.wait_again(again);
        Some(Box::pin(std::future::ready(())))
    }

    /// Sends calls as one request, and answers them. Returns those that have to be sent again.
    async fn send_together<S>(&self, sender: &S, waiting: Vec<Waiting<C, A>>) -> Vec<Waiting<C, A>>
    where
        S: SendBatch<Call = C, Answer = A>,
    {
        let mut answers = Vec::with_capacity(waiting.len());
        let mut calls = Vec::with_capacity(waiting.len());
        for Waiting { number, call, answer, .. } in waiting {
            calls.push(call);
            answers.push((number, answer));
        }
        let results = match self.send_limited(sender, &calls).await {
            Ok(results) => results,
            Err(BatchError::RetryAlone(error)) if calls.len() > 1 => {
                tracing::debug!(%error, calls = calls.len(), "a batch failed, its calls are sent one by one");
                let again = calls.into_iter().zip(answers);
                return again
                    .map(|(call, (number, answer))| Waiting { number, call, answer, alone: true })
                    .collect();
            }
            Err(BatchError::Fail(error) | BatchError::RetryAlone(error)) => {
                calls.iter().map(|_| Err(error.clone())).collect()
            }
        };
        for ((_, answer), result) in answers.into_iter().zip(results) {
            // The caller may have been dropped.
            let _ = answer.send(result);
        }
        Vec::new()
    }

    async fn send_alone<S>(&self, sender: &S, call: &C) -> Result<A>
    where
        S: SendBatch<Call = C, Answer = A>,
    {
        match self.send_limited(sender, std::slice::from_ref(call)).await {
            Ok(mut results) => results.pop().unwrap_or_else(|| Err(no_answer())),
            Err(BatchError::Fail(error) | BatchError::RetryAlone(error)) => Err(error),
        }
    }

    async fn send_limited<S>(&self, sender: &S, calls: &[C]) -> Result<Answers<A>, BatchError>
    where
        S: SendBatch<Call = C, Answer = A>,
    {
        let limit = self.limits.time;
        let results = within(&*self.clock, limit, sender.send(calls)).await;
        let results = results.unwrap_or_else(|| Err(timed_out(limit).into()))?;
        if results.len() == calls.len() { Ok(results) } else { Err(no_answer().into()) }
    }

    fn state(&self) -> MutexGuard<'_, State<C, A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C, A> State<C, A> {
    /// Returns a number for a call or a request.
    const fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Ends a request in flight.
    fn end(&mut self, number: u64) {
        self.in_flight.retain(|slot| slot.number != number);
    }

    /// Lets calls wait again, in the order in which they were made; fails them if the batcher is closed. Leaves out those
    /// whose caller was dropped meanwhile: the next call of the same session may have been sent.
    fn wait_again(&mut self, calls: Vec<Waiting<C, A>>) {
        for call in calls.into_iter().filter(|call| !call.answer.is_closed()) {
            if let Some(error) = &self.closed {
                let _ = call.answer.send(Err(error.clone()));
                continue;
            }
            let at = self.waiting.partition_point(|waiting| waiting.number < call.number);
            self.waiting.insert(at, call);
        }
    }
}

/// How a new call is sent.
enum Added<'a, C: Send + Sync, A: Send> {
    /// By its caller.
    SendNow(C, InFlight<'a, C, A>),
    /// Together with others.
    Waiting(Ticket<'a, C, A>),
}

/// Removes a call that was not sent yet when its caller is dropped.
struct Ticket<'a, C: Send + Sync, A: Send> {
    batcher: &'a Batcher<C, A>,
    number: u64,
    answer: oneshot::Receiver<Result<A>>,
}

impl<C: Send + Sync, A: Send> Ticket<'_, C, A> {
    async fn answer(mut self) -> Result<A> {
        (&mut self.answer).await.unwrap_or_else(|_| Err(closed()))
    }
}

impl<C: Send + Sync, A: Send> Drop for Ticket<'_, C, A> {
    fn drop(&mut self) {
        // Before the state is locked: a request that fails later does not let the call wait again.
        self.answer.close();
        let mut state = self.batcher.state();
        // In the order of their numbers.
        if let Ok(at) = state.waiting.binary_search_by_key(&self.number, |waiting| waiting.number) {
            state.waiting.remove(at);
        }
    }
}

/// Counts one request in flight. Dropping it admits the next.
struct InFlight<'a, C: Send + Sync, A: Send> {
    batcher: &'a Batcher<C, A>,
    number: u64,
}

impl<C: Send + Sync, A: Send> Drop for InFlight<'_, C, A> {
    fn drop(&mut self) {
        let mut state = self.batcher.state();
        state.end(self.number);
        if !state.waiting.is_empty() {
            self.batcher.wakeup.notify_one();
        }
    }
}

impl<C, A> fmt::Debug for Batcher<C, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher").field("limits", &self.limits).finish_non_exhaustive()
    }
}

async fn end_of(window: &mut Option<Sleep>) {
    if let Some(window) = window {
        window.await;
    }
}

fn no_answer() -> Error {
    Error::new(ErrorKind::Protocol, "the server did not answer every call of a request")
}

#[cfg(test)]
mod tests;
