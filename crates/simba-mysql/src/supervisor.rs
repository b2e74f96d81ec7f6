//! The connections for calls: a fixed number, each used by one call at a time, pinged while they are idle.
//!
//! A connection that breaks is replaced by the next call that needs it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::Result;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::JoinSet;

use crate::connection::Connection;
use crate::error::closed;
use crate::shared::Shared;
use crate::statements::FOR_CALLS;

/// The time between two checks for idle connections.
const TICK: Duration = Duration::from_secs(1);
/// The minimum idle time after which a connection is pinged, however short the lease.
const MIN_IDLE: Duration = Duration::from_millis(200);
const PING_TIMEOUT: Duration = Duration::from_secs(1);

/// The connections of one handle for calls.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    idle: Mutex<Vec<Connection>>,
    /// Has a permit for each idle connection.
    permits: Semaphore,
}

/// A connection in use. Dropping it puts it back.
pub(crate) struct Pooled<'a> {
    pool: &'a Pool,
    pub(crate) connection: Connection,
    _permit: SemaphorePermit<'a>,
}

impl Pool {
    /// Opens all connections, so that wrong settings are noticed early.
    ///
    /// # Errors
    ///
    /// Why a connection could not be made.
    pub(crate) async fn connect(shared: &Arc<Shared>) -> Result<Self> {
        let (mut connecting, mut idle) = (JoinSet::new(), Vec::new());
        for _ in 0..shared.config.connections {
            let mut connection = Connection::new(Arc::clone(shared), FOR_CALLS);
            connecting.spawn(async move { connection.ready().await.map(|()| connection) });
        }
        while let Some(connected) = connecting.join_next().await {
            idle.push(connected.unwrap_or_else(|_| Err(closed()))?);
        }
        let permits = Semaphore::new(idle.len());
        Ok(Self { shared: Arc::clone(shared), idle: Mutex::new(idle), permits })
    }

    /// Waits for an idle connection. Prefers one that is connected.
    ///
    /// # Errors
    ///
    /// The handle was closed.
    pub(crate) async fn get(&self) -> Result<Pooled<'_>> {
        let permit = self.permits.acquire().await.map_err(|_| closed())?;
        let connected = |idle: &[Connection]| idle.iter().rposition(Connection::is_connected);
        self.take(permit, |idle| connected(idle).or(idle.len().checked_sub(1))).ok_or_else(closed)
    }

    /// Returns whether every connection is in use.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.permits.available_permits() == 0
    }

    /// Takes the idle connection that `choose` returns the position of.
    fn take<'a>(
        &'a self,
        permit: SemaphorePermit<'a>,
        choose: impl Fn(&[Connection]) -> Option<usize>,
    ) -> Option<Pooled<'a>> {
        let mut idle = self.idle();
        let connection = choose(&idle).map(|at| idle.remove(at))?;
        Some(Pooled { pool: self, connection, _permit: permit })
    }

    /// Pings idle connections until the task is aborted: after a third of the shortest ttl in use, so that a broken
    /// connection is replaced before the next renewal needs it.
    pub(crate) async fn keep_alive(&self) {
        let Shared { clock, .. } = &*self.shared;
        loop {
            clock.sleep_until(clock.now() + TICK).await;
            let (now, interval) = (clock.now(), self.shared.limits.shortest().max(MIN_IDLE));
            let is_due = |connection: &Connection| connection.is_idle_for(now, interval);
            while let Ok(permit) = self.permits.try_acquire()
                && let Some(mut pooled) = self.take(permit, |idle| idle.iter().rposition(is_due))
            {
                pooled.connection.ping(PING_TIMEOUT).await;
            }
        }
    }

    /// Closes the idle connections now, the others at the end of their statements. Every later call fails.
    pub(crate) fn close(&self) {
        self.permits.close();
        self.idle().clear();
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pooled<'_> {
    fn drop(&mut self) {
        let unconnected = Connection::new(Arc::clone(&self.pool.shared), FOR_CALLS);
        let connection = std::mem::replace(&mut self.connection, unconnected);
        if !self.pool.permits.is_closed() {
            self.pool.idle().push(connection);
        }
    }
}
