//! The persistent conditions, and how a connection watches them.

use std::time::Duration;

use fastrand::Rng;
use tokio::sync::watch;

/// The direction of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the client to the server.
    Request,
    /// From the server to the client.
    Reply,
}

/// The blocked directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stall {
    #[default]
    Neither,
    Requests,
    Replies,
    Both,
}

/// The delay of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Latency {
    pub(super) each: Duration,
    pub(super) jitter: Duration,
}

impl Latency {
    pub(super) fn draw(self, rng: &mut Rng) -> Duration {
        self.each.saturating_add(self.jitter.mul_f64(rng.f64()))
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Conditions {
    pub(super) stall: Stall,
    pub(super) latency: Option<Latency>,
    pub(super) refusing: bool,
    /// How often all connections were cut. A connection that saw a lower number was open before.
    pub(super) cuts: u64,
    pub(super) stopped: bool,
}

impl Conditions {
    pub(super) fn heal(&mut self) {
        *self = Self { cuts: self.cuts, stopped: self.stopped, ..Self::default() };
    }

    pub(super) fn flows(&self, direction: Direction) -> bool {
        match self.stall {
            Stall::Neither => true,
            Stall::Requests => direction == Direction::Reply,
            Stall::Replies => direction == Direction::Request,
            Stall::Both => false,
        }
    }
}

/// A receiver of the conditions, for one task.
#[derive(Clone, Debug)]
pub(super) struct Watcher(watch::Receiver<Conditions>);

impl Watcher {
    pub(super) fn new(conditions: &watch::Sender<Conditions>) -> Self {
        Self(conditions.subscribe())
    }

    pub(super) fn now(&self) -> Conditions {
        *self.0.borrow()
    }

    /// Waits until the conditions satisfy the predicate.
    pub(super) async fn until(&mut self, wanted: impl FnMut(&Conditions) -> bool + Send) {
        // Does not fail: the owner of this receiver shares the sender.
        let _ = self.0.wait_for(wanted).await;
    }

    /// Waits until data flows in this direction.
    pub(super) async fn flowing(&mut self, direction: Direction) {
        self.until(|conditions| conditions.flows(direction)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_adds_to_the_latency_and_follows_the_seed() {
        let latency = Latency { each: Duration::from_secs(1), jitter: Duration::from_secs(2) };
        let draw = |seed| {
            let mut rng = Rng::with_seed(seed);
            (0..100).map(|_| latency.draw(&mut rng)).collect::<Vec<_>>()
        };
        let drawn = draw(7);
        assert!(drawn.iter().all(|late| (1..3).contains(&late.as_secs())), "{drawn:?}");
        assert_eq!(drawn, draw(7));
        assert_ne!(drawn, draw(8));
    }

    #[test]
    fn maximum_latency_does_not_overflow() {
        let endless = Latency { each: Duration::MAX, jitter: Duration::MAX };
        assert_eq!(endless.draw(&mut Rng::with_seed(1)), Duration::MAX);
    }
}
