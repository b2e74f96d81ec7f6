//! A world on virtual time: one store, and any number of handles on it, each behind weather of its own.
//!
//! All times are exact: the lease is 600 ms + 400 ms, so a holder renews 360 to 400 ms after it last did, is
//! told to stop at 790 ms, has its work dropped at 940 ms and has lost at 990 ms; the store frees at 1000 ms.

#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use simba_core::clock::Sleep;
use simba_core::operate::MutexRecord;
use simba_core::{Backend, Clock, Lease, MemoryBackend, Moment, MutexName, Operate, Simba, TokioClock};
use simba_tck::{FaultyBackend, Switch, Weather};

/// The mutex that all contend for.
pub(crate) const MUTEX: &str = "mutex";

/// A full lease: the store keeps others out for this long after a renewal.
pub(crate) const LEASE: Duration = ms(1000);
pub(crate) const TTL: Duration = ms(600);
/// From the sending of a renewal to the loss.
pub(crate) const DEADLINE: Duration = ms(990);
/// From the sending of a renewal to the end of work that did not stop by itself.
pub(crate) const LAST_CALL: Duration = ms(940);
/// From the sending of a renewal to the order to stop.
pub(crate) const EXPIRING: Duration = ms(790);
/// From the sending of a renewal to the next, at the latest.
pub(crate) const RENEWAL: Duration = ms(400);
/// What a single call to the store may take.
pub(crate) const CALL_LIMIT: Duration = ms(200);
/// What a release may take that is never answered: it is tried for as long as a lease could last.
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

/// tokio's time, and a wall clock that goes with it.
#[derive(Clone, Debug)]
pub(crate) struct WorldClock {
    time: TokioClock,
}

impl WorldClock {
    /// What the wall clock shows at the clock's zero: noon of the 1st of January 2030, UTC.
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

/// A store and its surroundings.
pub(crate) struct World {
    pub(crate) clock: WorldClock,
    pub(crate) store: MemoryBackend,
}

/// One process of the world: a handle, and the switch of its weather.
pub(crate) struct Peer {
    pub(crate) simba: Simba,
    pub(crate) switch: Arc<Switch>,
}

impl World {
    pub(crate) fn new() -> Self {
        let clock = WorldClock { time: TokioClock::new() };
        Self { store: MemoryBackend::with_clock(clock.clone()), clock }
    }

    /// A peer whose jitter comes from this seed.
    pub(crate) fn peer(&self, seed: u64) -> Peer {
        let switch = Switch::new();
        let simba = self.handle(seed, Arc::clone(&switch) as Arc<dyn Weather>, self.clock.clone());
        Peer { simba, switch }
    }

    /// A handle behind any weather and on any clock.
    pub(crate) fn handle(&self, seed: u64, weather: Arc<dyn Weather>, clock: impl Clock) -> Simba {
        let backend = FaultyBackend::new(self.store.clone(), self.clock.clone(), weather);
        handle(backend, seed, clock)
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// What the store has of the mutex.
    pub(crate) async fn record(&self) -> MutexRecord {
        self.store.read(&name(MUTEX)).await.unwrap()
    }

    /// Asserts that nobody holds the mutex and nobody waits for it.
    pub(crate) async fn assert_empty(&self) {
        let record = self.record().await;
        assert_eq!((record.owner, record.waiters.unwrap_or(0)), (None, 0), "something was left behind");
    }

    /// Lets everyone run until that many wait for the mutex, without any time passing.
    pub(crate) async fn queue_of(&self, waiters: usize) {
        for _ in 0..1000 {
            if self.record().await.waiters == Some(waiters) {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("there are never {waiters} waiters: {:?}", self.record().await);
    }
}

/// A handle on any backend, with the lease of the world.
pub(crate) fn handle(backend: impl Backend, seed: u64, clock: impl Clock) -> Simba {
    Simba::builder(Arc::new(backend)).clock(clock).seed(seed).lease(lease()).build()
}
