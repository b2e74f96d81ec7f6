//! Keeps a session connected for as long as the store keeps it, and begins another one when it does not.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Clock, Error, ErrorKind, Moment};
use simba_net::Backoff;
use tokio::sync::mpsc;

use super::connection::{Life, Shake, Wire};
use super::early::{Behind, Early};
use super::failure::Failure;
use super::link::{Cargo, Desk, End, Flight, GATHERING, Link};
use super::work::Work;
use super::{Command, Shared};
use crate::config::ZookeeperConfig;

/// No try to connect waits longer, however long the session.
const MAX_SHAKE: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// What only a person can mend is not tried more often.
const PERMANENT_PAUSE: Duration = Duration::from_millis(500);

/// The one task of a session.
pub(super) struct Supervisor {
    config: Arc<ZookeeperConfig>,
    /// What is asked for, in milliseconds.
    wanted: u32,
    desk: Desk,
    life: Life,
    /// The server to try next, in an order of our own.
    next: usize,
    order: Vec<usize>,
    backoff: Backoff,
    /// When a server was heard last.
    heard: Moment,
    /// The shortest timeout that the session was granted. A server that it has left may still report it to the leader
    /// under the one that it granted.
    timeout: Duration,
    /// The longest pause between two tries, and how long a connection has to last to begin again with the shortest.
    longest: Duration,
}

impl Supervisor {
    pub(super) fn new(
        config: Arc<ZookeeperConfig>,
        wanted: u32,
        clock: Arc<dyn Clock>,
        shared: Arc<Shared>,
        inbox: mpsc::UnboundedReceiver<Command>,
    ) -> Self {
        let mut order: Vec<usize> = (0..config.places.len()).collect();
        fastrand::shuffle(&mut order);
        let timeout = Duration::from_millis(wanted.into());
        let heard = clock.now();
        let desk = Desk { work: Work::default(), inbox, shared, clock, closing: None, deserted: false };
        let longest = MAX_PAUSE.min(timeout / 6);
        let backoff = Backoff::new(FIRST_PAUSE.min(timeout / 20), longest);
        Self { config, wanted, desk, life: Life::default(), next: 0, order, backoff, heard, timeout, longest }
    }

    pub(super) async fn run(mut self) {
        while !self.desk.ends() {
            let Some((wire, flights)) = self.connect().await else { break };
            let began = self.desk.clock.now();
            let mut link = Link::new(wire, flights, self.life.session, self.timeout, began);
            self.desk.shared.connected(self.life.session, self.timeout);
            let end = link.run(&mut self.desk, &mut self.life).await;
            link.lost(&mut self.desk);
            self.heard = link.heard;
            match end {
                End::Broken(reason) => tracing::debug!(reason, "the connection broke"),
                End::Expired => self.expire(),
                End::Closed => break,
            }
            if self.desk.clock.now() - began >= self.longest {
                self.backoff.reset();
            } else {
                // A server that grants and then hangs up is not asked again at once.
                self.pause(None).await;
            }
        }
        self.desk.shared.expired();
        self.desk.work.fail(&Failure::Closed);
        if let Some(to) = self.desk.closing.take() {
            let _ = to.send(());
        }
    }

