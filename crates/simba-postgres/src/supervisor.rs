//! The supervisor task of a handle: keeps its connections open, sends its batches, runs its background tasks.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::stream::{self, StreamExt};
use simba_core::spi::within;
use simba_core::{Error, MutexName, Result};
use simba_net::supervise::{Connector, Retry, ping_until_silent};
use simba_net::{Backoff, ClockReading, ServerClock};
use tokio::sync::{Semaphore, mpsc};

use crate::backend::{CLOSE_TIMEOUT, Shared};
use crate::config::Pooler;
use crate::connection::{Connection, READ_ONLY};
use crate::error::{closed, locked, lost, protocol, read_only, unavailable};
use crate::listener;
use crate::settings::Pooling;
use crate::statements::{Query, get};

/// Returns how attempts to connect are spaced.
pub(crate) fn retry() -> Retry {
    Retry { max_pause: Duration::from_secs(2), ..Retry::default() }
}

/// Runs until the handle is closed and its background tasks are done.
pub(crate) async fn run(shared: Arc<Shared>, tasks: mpsc::UnboundedReceiver<Task>) {
    let clock = &*shared.settings.clock;
    let mut commands =
        Commands { shared: Arc::clone(&shared), endpoint: 0, server_clock: ServerClock::default() };
    let too_late = async {
        shared.closing().await;
        clock.sleep_until(clock.now() + CLOSE_TIMEOUT).await;
    };
    tokio::select! {
        biased;
        () = run_tasks(&shared, tasks) => {}
        () = too_late => {}
        () = shared.commands.run(&mut commands, clock, retry()) => {}
        () = listener::run(&shared) => {}
        () = shared.takes.run(&*shared) => {}
        () = shared.releases.run(&*shared) => {}
    }
    shared.commands.close();
    shared.notifications.listener.close();
    shared.takes.close(&closed());
    shared.releases.close(&closed());
}

/// Opens and runs the connection for commands.
struct Commands {
    shared: Arc<Shared>,
    /// The index of the endpoint that was last connected to.
    endpoint: usize,
    server_clock: ServerClock,
}

impl Connector for Commands {
    type Connection = Connection;

    fn endpoints(&self) -> usize {
        self.shared.settings.config.endpoints.len()
    }

    /// Longer than the limit of the attempt itself, whose error names the endpoint.
    fn limit(&self) -> Duration {
        self.shared.settings.config.connect_timeout * 2
    }

    /// Of several endpoints, a read-only one must fail no call while another one accepts writes. With one endpoint, calls
    /// are sent together with the check of the server: this saves leaders that have to renew a round trip.
    async fn connect(&mut self, endpoint: usize) -> Result<Connection> {
        let check = self.endpoints() > 1;
        Connection::open(&self.shared.settings, endpoint, check, None).await
    }

    async fn serve(&mut self, connection: &Connection) -> Error {
        let error = tokio::select! {
            biased;
            () = connection.ended() => lost(),
            error = self.serve_open(connection) => error,
        };
        connection.close().await;
        error
    }

    fn was_usable(&self, connection: &Connection) -> bool {
        connection.is_usable()
    }
}

impl Commands {
    async fn serve_open(&mut self, connection: &Connection) -> Error {
        let settings = &self.shared.settings;
        let checked = within(&*settings.clock, settings.config.connect_timeout, connection.check()).await;
        if let Err(error) = checked.unwrap_or_else(|| Err(unavailable("the server does not answer"))) {
            return error;
        }
        let other = std::mem::replace(&mut self.endpoint, connection.endpoint()) != connection.endpoint();
        self.record_pooling(connection, other);
        self.shared.start(Task::Sweep);
        tokio::select! {
            biased;
            error = self.keep_prepared(connection) => error,
            error = self.ping(connection) => error,
        }
    }

    /// Records what a new connection shows about a pooler.
    fn record_pooling(&self, connection: &Connection, other_endpoint: bool) {
        let settings = &self.shared.settings;
        if settings.config.pooler == Pooler::Auto && connection.is_direct() {
            settings.set_pooling(Pooling::Session);
        } else if settings.config.pooler == Pooler::Auto && other_endpoint {
            // The last test was about another server.
            settings.set_pooling(Pooling::Unknown);
        }
        if settings.pooling() == Pooling::Unknown {
            // Only a notification to this handle itself shows whether there is a pooler.
            self.shared.notifications.subscribe_wanted.notify_one();
        }
    }

    /// Prepares the statements as soon as that is possible. Never completes.
    async fn keep_prepared(&self, connection: &Connection) -> Error {
        loop {
            connection.prepare().await;
            self.shared.prepare_wanted.notified().await;
        }
    }

