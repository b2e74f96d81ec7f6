//! Keeps the calls for a row that stays locked off the one connection that all mutexes share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Clock, Moment, MutexName, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{closed, locked};

/// How many calls for one mutex are on their way at once: more would all wait for the same row.
const ABREAST: usize = 2;
/// For how many times the wait that a locked row cost nobody asks for it again.
const REST: u32 = 10;

/// Lets a few calls for each mutex through, and for a while none for one whose row another transaction keeps
/// locked.
///
/// A call for such a row holds everything up for as long as the server waits for the lock. So a stuck
/// transaction costs its own mutex, and all others a short delay now and then.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    lanes: Mutex<HashMap<MutexName, Lane>>,
}

#[derive(Debug)]
struct Lane {
    room: Arc<Semaphore>,
    users: usize,
    shut_until: Moment,
}

/// A call on its way.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
    mutex: &'a MutexName,
    permit: Option<OwnedSemaphorePermit>,
}

impl Gate {
    /// Waits for a place in the lane of a mutex.
    ///
    /// # Errors
    ///
    /// Its row is locked.
    pub(crate) async fn pass<'a>(&'a self, mutex: &'a MutexName, clock: &dyn Clock) -> Result<Pass<'a>> {
        let (mut pass, room) = self.enter(mutex, clock.now())?;
        pass.permit = Some(room.acquire_owned().await.map_err(|_| closed())?);
        // Whoever went before may have found it locked.
        self.admit(mutex, clock.now())?;
        Ok(pass)
    }

    fn enter<'a>(&'a self, mutex: &'a MutexName, now: Moment) -> Result<(Pass<'a>, Arc<Semaphore>)> {
        let mut lanes = self.lanes();
        let lane = match lanes.get_mut(mutex) {
            Some(lane) => lane,
            None => lanes.entry(mutex.clone()).or_insert_with(Lane::new),
        };
        if lane.shut_until > now {
            return Err(locked());
        }
        lane.shut_until = Moment::ZERO;
        lane.users += 1;
        Ok((Pass { gate: self, mutex, permit: None }, Arc::clone(&lane.room)))
    }

    /// Refuses a call for a mutex whose row stays locked.
    pub(crate) fn admit(&self, mutex: &MutexName, now: Moment) -> Result<()> {
        let shut = self.lanes().get(mutex).is_some_and(|lane| lane.shut_until > now);
        if shut { Err(locked()) } else { Ok(()) }
    }

    fn lanes(&self) -> MutexGuard<'_, HashMap<MutexName, Lane>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane {
    fn new() -> Self {
        Self { room: Arc::new(Semaphore::new(ABREAST)), users: 0, shut_until: Moment::ZERO }
    }
}

impl Pass<'_> {
    /// The call waited in vain for `waited`.
    pub(crate) fn shut(&self, now: Moment, waited: Duration) {
        if let Some(lane) = self.gate.lanes().get_mut(self.mutex) {
            lane.shut_until = now + waited * REST;
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut lanes = self.gate.lanes();
        let Some(lane) = lanes.get_mut(self.mutex) else { return };
        lane.users -= 1;
        if lane.users == 0 && lane.shut_until == Moment::ZERO {
            lanes.remove(self.mutex);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use simba_core::TokioClock;

    use super::*;

    const WAIT: Duration = Duration::from_millis(100);

    fn names() -> [MutexName; 2] {
        ["stuck", "other"].map(|name| MutexName::new(name).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_locked_row_is_left_alone_for_a_while_and_no_other_is() {
        let (gate, clock, [stuck, other]) = (Gate::default(), TokioClock::new(), names());
        gate.pass(&stuck, &clock).await.unwrap().shut(clock.now(), WAIT);
        assert!(gate.pass(&stuck, &clock).await.is_err() && gate.admit(&stuck, clock.now()).is_err());
        assert!(gate.pass(&other, &clock).await.is_ok());
        tokio::time::advance(WAIT * REST).await;
        assert!(gate.pass(&stuck, &clock).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_go_abreast_and_those_behind_learn_what_these_found() {
        let (gate, clock, [stuck, _]) = (Gate::default(), TokioClock::new(), names());
        let one = gate.pass(&stuck, &clock).await.unwrap();
        let _two = gate.pass(&stuck, &clock).await.unwrap();
        let mut third = Box::pin(gate.pass(&stuck, &clock));
        assert!(third.as_mut().now_or_never().is_none(), "it waits");
        one.shut(clock.now(), WAIT);
        drop(one);
        assert!(third.await.is_err(), "it is not sent");
    }

    #[tokio::test]
    async fn a_lane_goes_with_its_last_call() {
        let (gate, clock, [mutex, _]) = (Gate::default(), TokioClock::new(), names());
        drop((gate.pass(&mutex, &clock).await.unwrap(), gate.pass(&mutex, &clock).await.unwrap()));
        assert!(gate.lanes().is_empty());
    }
}
