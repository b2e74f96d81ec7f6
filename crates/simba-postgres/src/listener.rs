//! The connection for wakeups: one channel per handle, subscribed when the first session has to wait.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::within;
use simba_core::{Error, MutexName, Result};
use simba_net::supervise::{self, Connector, State, ping_until_silent};
use tokio_postgres::types::Type;

use crate::backend::Shared;
use crate::config::Pooler;
use crate::connection::{Connection, Param};
use crate::error::{lost, unavailable};
use crate::login::OnNotify;
use crate::settings::{Pooling, session_settings};
use crate::statements::{LIVENESS, Query, get};
use crate::supervisor::retry;
use crate::wakeups::no_wakeups;

/// How long a notification to this handle itself may take, and how many are sent before a pooler is assumed.
const ECHO_TIMEOUT: Duration = Duration::from_secs(3);
const ECHO_TRIES: u32 = 2;
/// The pause before the next test for a pooler.
const POOLER_RETRY: Duration = Duration::from_secs(60);
/// How long a watcher's entry lasts, and how often it is renewed.
const WATCH_ENTRY: Duration = Duration::from_secs(60);
const REFRESH: Duration = Duration::from_secs(20);
/// The pause before mutexes that could not be watched are tried again.
const RETRY: Duration = Duration::from_millis(500);

/// The connection for wakeups, which is subscribed; `None` behind a transaction pooler, where nothing arrives.
#[derive(Clone)]
pub(crate) struct Listener(pub(crate) Option<Connection>);

impl supervise::Connection for Listener {
    fn is_open(&self) -> bool {
        self.0.as_ref().is_none_or(supervise::Connection::is_open)
    }
}

/// Returns the error of a connection to a server that the commands do not use.
fn moved() -> Error {
    unavailable("the commands use another server")
}

/// Keeps the subscription open from the first request on.
pub(crate) async fn run(shared: &Arc<Shared>) {
    if shared.settings.config.pooler == Pooler::Yes {
        return std::future::pending().await;
    }
    shared.notifications.subscribe_wanted.notified().await;
    let mut listening = Listening { shared: Arc::clone(shared) };
    shared.notifications.listener.run(&mut listening, &*shared.settings.clock, retry()).await;
}

/// Opens and runs the connection for wakeups.
struct Listening {
    shared: Arc<Shared>,
}

impl Connector for Listening {
    type Connection = Listener;

    fn limit(&self) -> Duration {
        let config = &self.shared.settings.config;
        config.connect_timeout * 2 + (config.call_timeout() + ECHO_TIMEOUT) * ECHO_TRIES
    }

    /// Connects to the server that the commands use, subscribes, and locks the key that marks this handle as alive.
    async fn connect(&mut self, _: usize) -> Result<Listener> {
        let (shared, notifications) = (&self.shared, &self.shared.notifications);
        let endpoint = shared.connection().await?.endpoint();
        let handler = Arc::clone(notifications);
        let on_notify: OnNotify = Arc::new(move |payload| handler.on_notification(payload));
        let connection = Connection::open(&shared.settings, endpoint, true, Some(on_notify)).await?;
        let listen = format!("LISTEN {}; LISTEN {}", notifications.channel, notifications.live_channel);
        if !connection.is_direct() && shared.settings.pooling() != Pooling::Session {
            connection.execute(&listen).await?;
            if !self.receives_echo(&connection).await? {
                notifications.disable();
                return Ok(Listener(None));
            }
        }
        // Not before the test: a pooler's server process would keep the lock. The lock is shared, since the server may
        // not have noticed the end of the previous connection. The settings let the server detect a dead host within
        // seconds.
        let settings = session_settings(&shared.settings.config);
        let lock =
            format!("SELECT pg_advisory_lock_shared({LIVENESS}, hashtext('{}'))", notifications.live_channel);
        connection.execute(&format!("{listen}; {settings}; {lock}")).await?;
        shared.settings.set_pooling(Pooling::Session);
        shared.prepare_wanted.notify_one();
        Ok(Listener(Some(connection)))
    }

    /// Passes notifications on and renews the watchers' entries until the connection ends.
    async fn serve(&mut self, listener: &Listener) -> Error {
        let (settings, notifications) = (&self.shared.settings, &self.shared.notifications);
        let Some(connection) = &listener.0 else {
            settings.clock.sleep_until(settings.clock.now() + POOLER_RETRY).await;
            return no_wakeups();
        };
        // Notifications before this point may be lost.
        notifications.turns.notify_all();
        let (interval, limit) = (settings.config.ping, settings.config.call_timeout());
        let ping = || connection.execute("SELECT 1");
        let error = tokio::select! {
            biased;
            () = connection.ended() => lost(),
            error = self.commands_moved(connection) => error,
            error = notifications.run_rechecks() => error,
            error = self.keep_watching() => error,
            error = ping_until_silent(&*settings.clock, interval, limit, ping) => error,
        };
        connection.close().await;
        // The advisory lock that marked the waiters as alive is gone, and others skip them. Each waiter changes its
        // entry to one that needs no lock, and keeps its place.
        notifications.turns.notify_all();
        error
    }
}