    /// Tries one server after the other until one of them grants the session; nothing if it is closed meanwhile.
    async fn connect(&mut self) -> Option<(Wire, VecDeque<Flight>)> {
        let mut failed = 0;
        // A new session has nothing to check, and credentials have to be there before anything is asked.
        let mut open = self.life.session != 0 && self.config.login.is_none();
        loop {
            let clock = &self.desk.clock;
            let (mut early, behind) = Early::new(open, GATHERING.min(self.timeout / 100), Arc::clone(clock));
            let shaken = tokio::select! {
                biased;
                shaken = shake(&self.config, &self.order, &mut self.next, &self.life, self.wanted, clock, behind) => shaken,
                // Also while the connection is on its way, the queue of those who wait for it grows.
                () = ended(&mut self.desk.inbox, &mut self.desk.work, &mut self.desk.closing, &mut early) => {
                    self.desk.deserted = true;
                    return None;
                }
            };
            let same =
                matches!(&shaken, Ok(Shake::Granted(_, granted)) if granted.session == self.life.session);
            let mut flights = early.end(same, &mut self.desk.work);
            // A server that closes with something unread may take its last word back: the next one is only asked.
            open = false;
            match shaken {
                Ok(Shake::Granted(wire, granted)) => {
                    self.life.session = granted.session;
                    self.life.password = granted.password;
                    let timeout = Duration::from_millis(u64::try_from(granted.timeout).unwrap_or(0));
                    if !same {
                        self.timeout = timeout;
                    } else if timeout < self.timeout {
                        self.timeout = timeout;
                        self.cut(wire.asked, &mut flights);
                    }
                    return Some((wire, flights));
                }
                Ok(Shake::Expired) if self.life.session == 0 => {
                    let error = Error::new(ErrorKind::Unavailable, "the server grants no new session");
                    failed = self.failed(failed + 1, error).await?;
                }
                Ok(Shake::Expired) => {
                    tracing::debug!("the session has expired");
                    self.expire();
                }
                Ok(Shake::Unheard(error)) => {
                    self.give_up_after(self.timeout / 3 * 2);
                    failed = self.failed(failed + 1, error).await?;
                }
                Err(error) => {
                    self.give_up_after(self.timeout * 3);
                    failed = self.failed(failed + 1, error).await?;
                }
            }
        }
    }

    /// Ends what older proofs show: the leader counts a shorter timeout now, from some moment after `asked`.
    ///
    /// No holder may wait for an answer before it hears of that, so whatever waits for one fails.
    fn cut(&mut self, asked: Moment, flights: &mut VecDeque<Flight>) {
        let timeout = self.timeout;
        tracing::warn!(
            ?timeout,
            "a server granted a shorter session than the one before: set equal bounds on all"
        );
        self.desk.shared.proofs.cut(asked + timeout);
        let error = Error::new(ErrorKind::Unavailable, "the session was granted for a shorter time");
        let failure = Failure::Unsent(error);
        for flight in flights {
            if let Cargo::Checks(checks) = std::mem::replace(&mut flight.what, Cargo::Unawaited) {
                checks.into_iter().for_each(|check| check.conclude(Err(failure.clone())));
            }
        }
        self.desk.fail(&failure);
    }

    /// Rests once every server has failed; gives the number of those that have. Nothing if it is closed meanwhile.
    async fn failed(&mut self, failed: usize, error: Error) -> Option<usize> {
        if failed < self.order.len() && error.is_transient() {
            return Some(failed);
        }
        self.rest(error).await;
        (!self.desk.ends()).then_some(0)
    }

    /// Fails what waits, since no server grants a session, and pauses.
    async fn rest(&mut self, error: Error) {
        tracing::debug!(%error, "no server grants a session");
        self.desk.shared.state.send_replace(Some(Err(error.clone())));
        self.desk.work.fail(&Failure::Unsent(error.clone()));
        self.pause(Some(&error).filter(|error| !error.is_transient())).await;
    }

    /// Takes requests until it is time for the next try. With an error that lasts, they fail by it at once.
    async fn pause(&mut self, lasting: Option<&Error>) {
        let pause = self.backoff.pause();
        let pause = if lasting.is_some() { pause.max(PERMANENT_PAUSE) } else { pause };
        let clock = Arc::clone(&self.desk.clock);
        let mut over = clock.sleep_until(clock.now() + pause);
        loop {
            tokio::select! {
                biased;
                () = &mut over => return,
                () = self.desk.receive() => {
                    if self.desk.ends() {
                        return;
                    }
                    if let Some(error) = lasting {
                        self.desk.work.fail(&Failure::Unsent(error.clone()));
                    }
                }
            }
        }
    }

