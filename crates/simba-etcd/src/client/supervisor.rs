//! Keeps the client connected, to whichever member is of use.

use std::sync::Arc;
use std::time::Duration;

use simba_core::{Clock, Error, within};
use simba_net::Backoff;
use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;

use super::channel::{Driver, Line};
use super::{Shared, State};
use crate::config::EtcdConfig;
use crate::error::silent;

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// What only a person can mend is not tried more often.
const PERMANENT_PAUSE: Duration = Duration::from_millis(500);
/// No try to connect waits longer, nor gives up earlier.
const MAX_DIAL: Duration = Duration::from_secs(5);
const MIN_DIAL: Duration = Duration::from_millis(400);
/// A connection that lasts for so long was a good one.
const GOOD: Duration = Duration::from_millis(100);
/// How often it is looked whether the server is silent: so often within the time that it may be.
const LOOKS: u32 = 5;

/// The one task that connects.
pub(super) struct Supervisor {
    config: Arc<EtcdConfig>,
    shared: Arc<Shared>,
    /// The member to try next, in an order of our own.
    next: usize,
    order: Vec<usize>,
    number: u64,
    backoff: Backoff,
}

impl Supervisor {
    pub(super) fn new(config: Arc<EtcdConfig>, shared: Arc<Shared>) -> Self {
        let mut order: Vec<usize> = (0..config.places.len()).collect();
        fastrand::shuffle(&mut order);
        let backoff = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
        Self { config, shared, next: 0, order, number: 0, backoff }
    }

    pub(super) async fn run(mut self) {
        let mut state = self.shared.state.subscribe();
        let closed = state.wait_for(|state| matches!(state, State::Closed));
        tokio::select! {
            biased;
            _ = closed => {}
            () = self.connect_for_ever() => {}
        }
        self.shared.watches.disconnected();
    }

    async fn connect_for_ever(&mut self) {
        loop {
            match self.round().await {
                Ok((line, driver)) => {
                    let clock = Arc::clone(&self.shared.clock);
                    let begun = clock.now();
                    self.attend(line, driver).await;
                    self.shared.watches.disconnected();
                    if clock.now() - begun >= GOOD {
                        self.backoff.reset();
                    } else {
                        // Whatever ends connections that were just made is not to be met without a pause.
                        clock.sleep_until(clock.now() + self.backoff.pause()).await;
                    }
                }
                Err(error) => self.rest(error).await,
            }
        }
    }

    /// Tries one member after the other until one is of use.
    async fn round(&mut self) -> Result<(Line, Driver), Error> {
        let mut left = self.order.len();
        loop {
            let tried = self.dial().await;
            left -= 1;
            match tried {
                Err(error) if left > 0 && error.is_transient() => tracing::debug!(%error, "the next member"),
                tried => return tried,
            }
        }
    }

    async fn dial(&mut self) -> Result<(Line, Driver), Error> {
        let place = &self.config.places[self.order[self.next % self.order.len()]];
        // The next try, whether this one is a failure or breaks later, is at another member.
        self.next += 1;
        let limit = (self.shared.pulse.limit() * 2).clamp(MIN_DIAL, MAX_DIAL);
        let clock = &self.shared.clock;
        let opening = Line::open(&self.config, place, limit, clock, self.shared.token.clone());
        let opened = within(&**clock, limit, opening).await;
        opened.unwrap_or_else(|| Err(silent(place, limit)))
    }

    /// No member is of use: tells everybody who waits, and waits a little.
    async fn rest(&mut self, error: Error) {
        tracing::debug!(%error, "no member lets us in");
        let pause = self.backoff.pause().min(self.shared.pulse.limit());
        let pause = if error.is_transient() { pause } else { pause.max(PERMANENT_PAUSE) };
        self.change(State::Failed(error));
        let clock = &self.shared.clock;
        clock.sleep_until(clock.now() + pause).await;
        self.change(State::Connecting);
    }

    /// Drives a connection until it breaks, or the server is silent for too long.
    async fn attend(&mut self, line: Line, driver: Driver) {
        self.number += 1;
        self.shared.pulse.heard(self.shared.clock.now());
        self.change(State::Ready { number: self.number, line: line.clone() });
        // After there is something to send by: what is watched from here on asks the server.
        self.shared.watches.connected(self.number);
        let mut state = self.shared.state.subscribe();
        // In a task of its own: what it has to do waits for nobody.
        let mut driver = AbortOnDropHandle::new(Handle::current().spawn(driver));
        let broken = async {
            // The sender is ours.
            let _ = state.wait_for(|state| !matches!(state, State::Ready { .. })).await;
        };
        tokio::select! {
            _ = &mut driver => tracing::debug!("the connection ended"),
            () = broken => {}
            () = silence(&self.config, &self.shared, self.number, &line) => tracing::debug!("the server is silent"),
        }
        self.change(State::Connecting);
    }

    /// Whoever closed it has the last word.
    fn change(&self, to: State) {
        self.shared.state.send_if_modified(|state| {
            let open = !matches!(state, State::Closed);
            if open {
                *state = to;
            }
            open
        });
    }
}

/// Completes when the server has left a question unanswered for too long; meanwhile does what had time.
///
/// Whoever asked may have lost interest, and hears no answer then: before it is too long, the server is asked again.
/// It is asked now and then, too, if somebody only waits to be told: a connection that is half open says nothing either.
async fn silence(config: &EtcdConfig, shared: &Arc<Shared>, number: u64, line: &Line) {
    let clock: &dyn Clock = &*shared.clock;
    loop {
        let limit = shared.pulse.limit();
        let due = clock.now() + limit / LOOKS;
        clock.sleep_until(due).await;
        // While this process stood still, answers may have come that it has not read yet.
        shared.pulse.leave_out(clock.now().saturating_since(due));
        let silence = shared.pulse.silence(clock.now());
        if silence >= limit {
            return;
        }
        let quiet = shared.pulse.quiet(clock.now()) >= 2 * limit && shared.watches.anybody();
        if silence >= limit / 2 || (quiet && silence.is_zero()) {
            shared.pulse.asked(clock.now());
            let (shared, line, look) = (Arc::clone(shared), line.clone(), Line::look(config));
            Handle::current().spawn(async move {
                let token = line.token();
                match line.look_at(look).await {
                    Ok(()) => shared.pulse.heard(shared.clock.now()),
                    Err(failure) if failure.is_logged_out() => shared.log_in_again(number, line, token).await,
                    Err(_) => {}
                }
            });
        }
        if let Some(opened) = shared.watches.hurry() {
            shared.listen(&Handle::current(), opened);
        }
    }
}
