//! Timers on the machine's clock: an ordered map of wakers, and one thread that sleeps until the first.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use super::alarm::{self, Alarm};
use super::moment::Moment;
use super::system::now;

/// All timers of the process.
#[derive(Debug)]
pub(super) struct Timer {
    entries: Mutex<Entries>,
    alarm: Box<dyn Alarm>,
    /// Starts the timer thread.
    spawn: fn(&'static Self) -> io::Result<()>,
    /// Whether the timer thread runs.
    served: AtomicBool,
    /// Locked while the thread is started. Whether a start has failed before.
    starting: Mutex<bool>,
}

#[derive(Debug)]
struct Entries {
    wakers: BTreeMap<(Moment, u64), Waker>,
    next: u64,
    /// The moment that the alarm is set to. It may fire with nothing due, but never after the first timer is due,
    /// except for [`GAP`].
    armed: Option<Moment>,
    /// The earliest moment at which the alarm may fire again.
    earliest: Moment,
}

/// The minimum time between two alarms. With thousands of timers a second, a wake-up of the thread for each would cost
/// more than their work. A timer is late by this at most, and only right after another.
const GAP: Duration = Duration::from_millis(1);

impl Timer {
    /// Creates the timers of the process. The first sleep starts the timer thread.
    pub(super) fn new() -> &'static Self {
        Self::with_thread(|timer| {
            thread::Builder::new().name("simba-timer".into()).spawn(move || timer.serve()).map(drop)
        })
    }

    fn with_thread(spawn: fn(&'static Self) -> io::Result<()>) -> &'static Self {
        Box::leak(Box::new(Self {
            entries: Mutex::new(Entries::new()),
            alarm: alarm::new(),
            spawn,
            served: AtomicBool::new(false),
            starting: Mutex::new(false),
        }))
    }

    /// Starts the thread unless it runs. If that fails, as in a process at its limit of threads, the task with this
    /// waker is polled again at once and tries again each time, so that its deadline is met anyway.
    fn ensure_served(&'static self, waker: &Waker) {
        if self.served.load(Ordering::Acquire) {
            return;
        }
        let mut failed = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.served.load(Ordering::Acquire) {
            match (self.spawn)(self) {
                Ok(()) => self.served.store(true, Ordering::Release),
                Err(error) => {
                    let first = !std::mem::replace(&mut *failed, true);
                    drop(failed);
                    if first {
                        let effect = "tasks that sleep are polled continuously until it does";
                        tracing::error!(%error, effect, "the system cannot start the timer thread");
                    }
                    waker.wake_by_ref();
                }
            }
        }
    }

    fn serve(&self) {
        loop {
            self.alarm.wait();
            for waker in self.take_due() {
                // A waker of other code that panics must not end the timer thread.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| waker.wake()));
            }
        }
    }

    fn take_due(&self) -> Vec<Waker> {
        let mut entries = self.entries();
        let now = now();
        let later = entries.wakers.split_off(&(now, u64::MAX));
        let due = std::mem::replace(&mut entries.wakers, later);
        if !due.is_empty() {
            entries.earliest = now + GAP;
        }
        entries.armed = None;
        if let Some(((at, _), _)) = entries.wakers.first_key_value() {
            let at = *at;
            self.arm(&mut entries, at);
        }
        due.into_values().collect()
    }

    pub(super) fn sleep_until(&'static self, at: Moment) -> TimerSleep {
        TimerSleep { timer: self, at, entry: None }
    }

    fn insert(&self, at: Moment, waker: Waker) -> u64 {
        let mut entries = self.entries();
        let id = entries.next;
        entries.next += 1;
        entries.wakers.insert((at, id), waker);
        self.arm(&mut entries, at);
        id
    }

    /// Sets the alarm to `at`, unless it is set to an earlier moment.
    fn arm(&self, entries: &mut Entries, at: Moment) {
        let at = at.max(entries.earliest);
        if entries.armed.is_none_or(|armed| at < armed) {
            entries.armed = Some(at);
            self.alarm.set(at);
        }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    const fn new() -> Self {
        Self { wakers: BTreeMap::new(), next: 0, armed: None, earliest: Moment::ZERO }
    }
}

/// A sleep on the machine's clock.
#[derive(Debug)]
pub(super) struct TimerSleep {
    timer: &'static Timer,
    at: Moment,
    entry: Option<u64>,
}

impl Future for TimerSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if now() >= self.at {
            return Poll::Ready(());
        }
        self.timer.ensure_served(context.waker());
        let Some(id) = self.entry else {
            self.entry = Some(self.timer.insert(self.at, context.waker().clone()));
            return Poll::Pending;
        };
        let waker = context.waker().clone();
        let mut entries = self.timer.entries();
        let Some(entry) = entries.wakers.get_mut(&(self.at, id)) else {
            // It fired after the clock was read and before the map was locked.
            return Poll::Ready(());
        };
        let old = std::mem::replace(entry, waker);
        drop(entries);
        // Outside the lock: the waker may be the last owner of a task that holds a sleep as well.
        drop(old);
        Poll::Pending
    }
}

impl Drop for TimerSleep {
    fn drop(&mut self) {
        // The waker is dropped outside the lock, as in `poll`.
        let waker = self.entry.and_then(|id| self.timer.entries().wakers.remove(&(self.at, id)));
        drop(waker);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::block;

    /// Fails for the first hundred threads.
    fn limited(timer: &'static Timer) -> io::Result<()> {
        static FAILED: AtomicUsize = AtomicUsize::new(0);
        if FAILED.fetch_add(1, Ordering::Relaxed) < 100 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        thread::Builder::new().spawn(move || timer.serve()).map(drop)
    }

    #[test]
    fn sleeps_end_at_their_moment_while_no_thread_can_be_started() {
        let never = Timer::with_thread(|_| Err(io::ErrorKind::WouldBlock.into()));
        let at = now() + Duration::from_millis(30);
        block::wait(never.sleep_until(at));
        assert!(now() >= at);
        assert!(!never.served.load(Ordering::Acquire));
    }

    #[test]
    fn thread_is_started_once_the_system_allows_it() {
        let timer = Timer::with_thread(limited);
        for _ in 0..3 {
            let at = now() + Duration::from_millis(300);
            block::wait(timer.sleep_until(at));
            assert!(now() >= at);
        }
        assert!(timer.served.load(Ordering::Acquire));
    }
}