    /// Reads the server's clock at every ping. Completes when the server does not answer or accepts no writes any more.
    async fn ping(&self, connection: &Connection) -> Error {
        let settings = &self.shared.settings;
        let ping = format!("SELECT clock_timestamp(), {READ_ONLY}");
        let read = || async {
            let sent = settings.clock.now();
            let rows = connection.query(&ping, &[]).await?;
            let received = settings.clock.now();
            let row = rows.first().ok_or_else(|| protocol("the server returned no time"))?;
            if get(row, 1)? {
                let error = read_only(&settings.config.endpoints[connection.endpoint()]);
                tracing::warn!(backend = crate::NAME, %error, "reconnecting");
                return Err(error);
            }
            let server = get::<SystemTime>(row, 0)?.duration_since(UNIX_EPOCH).unwrap_or_default();
            if let Some(step) = self.server_clock.read(ClockReading { server, sent, received }) {
                // Leases end by that clock.
                tracing::warn!(
                    backend = crate::NAME,
                    direction = if step.0 > 0 { "forward" } else { "back" },
                    "the clock of the server was set: leases end too early or too late until each is renewed"
                );
            }
            Ok(())
        };
        match settings.with_timeout(read()).await {
            Ok(()) => {
                let (interval, limit) = (settings.config.ping, settings.config.call_timeout());
                ping_until_silent(&*settings.clock, interval, limit, read).await
            }
            Err(error) => error,
        }
    }
}

/// The pauses between the attempts of a background task, and their maximum number. A row can stay locked for long:
/// nothing can be released meanwhile, and the next waiter has to be notified after that. Whatever a failed task leaves
/// behind expires on its own.
const TASK_PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
const TASK_TRIES: u32 = 60;

/// Maximum number of statements of background tasks in flight: the connection is shared with renewals.
const MAX_CONCURRENT: usize = 4;

/// One background task.
pub(crate) enum Task {
    /// Deletes the queue entry of a dropped session.
    Leave { mutex: MutexName, session: Arc<str> },
    /// Notifies the next waiter and the watchers of a mutex, based on a fresh read of the queue.
    Wake(MutexName),
    /// Deletes the entries of crashed clients.
    Sweep,
}

/// Runs tasks as they arrive, until the handle is closed and no task is left. They are independent: a task whose row is
/// locked pauses between its attempts without delaying the others.
async fn run_tasks(shared: &Shared, mut tasks: mpsc::UnboundedReceiver<Task>) {
    let (mut closing, permits) = (pin!(shared.closing()), Semaphore::new(MAX_CONCURRENT));
    let queued = stream::poll_fn(|context| match tasks.poll_recv(context) {
        Poll::Pending => closing.as_mut().poll(context).map(|()| None),
        task @ Poll::Ready(_) => task,
    });
    queued.for_each_concurrent(None, |task| run_with_retries(shared, &permits, task)).await;
}

async fn run_with_retries(shared: &Shared, permits: &Semaphore, task: Task) {
    let (first, longest) = TASK_PAUSES;
    let (clock, mut backoff) = (&*shared.settings.clock, Backoff::new(first, longest));
    for _ in 0..TASK_TRIES {
        let done = {
            // The semaphore is never closed.
            let _permit = permits.acquire().await;
            run_task(shared, &task).await
        };
        match done {
            Ok(()) => return,
            Err(error) if error.is_transient() => tracing::debug!(%error, "background task is retried"),
            Err(error) => return tracing::debug!(%error, "background task failed"),
        }
        clock.sleep_until(clock.now() + backoff.pause()).await;
    }
}

async fn run_task(shared: &Shared, task: &Task) -> Result<()> {
    match task {
        Task::Leave { mutex, session } => match leave(shared, mutex, session).await? {
            Some(true) => wake(shared, mutex).await,
            Some(false) => Ok(()),
            None => Err(locked()),
        },
        Task::Wake(mutex) => wake(shared, mutex).await,
        Task::Sweep => shared.call(Query::Sweep, &[]).await.map(drop),
    }
}

/// Deletes a queue entry. Returns true if the mutex is free and may have a waiter. Returns `None` if the row is locked:
/// the entry is deleted then, but a concurrent release may have notified its session, so this has to be repeated.
pub(crate) async fn leave(shared: &Shared, mutex: &MutexName, session: &str) -> Result<Option<bool>> {
    let rows = shared.call(Query::Leave, &[&mutex.as_str(), &session]).await?;
    rows.first().map(|row| get(row, 0)).transpose()
}

/// Notifies the next waiter and the watchers, and marks the queues that are empty.
pub(crate) async fn wake(shared: &Shared, mutex: &MutexName) -> Result<()> {
    let rows = shared.call(Query::Wake, &[&mutex.as_str()]).await?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (waited, waiting): (i64, i64) = (get(row, 0)?, get(row, 1)?);
    let (watched, watching): (i64, i64) = (get(row, 2)?, get(row, 3)?);
    // A queue with an entry never has the number zero.
    let waited = if waiting == 0 { waited.max(0) } else { 0 };
    let watched = if watching == 0 { watched.max(0) } else { 0 };
    if waited > 0 || watched > 0 {
        shared.call(Query::MarkIdle, &[&mutex.as_str(), &waited, &watched]).await?;
    }
    Ok(())
}
