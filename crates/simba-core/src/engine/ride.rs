//! A driver on its first call, carried along by the task that waits for it.
//!
//! Most mutexes are free when somebody locks them. Then the first call is all there is to wait for, and a task of
//! its own for the driver would mean two more hops from task to task, often from one processor to the other. So a
//! driver first goes on in the task of the caller, and gets its own as soon as it has to live without him.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::driver::Begun;
use crate::simba::Core;

/// A driver on its first call, and the runtime that it goes on on by itself.
pub(crate) struct Rider {
    begins: Pin<Box<dyn Future<Output = Begun> + Send>>,
    runtime: Handle,
    /// A shutdown waits for it.
    token: TaskTrackerToken,
}

impl Rider {
    pub(crate) fn new(
        begins: Pin<Box<dyn Future<Output = Begun> + Send>>,
        runtime: Handle,
        token: TaskTrackerToken,
    ) -> Self {
        Self { begins, runtime, token }
    }

    /// One step in the task of `context`. A driver that has begun goes on in a task of its own, no larger than
    /// if it had never been here.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let _inside = self.runtime.enter();
        self.begins.as_mut().poll(context).map(|begun| begun.go_on(&self.runtime))
    }

    /// Goes on in a task of its own before it has begun.
    fn alight(self) {
        let Self { begins, runtime, token } = self;
        runtime.clone().spawn(async move {
            begins.await.go_on(&runtime);
            drop(token);
        });
    }
}

/// The seat of a driver that still rides with its caller. Dropping it gives the driver a task of its own.
pub(crate) struct Ride {
    core: Arc<Core>,
    seat: u64,
}

impl Ride {
    pub(crate) fn new(core: Arc<Core>, rider: Rider) -> Self {
        let seat = core.rides.board();
        let ride = Self { core, seat };
        ride.sit(rider);
        ride
    }

    /// Carries the driver until the store has answered its first call, or did not.
    ///
    /// # Cancel safety
    ///
    /// The driver keeps its seat, and goes on with the next call or by itself.
    pub(crate) async fn first_call(&mut self) {
        poll_fn(|context| self.carry(context)).await;
    }

    fn carry(&self, context: &mut Context<'_>) -> Poll<()> {
        // A shutdown does not wait for callers: it lets their drivers go on by themselves.
        let Some(mut rider) = self.core.rides.leave(self.seat) else { return Poll::Ready(()) };
        let begun = rider.poll(context);
        if begun.is_pending() {
            self.sit(rider);
        }
        begun
    }

    fn sit(&self, rider: Rider) {
        if let Some(rider) = self.core.rides.sit(&self.core.closing, self.seat, rider) {
            rider.alight();
        }
    }
}

impl Drop for Ride {
    fn drop(&mut self) {
        if let Some(rider) = self.core.rides.leave(self.seat) {
            rider.alight();
        }
    }
}

/// All drivers that ride with a caller, so that a shutdown reaches those whose callers have stopped asking.
#[derive(Default)]
pub(crate) struct Rides {
    seats: Mutex<Seats>,
}

#[derive(Default)]
struct Seats {
    next: u64,
    taken: BTreeMap<u64, Rider>,
}

impl Rides {
    fn board(&self) -> u64 {
        let mut seats = self.seats();
        seats.next += 1;
        seats.next
    }

    /// Takes a seat; gives the driver back once a shutdown has begun, which looks at the seats only once.
    fn sit(&self, closing: &CancellationToken, seat: u64, rider: Rider) -> Option<Rider> {
        let mut seats = self.seats();
        if closing.is_cancelled() {
            return Some(rider);
        }
        seats.taken.insert(seat, rider);
        None
    }

    fn leave(&self, seat: u64) -> Option<Rider> {
        self.seats().taken.remove(&seat)
    }

    /// Empties all seats, after the shutdown has begun.
    pub(crate) fn leave_all(&self) {
        let riders = std::mem::take(&mut self.seats().taken);
        riders.into_values().for_each(Rider::alight);
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