impl Listening {
    /// Returns whether a notification from the command connection arrives here. With a server process per transaction it
    /// does not: LISTEN ended with its transaction. Fails if the commands use another server, where nothing is shown.
    async fn receives_echo(&self, connection: &Connection) -> Result<bool> {
        let (shared, notifications) = (&self.shared, &self.shared.notifications);
        let number = fastrand::u64(1..);
        let mut received = notifications.echo.subscribe();
        let payload = format!("echo {number}");
        let params: [(Param<'_>, Type); 2] = [(&notifications.channel, Type::TEXT), (&payload, Type::TEXT)];
        for _ in 0..ECHO_TRIES {
            let commands = shared.connection().await?;
            if commands.endpoint() != connection.endpoint() {
                return Err(moved());
            }
            commands.query("SELECT pg_notify($1, $2)", &params).await?;
            // Send nothing on this connection meanwhile: a pooler could assign it the server process that listens.
            let echo = received.wait_for(|received| *received == number);
            if within(&*shared.settings.clock, ECHO_TIMEOUT, echo).await.is_some() {
                return Ok(true);
            }
        }
        // If both connections answer, the network did not lose the notification.
        connection.execute("SELECT 1").await?;
        Ok(false)
    }

    /// Waits until the commands use another server. Its notifications do not arrive here, and its queue does not see the
    /// advisory lock of this connection.
    async fn commands_moved(&self, connection: &Connection) -> Error {
        let mut states = self.shared.commands.states();
        let is_elsewhere = |state: &State<Connection>| matches!(state, State::Up(commands) if commands.endpoint() != connection.endpoint());
        // The sender is a field of the shared state.
        let _ = states.wait_for(is_elsewhere).await;
        moved()
    }

    /// Keeps the watchers' entries of all watched mutexes alive. Never completes.
    async fn keep_watching(&self) -> Error {
        let (clock, owners) = (&*self.shared.settings.clock, &self.shared.notifications.owners);
        let (mut missing, mut refresh_at) = (Vec::new(), clock.now());
        loop {
            if clock.now() >= refresh_at {
                (missing, refresh_at) = (owners.resubscribe(), clock.now() + REFRESH);
            }
            missing = self.watch(missing).await;
            let next = if missing.is_empty() { refresh_at } else { refresh_at.min(clock.now() + RETRY) };
            tokio::select! {
                biased;
                () = clock.sleep_until(next) => {}
                demand = owners.demand() => {
                    self.unwatch(&demand.unsubscribe).await;
                    missing.retain(|mutex| !demand.unsubscribe.contains(mutex));
                    missing.extend(demand.subscribe);
                }
            }
        }
    }

    /// Creates or renews the watchers' entries of these mutexes, and notifies the watchers, which read the owner again.
    /// Returns the mutexes that are not watched yet, since their rows are locked or the call failed.
    async fn watch(&self, mutexes: Vec<MutexName>) -> Vec<MutexName> {
        if mutexes.is_empty() {
            return mutexes;
        }
        let names: Vec<&str> = mutexes.iter().map(MutexName::as_str).collect();
        let (channel, entry) = (&self.shared.notifications.channel, WATCH_ENTRY.as_secs_f64());
        let rows = self.shared.call(Query::Watch, &[&names, channel, &entry]).await;
        let rows = rows.unwrap_or_else(|error| {
            tracing::debug!(%error, "mutexes are not watched yet");
            Vec::new()
        });
        let watched: HashSet<&str> = rows.iter().filter_map(|row| get(row, 0).ok()).collect();
        let (watched, missing): (Vec<_>, _) =
            mutexes.into_iter().partition(|mutex| watched.contains(mutex.as_str()));
        for mutex in &watched {
            self.shared.notifications.owners.notify(mutex);
        }
        missing
    }

    async fn unwatch(&self, mutexes: &[MutexName]) {
        if mutexes.is_empty() {
            return;
        }
        let names: Vec<&str> = mutexes.iter().map(MutexName::as_str).collect();
        let channel = &self.shared.notifications.channel;
        // If this fails, the entries expire.
        let _ = self.shared.call(Query::Unwatch, &[&names, channel]).await;
    }
}
