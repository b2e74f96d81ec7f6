//! How sessions learn of changes: the names of a handle in the tables, and the notifications that arrive for them.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_core::spi::{Claim, Intent, Subscription, Wakeups, within};
use simba_core::{Error, MutexName, Result};
use simba_net::supervise::{State, Supervised};
use tokio::sync::{Notify, watch};

use crate::error::unavailable;
use crate::listener::Listener;
use crate::settings::{Pooling, Settings};
use crate::statements::{LIVE_PREFIX, NO_CHANNEL};

/// When a waiter polls a free mutex that is promised to another waiter, in milliseconds: random, so that handles do not
/// poll at the same time, and less than a second.
const RECHECK: std::ops::Range<u64> = 400..800;

/// Whether notifications arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Push {
    /// Not subscribed at the moment.
    Down,
    /// Subscribed.
    Up,
    /// Not available behind this pooler, or after the handle was closed.
    Off,
}

/// The names of a handle and its sessions in the tables, and the wakeups that arrive for them.
pub(crate) struct Notifications {
    settings: Arc<Settings>,
    /// The channel of this handle alone.
    pub(crate) channel: String,
    /// The channel of this handle for waiters whose liveness is an advisory lock.
    pub(crate) live_channel: String,
    next_session: AtomicU64,
    pub(crate) listener: Supervised<Listener>,
    /// Requests the subscription.
    pub(crate) subscribe_wanted: Notify,
    /// The last notification to this handle itself that arrived.
    pub(crate) echo: watch::Sender<u64>,
    /// Wakeups for single waiters, by the number of their session.
    pub(crate) turns: Wakeups<u64>,
    /// Wakeups for the watchers of a mutex, after a change of owner.
    pub(crate) owners: Wakeups<MutexName>,
    /// Sessions that have to poll within a second: their mutex is free and promised to another waiter.
    rechecks: Mutex<HashSet<u64>>,
    recheck_wanted: Notify,
}

impl Notifications {
    pub(crate) fn new(settings: Arc<Settings>) -> Self {
        // From the system: processes that start at the same moment must not get the same one, since a session is known
        // by it in the tables.
        let random = || getrandom::u64().unwrap_or_else(|_| fastrand::u64(..));
        let nonce = format!("{:016x}{:04x}", random(), random() & 0xffff);
        Self {
            settings,
            channel: format!("simba_{nonce}"),
            live_channel: format!("{LIVE_PREFIX}{nonce}"),
            next_session: AtomicU64::new(0),
            listener: Supervised::new(),
            subscribe_wanted: Notify::new(),
            echo: watch::Sender::new(0),
            turns: Wakeups::local(),
            owners: Wakeups::new(),
            rechecks: Mutex::default(),
            recheck_wanted: Notify::new(),
        }
    }

