//! A test fixture: one store, one clock, and handles with faults that can be switched.

#![allow(dead_code, reason = "every test binary uses its own part of it")]

use std::io::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use simba_core::operate::MutexRecord;
use simba_core::spi::Operate;
use simba_core::{Clock, Lease, MemoryBackend, Moment, MutexName, Simba, SimbaBuilder, TokioClock};
use simba_tck::{FaultyBackend, Switch, Weather};

/// The mutex of most tests.
pub(crate) const NAME: &str = "orders";

/// The lease of the tests: renewed at 360 to 400 ms, expiring at 790, lost at 990, freed at 1000.
pub(crate) const TTL: Duration = ms(600);
pub(crate) const TRANSITION: Duration = ms(400);
pub(crate) const TOTAL: Duration = ms(1000);
pub(crate) const RENEWAL: Duration = ms(400);
pub(crate) const GRACE: Duration = ms(200);
pub(crate) const DEADLINE: Duration = ms(990);
/// The time limit of a call.
pub(crate) const CALL: Duration = ms(200);

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) fn lease() -> Lease {
    Lease::new(TTL, TRANSITION).unwrap()
}

/// A lease with a long poll interval: a waiter that acquires within it was woken.
pub(crate) fn slow_poll_lease() -> Lease {
    lease().with_poll(Duration::from_secs(30)).unwrap()
}

/// A store on paused time.
pub(crate) struct World {
    pub(crate) clock: TokioClock,
    pub(crate) store: MemoryBackend,
}

impl World {
    pub(crate) fn new() -> Self {
        let clock = TokioClock::new();
        tokio::spawn(overdue());
        Self { store: MemoryBackend::with_clock(clock.clone()), clock }
    }

    /// Creates a handle without faults.
    pub(crate) fn simba(&self) -> Simba {
        self.handle().0
    }

    /// Creates a handle, and the switch for its faults.
    pub(crate) fn handle(&self) -> (Simba, Arc<Switch>) {
        let switch = Switch::new();
        (self.builder(Arc::<Switch>::clone(&switch)).build(), switch)
    }

    pub(crate) fn builder(&self, weather: Arc<dyn Weather>) -> SimbaBuilder {
        let backend = FaultyBackend::new(self.store.clone(), self.clock.clone(), weather);
        Simba::builder(Arc::new(backend)).with_clock(self.clock.clone()).with_lease(lease())
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Returns the virtual time since the start.
    pub(crate) fn age(&self) -> Duration {
        self.now() - Moment::ZERO
    }

    /// Sleeps for this much virtual time.
    pub(crate) async fn sleep(&self, time: Duration) {
        self.clock.sleep_until(self.now() + time).await;
    }

    pub(crate) async fn record(&self) -> MutexRecord {
        self.store.read(&MutexName::new(NAME).unwrap()).await.unwrap()
    }

    /// Runs all tasks until the mutex has this many waiters. Takes no virtual time.
    pub(crate) async fn queued(&self, waiters: usize) {
        for _ in 0..1000 {
            if self.record().await.waiters == Some(waiters) {
                return settled().await;
            }
            tokio::task::yield_now().await;
        }
        panic!("{waiters} waiters expected: {:?}", self.record().await);
    }

    /// Runs all tasks, then asserts that the mutex has no holder and no waiter. Takes no virtual time.
    pub(crate) async fn assert_empty(&self) {
        settled().await;
        let record = self.record().await;
        assert_eq!(
            (&record.owner, record.waiters.unwrap_or(0)),
            (&None, 0),
            "left behind at {:?}",
            self.age()
        );
    }
}

/// Ends the process if a test waits forever. On paused time that hour passes at once.
async fn overdue() {
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(std::io::stderr(), "{test} does not end");
    std::process::abort();
}

/// Runs all tasks that are ready. Takes no virtual time.
pub(crate) async fn settled() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

/// Records the moment at which its flag is dropped.
#[derive(Clone)]
pub(crate) struct DropTime {
    clock: Arc<dyn Clock>,
    at: Arc<Mutex<Option<Moment>>>,
}

impl DropTime {
    pub(crate) fn new(clock: impl Clock) -> Self {
        Self { clock: Arc::new(clock), at: Arc::default() }
    }

    /// Returns the value to move into the work.
    pub(crate) fn flag(&self) -> impl Drop + Send + use<> {
        struct Flag(DropTime);
        impl Drop for Flag {
            fn drop(&mut self) {
                *self.0.at.lock().unwrap() = Some(self.0.clock.now());
            }
        }
        Flag(self.clone())
    }

    pub(crate) fn get(&self) -> Option<Moment> {
        *self.at.lock().unwrap()
    }
}
