//! A driver without a task of its own, carried along by the task of its caller.
//!
//! Most mutexes are free when somebody locks them, and are given back soon. Then a first and a last call are all
//! there is to wait for, and a task of its own for the driver would mean hops from task to task, often from one
//! processor to the other. So a driver first goes on in the task of the caller. Once it holds the mutex it has
//! nothing to do for a while, and waits in its seat until the caller gives the mutex back. It gets a task as soon
//! as it has to live without him: when it was refused, when a hold takes longer than a moment, when he goes away.

use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::driver::Begun;
use crate::clock::{Clock, Moment};
use crate::closing::Closing;
use crate::simba::Core;

/// How long a driver that holds the mutex waits without a task: short beside a lease, long beside a call.
const MOMENT: Duration = Duration::from_millis(10);
/// How much time it must have until its next call, to be woken from that without haste.
const LEISURE: Duration = Duration::from_millis(50);

/// A driver without a task, and the runtime that it goes on on by itself.
pub(crate) struct Rider {
    state: State,
    runtime: Handle,
    /// A shutdown waits for it.
    token: TaskTrackerToken,
    /// Whoever carried it last. Nothing else tells him when it goes on by itself.
    carrier: Option<Waker>,
    /// The [`Conductor`] knows since when it has waited, and comes even if it ends by then.
    noted: bool,
}

enum State {
    /// It makes its first call.
    Begins(Pin<Box<dyn Future<Output = Begun> + Send>>),
    /// It holds the mutex, and has nothing to do yet.
    Waits(Box<Begun>),
    /// It gives the mutex back.
    Ends(Pin<Box<dyn Future<Output = ()> + Send>>),
    /// It has a task of its own, or is done.
    Gone,
}

impl Rider {
    pub(crate) fn new(
        begins: Pin<Box<dyn Future<Output = Begun> + Send>>,
        runtime: Handle,
        token: TaskTrackerToken,
    ) -> Self {
        Self { state: State::Begins(begins), runtime, token, carrier: None, noted: false }
    }

    /// One step in the task of `context`; ready when its first call or all that it had to do is done.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.carried_by(context.waker());
        let _inside = self.runtime.enter();
        self.state = match &mut self.state {
            State::Begins(begins) => settle(ready!(begins.as_mut().poll(context)), &self.runtime),
            State::Ends(ends) => {
                ready!(ends.as_mut().poll(context));
                State::Gone
            }
            State::Waits(_) | State::Gone => return Poll::Ready(()),
        };
        Poll::Ready(())
    }

    fn carried_by(&mut self, waker: &Waker) {
        match &mut self.carrier {
            Some(carrier) => carrier.clone_from(waker),
            None => self.carrier = Some(waker.clone()),
        }
    }

    /// Who waits gives the mutex back next.
    fn end(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Gone) {
            State::Waits(begun) => State::Ends(Box::pin(begun.finish())),
            state => state,
        };
    }

    /// Whether the caller has been told all that he waits for, or should have been by now.
    fn can_go_on(&self) -> bool {
        matches!(self.state, State::Waits(_) | State::Ends(_))
    }

    /// Goes on in a task of its own.
    fn alight(self) {
        let Self { state, runtime, token, carrier, .. } = self;
        match state {
            State::Waits(begun) => (*begun).go_on(&runtime),
            State::Begins(begins) => drop(runtime.clone().spawn(async move {
                begins.await.go_on(&runtime);
                drop(token);
            })),
            State::Ends(ends) => drop(runtime.spawn(async move {
                ends.await;
                drop(token);
            })),
            State::Gone => {}
        }
        // He looks at the link from now on.
        carrier.into_iter().for_each(Waker::wake);
    }
}

/// What becomes of a driver after its first call: it waits, or has a task no larger than if it had never been here.
fn settle(begun: Begun, runtime: &Handle) -> State {
    if begun.has_leisure(LEISURE) {
        return State::Waits(Box::new(begun));
    }
    begun.go_on(runtime);
    State::Gone
}

/// A place for a driver that rides with its caller. Empty while the caller carries it a step on.
#[derive(Default)]
struct Seat {
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    rider: Option<Box<Rider>>,
    /// The [`Conductor`] came by while nobody was here, and does not come again.
    missed: bool,
}