    /// Returns a session number that is unique within this handle.
    pub(crate) fn number(&self) -> u64 {
        self.next_session.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the globally unique name of a session in the tables.
    pub(crate) fn session(&self, number: u64) -> String {
        format!("{}-{number:x}", self.channel)
    }

    /// Returns the number of a session of this handle.
    fn number_of(&self, session: &str) -> Option<u64> {
        let number = session.strip_prefix(&*self.channel)?.strip_prefix('-')?;
        u64::from_str_radix(number, 16).ok()
    }

    /// Returns whether notifications arrive.
    pub(crate) fn push(&self) -> Push {
        match self.listener.current() {
            _ if self.settings.pooling() == Pooling::Transaction => Push::Off,
            Some(Listener(Some(_))) => Push::Up,
            _ => Push::Down,
        }
    }

    /// Waits until this handle is subscribed, or cannot subscribe.
    pub(crate) async fn settled(&self) -> Push {
        let mut states = self.listener.states();
        loop {
            let is_closed = matches!(*states.borrow_and_update(), State::Closed);
            match self.push() {
                Push::Down if is_closed => return Push::Off,
                Push::Down => {}
                settled => return settled,
            }
            if states.changed().await.is_err() {
                return Push::Off;
            }
        }
    }

    /// Subscribes if necessary, and waits for that for at most `limit`, and at most a second. Returns false if the
    /// subscription is still pending.
    pub(crate) async fn wait_subscribed(&self, limit: Duration) -> bool {
        if self.push() != Push::Down {
            return true;
        }
        self.subscribe_wanted.notify_one();
        within(&*self.settings.clock, limit.min(Duration::from_secs(1)), self.settled()).await.is_some()
    }

    /// Returns the channel for a waiter's entry. It also says whether an advisory lock shows that the waiter is alive,
    /// which holds while this handle is subscribed. The first poll after the subscription updates older entries.
    pub(crate) fn entry_channel(&self) -> &str {
        match self.push() {
            Push::Off => NO_CHANNEL,
            Push::Down => &self.channel,
            Push::Up => &self.live_channel,
        }
    }

    /// Makes a waiter poll within a second.
    pub(crate) fn recheck(&self, number: u64) {
        if self.push() == Push::Up {
            self.rechecks.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
            self.recheck_wanted.notify_one();
        }
    }

    /// Wakes the waiters that have to poll, as long as this is polled. Never completes.
    pub(crate) async fn run_rechecks(&self) -> Error {
        loop {
            self.recheck_wanted.notified().await;
            let pause = Duration::from_millis(fastrand::u64(RECHECK));
            self.settings.clock.sleep_until(self.settings.clock.now() + pause).await;
            let numbers = std::mem::take(&mut *self.rechecks.lock().unwrap_or_else(PoisonError::into_inner));
            for number in numbers {
                self.turns.notify(&number);
            }
        }
    }

    /// Handles a notification. Any session of the database may notify this channel.
    pub(crate) fn on_notification(&self, payload: &str) {
        let Some((kind, text)) = payload.split_once(' ') else { return };
        match kind {
            "turn" => drop(self.number_of(text).map(|number| self.turns.notify(&number))),
            "next" => drop(self.number_of(text).map(|number| self.recheck(number))),
            "owner" => drop(MutexName::legacy(text).map(|mutex| self.owners.notify(&mutex))),
            "echo" => drop(text.parse().map(|number| self.echo.send_replace(number))),
            _ => {}
        }
    }

    /// Turns wakeups off, and logs a warning if they were on.
    pub(crate) fn disable(&self) {
        if self.settings.set_pooling(Pooling::Transaction) != Pooling::Transaction {
            tracing::warn!(
                backend = crate::NAME,
                "a transaction pooler is in front of the server: no wakeup arrives, waiters poll; connect to the \
                 server itself, or to a pool in session mode"
            );
        }
    }
}

/// Returns the error of a session that cannot be notified.
pub(crate) fn no_wakeups() -> Error {
    unavailable("behind a transaction pooler no wakeup arrives: waiters poll")
}

/// The wakeups of one session.
pub(crate) struct SessionWakeups {
    topic: Topic,
    /// Whether the first wakeup was delivered, which reports the subscription itself.
    announced: bool,
}

enum Topic {
    /// The waiter's turn.
    Turn(Subscription<u64>),
    /// A change of owner.
    Owner(Subscription<MutexName>),
}

impl SessionWakeups {
    /// Subscribes the session with this number.
    pub(crate) fn new(notifications: &Notifications, number: u64, claim: &Claim) -> Self {
        notifications.subscribe_wanted.notify_one();
        let topic = match claim.intent {
            Intent::Queue => Topic::Turn(notifications.turns.subscribe(number)),
            _ => Topic::Owner(notifications.owners.subscribe(claim.mutex.clone())),
        };
        Self { topic, announced: false }
    }

    /// Waits for a wakeup. The first one reports that the session is subscribed.
    ///
    /// # Errors
    ///
    /// No wakeup arrives.
    pub(crate) async fn notified(&mut self, notifications: &Notifications) -> Result<()> {
        match &mut self.topic {
            _ if !self.announced => {
                if notifications.settled().await != Push::Up {
                    return Err(no_wakeups());
                }
                // The next poll finds what happened before the subscription.
                self.announced = true;
            }
            Topic::Turn(turn) => turn.notified().await,
            Topic::Owner(owner) => owner.notified().await,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes that start at the same moment can seed a generator with the same number.
    #[test]
    fn handles_have_different_names_whatever_a_generator_was_seeded_with() {
        let config = crate::PostgresConfig::from_url(&"postgres://app@h/db".parse().unwrap()).unwrap();
        let settings = Arc::new(Settings::new(config, Arc::new(simba_core::SystemClock)));
        let names = [(); 2].map(|()| {
            fastrand::seed(7);
            Notifications::new(Arc::clone(&settings)).session(0)
        });
        assert_ne!(names[0], names[1]);
    }
}