    /// Ends a session here that no server has confirmed for so long.
    ///
    /// Where questions come through and answers do not, every try to connect keeps it alive at the store, for a
    /// client that cannot use it: from two thirds of its timeout on, when nothing is held any more, others are to have
    /// their turn. Where no server is reached at all, what we have seen of a store that was set up anew must not keep
    /// us out of it for ever.
    fn give_up_after(&mut self, silence: Duration) {
        if self.life.session != 0 && self.desk.clock.now() - self.heard >= silence {
            self.expire();
        }
    }

    fn expire(&mut self) {
        self.life = Life::default();
        self.desk.work.forget_the_dead();
        self.desk.shared.expired();
    }
}

async fn shake(
    config: &ZookeeperConfig,
    order: &[usize],
    next: &mut usize,
    life: &Life,
    wanted: u32,
    clock: &Arc<dyn Clock>,
    behind: Behind,
) -> Result<Shake, Error> {
    let place = &config.places[order[*next % order.len()]];
    // The next try, whether this one is a failure or breaks later, is at another server.
    *next += 1;
    let limit = (Duration::from_millis(wanted.into()) / 3).clamp(Duration::from_millis(50), MAX_SHAKE);
    Wire::open(config, place, life, wanted, limit, clock, behind).await
}

/// Collects what is asked for meanwhile, and sends what may go out early; ends when the session is to be closed.
async fn ended(
    inbox: &mut mpsc::UnboundedReceiver<Command>,
    work: &mut Work,
    closing: &mut Option<tokio::sync::oneshot::Sender<()>>,
    early: &mut Early,
) {
    loop {
        let command = tokio::select! {
            biased;
            command = inbox.recv() => command,
            () = early.gathered(work) => {
                early.send(work);
                continue;
            }
        };
        match command {
            None => return,
            Some(Command::Close(to)) => {
                *closing = Some(to);
                return;
            }
            Some(Command::Do(job)) => work.jobs.push_back(job),
            Some(Command::Both(one, other)) => work.jobs.extend([one, other]),
            Some(Command::Later(job)) => work.later.push(job),
            Some(Command::Check(check, _)) => {
                // It has waited long enough for others by the time that it can be sent.
                work.urgent = true;
                work.checks.push(check);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use simba_core::SystemClock;
    use tokio::sync::oneshot;

    use super::super::Urgency;
    use super::super::proof::Proof;
    use super::super::work::Check;
    use super::*;

    #[tokio::test]
    async fn no_check_waits_for_an_answer_when_the_session_gets_shorter() {
        let config = Arc::new(ZookeeperConfig::from_url(&"zookeeper://h".parse().unwrap()).unwrap());
        let shared = Arc::new(Shared::new(config.paths().root(), 30_000));
        let (commands, inbox) = mpsc::unbounded_channel();
        let clock = Arc::new(SystemClock);
        let mut supervisor = Supervisor::new(config, 30_000, clock, Arc::clone(&shared), inbox);
        shared.proofs.add(Proof { session: 7, until: Moment::ZERO + Duration::from_secs(20) });
        let check = || {
            let (to, outcome) = oneshot::channel();
            (Check { path: "/simba/m/n".into(), to }, outcome)
        };
        // One was sent behind the question for the session, one waits to be sent, one was not taken yet.
        let [(sent, one), (waiting, two), (new, three)] = [check(), check(), check()];
        let what = Cargo::Checks(vec![sent]);
        let mut flights = VecDeque::from([Flight { xid: 17, sent: Moment::ZERO, what }]);
        supervisor.desk.work.checks.push(waiting);
        assert!(commands.send(Command::Check(new, Urgency::Renewal)).is_ok());
        supervisor.timeout = Duration::from_secs(4);
        supervisor.cut(Moment::ZERO + Duration::from_secs(1), &mut flights);
        for mut outcome in [one, two, three] {
            assert!(matches!(outcome.try_recv(), Ok(Err(Failure::Unsent(_)))), "{outcome:?}");
        }
        assert!(matches!(flights[0].what, Cargo::Unawaited), "its answer is still to come");
        assert_eq!((shared.proofs.cuts(), shared.proofs.left(7, Moment::ZERO)), (1, Duration::from_secs(5)));
    }
}
