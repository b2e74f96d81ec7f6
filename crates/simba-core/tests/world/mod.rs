//! A test fixture on virtual time: one store, and any number of handles on it, each with its own faults.
//!
//! All times are exact: the lease is 600 ms + 400 ms. A holder renews 360 to 400 ms after the last renewal, is
//! notified to stop at 790 ms, has its work dropped at 940 ms and loses at 990 ms; the store frees at 1000 ms.

#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use simba_core::clock::Sleep;
use simba_core::operate::MutexRecord;
use simba_core::spi::{Backend, Operate};
use simba_core::{Clock, Lease, MemoryBackend, Moment, MutexName, Simba, TokioClock};
use simba_tck::{FaultyBackend, Switch, Weather};

/// The mutex of all tests.
pub(crate) const MUTEX: &str = "mutex";

/// The lease at the store after a renewal.
pub(crate) const LEASE: Duration = ms(1000);
pub(crate) const TTL: Duration = ms(600);
/// The time from the sending of a renewal to the loss.
pub(crate) const DEADLINE: Duration = ms(990);
/// The time from the sending of a renewal to the drop of work that still runs.
pub(crate) const WORK_DROPPED: Duration = ms(940);
/// The time from the sending of a renewal to `expiring`.
pub(crate) const EXPIRING: Duration = ms(790);
/// The maximum time from the sending of a renewal to the next.
pub(crate) const RENEWAL: Duration = ms(400);
/// The time limit of a call to the store.
pub(crate) const CALL_LIMIT: Duration = ms(200);
/// The time limit of a release that is never answered: it is retried for one lease.
pub(crate) const RELEASE_LIMIT: Duration = ms(1_000);

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) fn lease() -> Lease {
    Lease::new(TTL, LEASE - TTL).unwrap()
}

pub(crate) fn name(name: &str) -> MutexName {
    MutexName::new(name).unwrap()
}

/// tokio's time, and a wall clock that runs with it.
#[derive(Clone, Debug)]
pub(crate) struct WorldClock {
    time: TokioClock,
}

impl WorldClock {
    /// The wall-clock time at the clock's zero: noon of the 1st of January 2030, UTC.
    pub(crate) const WALL: Duration = secs(1_893_499_200);
}

impl Clock for WorldClock {
    fn now(&self) -> Moment {
        self.time.now()
    }

    fn sleep_until(&self, at: Moment) -> Sleep {
        self.time.sleep_until(at)
    }

    fn wall(&self) -> SystemTime {
        UNIX_EPOCH + Self::WALL + self.now().since_zero()
    }
}

/// A store and its clock.
pub(crate) struct World {
    pub(crate) clock: WorldClock,
    pub(crate) store: MemoryBackend,
}

/// One process: a handle, and the switch for its faults.
pub(crate) struct Peer {
    pub(crate) simba: Simba,
    pub(crate) switch: Arc<Switch>,
}

impl World {
    pub(crate) fn new() -> Self {
        let clock = WorldClock { time: TokioClock::new() };
        Self { store: MemoryBackend::with_clock(clock.clone()), clock }
    }

    /// Creates a store and one peer.
    pub(crate) fn with_peer() -> (Self, Peer) {
        let world = Self::new();
        let peer = world.peer(1);
        (world, peer)
    }

    /// Creates a store and two peers.
    pub(crate) fn with_peers() -> (Self, Peer, Peer) {
        let (world, one) = Self::with_peer();
        let two = world.peer(2);
        (world, one, two)
    }

    /// Creates a peer whose jitter has this seed.
    pub(crate) fn peer(&self, seed: u64) -> Peer {
        let switch = Switch::new();
        let simba = self.handle(seed, Arc::clone(&switch) as Arc<dyn Weather>, self.clock.clone());
        Peer { simba, switch }
    }

    /// Creates a handle with any faults and on any clock.
    pub(crate) fn handle(&self, seed: u64, weather: Arc<dyn Weather>, clock: impl Clock) -> Simba {
        let backend = FaultyBackend::new(self.store.clone(), self.clock.clone(), weather);
        handle(backend, seed, clock)
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Returns the mutex's record in the store.
    pub(crate) async fn record(&self) -> MutexRecord {
        self.store.read(&name(MUTEX)).await.unwrap()
    }

    /// Asserts that the mutex has no holder and no waiter.
    pub(crate) async fn assert_empty(&self) {
        let record = self.record().await;
        assert_eq!((record.owner, record.waiters.unwrap_or(0)), (None, 0), "something was left behind");
    }

    /// Runs all tasks until the mutex has this many waiters. Takes no virtual time.
    pub(crate) async fn queue_of(&self, waiters: usize) {
        for _ in 0..1000 {
            if self.record().await.waiters == Some(waiters) {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("expected {waiters} waiters: {:?}", self.record().await);
    }
}

/// Creates a handle on any backend, with the lease of the tests.
pub(crate) fn handle(backend: impl Backend, seed: u64, clock: impl Clock) -> Simba {
    Simba::builder(Arc::new(backend)).with_clock(clock).with_seed(seed).with_lease(lease()).build()
}