impl Seat {
    fn leave(&self) -> Option<Box<Rider>> {
        self.taken().rider.take()
    }

    /// Gives the driver back if there is no seat for it any more: once a shutdown has begun, which looks at each only
    /// once, and once the conductor has come in vain.
    fn take(&self, closing: &Closing, rider: Box<Rider>) -> Option<Box<Rider>> {
        let mut taken = self.taken();
        if closing.has_begun() || taken.missed && rider.can_go_on() {
            return Some(rider);
        }
        taken.rider = Some(rider);
        None
    }

    /// The same as [`leave`](Self::leave), for the conductor, who notes if nobody is here.
    fn vacate(&self) -> Option<Box<Rider>> {
        let mut taken = self.taken();
        taken.missed = taken.rider.is_none();
        taken.rider.take()
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A driver that rides with its caller. Dropping it gives the driver a task of its own.
pub(crate) struct Ride {
    core: Arc<Core>,
    seat: Arc<Seat>,
    number: u64,
}

impl Ride {
    pub(crate) fn new(core: Arc<Core>, rider: Rider) -> Self {
        let seat = Arc::default();
        let number = core.rides.board(Arc::clone(&seat));
        let ride = Self { core, seat, number };
        ride.sit(Box::new(rider));
        ride
    }

    /// Carries the driver until the store has answered its first call, or did not.
    ///
    /// # Cancel safety
    ///
    /// The driver keeps its seat, and goes on with the next call or by itself.
    pub(crate) async fn first_call(&self) {
        poll_fn(|context| self.carry(context)).await;
    }

    /// Carries a driver that still waits until it has given the mutex back.
    ///
    /// # Cancel safety
    ///
    /// As for [`first_call`](Self::first_call).
    pub(crate) async fn last_call(&self) {
        self.turn_back();
        poll_fn(|context| self.carry(context)).await;
    }

    fn turn_back(&self) {
        if let Some(mut rider) = self.seat.leave() {
            rider.end();
            self.sit(rider);
        }
    }

    fn carry(&self, context: &mut Context<'_>) -> Poll<()> {
        // A shutdown does not wait for callers: it lets their drivers go on by themselves.
        let Some(mut rider) = self.seat.leave() else { return Poll::Ready(()) };
        let stepped = rider.poll(context);
        self.sit(rider);
        stepped
    }

    fn sit(&self, mut rider: Box<Rider>) {
        if matches!(rider.state, State::Gone) {
            return;
        }
        let runtime = (rider.can_go_on() && !rider.noted).then(|| rider.runtime.clone());
        rider.noted |= runtime.is_some();
        if let Some(rider) = self.seat.take(&self.core.closing, rider) {
            return rider.alight();
        }
        if let Some(runtime) = runtime {
            Rides::wait(&self.core, &runtime, self.number);
        }
    }
}

impl Drop for Ride {
    fn drop(&mut self) {
        self.core.rides.get_off(self.number);
        if let Some(rider) = self.seat.leave() {
            rider.alight();
        }
    }
}

/// All drivers that ride with a caller: a shutdown reaches those whose callers have stopped asking, and those that
/// have waited long enough get a task.
#[derive(Default)]
pub(crate) struct Rides {
    seats: Mutex<Seats>,
}

#[derive(Default)]
struct Seats {
    next: u64,
    all: BTreeMap<u64, Arc<Seat>>,
    /// Who began to wait when, in that order, on each runtime that has a [`Conductor`]. Most of them have
    /// left their seats by the time they come first.
    waiting: Vec<(Id, VecDeque<(Moment, u64)>)>,
}

impl Rides {
    fn board(&self, seat: Arc<Seat>) -> u64 {
        let mut seats = self.seats();
        seats.next += 1;
        let number = seats.next;
        seats.all.insert(number, seat);
        number
    }

    fn get_off(&self, number: u64) {
        self.seats().all.remove(&number);
    }

    /// Whoever is in this seat waits from now on, on this runtime.
    fn wait(core: &Arc<Core>, runtime: &Handle, number: u64) {
        if core.rides.is_first_to_wait(runtime.id(), &*core.clock, number) {
            let conductor =
                Conductor { rides: Arc::clone(&core.rides), runtime: runtime.id(), on_duty: true };
            runtime.spawn(conductor.walk(Arc::clone(&core.clock)));
            // What is spawned last waits for the thread that spawned it, which may now work for long. Another thread
            // may have whatever was spawned before.
            runtime.spawn(async {});
        }
    }

    /// Whether nobody looks after those yet who wait on this runtime.
    fn is_first_to_wait(&self, runtime: Id, clock: &dyn Clock, number: u64) -> bool {
        let mut seats = self.seats();
        // Under the lock, so that they stand in order.
        let waits = (clock.now(), number);
        if let Some(waiting) = seats.waiting_on(runtime) {
            waiting.push_back(waits);
            return false;
        }
        seats.waiting.push((runtime, VecDeque::from([waits])));
        true
    }

    /// Empties all seats, after the shutdown has begun.
    pub(crate) fn leave_all(&self) {
        let seats: Vec<_> = self.seats().all.values().cloned().collect();
        seats.iter().filter_map(|seat| seat.leave()).for_each(|rider| rider.alight());
    }

    /// Gives everyone on this runtime a task who has waited since `then`; whether others wait there.
    fn wake(&self, runtime: Id, then: Moment) -> bool {
        let mut seats = self.seats();
        let waited = seats.waited(runtime, then);
        let attended = seats.waiting_on(runtime).is_some();
        drop(seats);
        for (number, seat) in waited {
            if let Some(rider) = seat.vacate() {
                self.get_off(number);
                rider.alight();
            }
        }
        attended
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seats {
    fn waiting_on(&mut self, runtime: Id) -> Option<&mut VecDeque<(Moment, u64)>> {
        self.waiting.iter_mut().find(|(id, _)| *id == runtime).map(|(_, waiting)| waiting)
    }

    /// The seats of those who have waited on this runtime since `then`, and still ride.
    fn waited(&mut self, runtime: Id, then: Moment) -> Vec<(u64, Arc<Seat>)> {
        let Some(waiting) = self.waiting_on(runtime) else { return Vec::new() };
        let count = waiting.partition_point(|(since, _)| *since <= then);
        let waited: Vec<_> = waiting.drain(..count).collect();
        if waiting.is_empty() {
            self.waiting.retain(|(id, _)| *id != runtime);
        }
        let ride = |(_, number)| Some((number, Arc::clone(self.all.get(&number)?)));
        waited.into_iter().filter_map(ride).collect()
    }
}

/// Looks after those who wait on one runtime, for as long as somebody does.
struct Conductor {
    rides: Arc<Rides>,
    runtime: Id,
    on_duty: bool,
}

impl Conductor {
    async fn walk(mut self, clock: Arc<dyn Clock>) {
        while self.on_duty {
            let now = clock.now();
            clock.sleep_until(now + MOMENT).await;
            self.on_duty = self.rides.wake(self.runtime, now);
        }
    }
}

/// Its runtime ends, and whoever waits there with it.
impl Drop for Conductor {
    fn drop(&mut self) {
        if self.on_duty {
            self.rides.wake(self.runtime, Moment::ZERO + Duration::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::task::TaskTracker;

    use super::*;

    /// Nobody would ever give it a task, and nothing would renew what it holds.
    #[tokio::test]
    async fn whoever_was_away_when_the_conductor_came_does_not_sit_down_to_wait() {
        let (seat, open) = (Seat::default(), Closing::default());
        let rider = |state| {
            let (runtime, token) = (Handle::current(), TaskTracker::new().token());
            Box::new(Rider { state, runtime, token, carrier: None, noted: true })
        };
        let ends = || rider(State::Ends(Box::pin(std::future::pending())));
        assert!(seat.take(&open, ends()).is_none(), "there is a seat");
        let away = seat.leave().unwrap();
        assert!(seat.vacate().is_none());
        assert!(seat.take(&open, away).is_some(), "it goes on by itself");
        let begins = rider(State::Begins(Box::pin(std::future::pending())));
        assert!(seat.take(&open, begins).is_none(), "its caller still waits for its first call");
    }
}
