//! Plugs the connection to a member into the supervision: which member is tried, and when a connection is given up.

use std::sync::Arc;
use std::time::Duration;

use simba_core::Error;
use simba_net::supervise::{Connector, Retry};
use tokio::runtime::Handle;

use super::Shared;
use super::connection::Connection;
use crate::error::unavailable;

/// The bounds of the limit for one attempt to connect.
const MAX_DIAL: Duration = Duration::from_secs(5);
const MIN_DIAL: Duration = Duration::from_millis(400);
/// How many times within the limit for an answer the time without one is checked.
const CHECKS_PER_LIMIT: u32 = 5;

/// Connects to the members of the cluster in a random order.
pub(super) struct Members {
    shared: Arc<Shared>,
    order: Vec<usize>,
    number: u64,
}

impl Members {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let mut order: Vec<usize> = (0..shared.config.endpoints.len()).collect();
        fastrand::shuffle(&mut order);
        Self { shared, order, number: 0 }
    }

    /// Keeps the client connected until it is closed.
    pub(super) async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        // The next attempt goes to another member, whether this one fails or its connection breaks later.
        let retry = Retry { first_pause: Duration::from_millis(10), rotate: true, ..Retry::default() };
        shared.supervised.run(&mut self, &*shared.clock, retry).await;
        shared.watches.disconnected();
    }
}

impl Connector for Members {
    type Connection = Connection;

    fn endpoints(&self) -> usize {
        self.order.len()
    }

    fn limit(&self) -> Duration {
        (self.shared.liveness.limit() * 2).clamp(MIN_DIAL, MAX_DIAL)
    }

    fn max_pause(&self) -> Duration {
        self.shared.liveness.limit()
    }

    fn timed_out(&self, endpoint: usize, limit: Duration) -> Error {
        let endpoint = &self.shared.config.endpoints[self.order[endpoint]];
        unavailable(format!("{endpoint} did not answer within {limit:?}"))
    }

    async fn connect(&mut self, endpoint: usize) -> Result<Connection, Error> {
        self.number += 1;
        let endpoint = &self.shared.config.endpoints[self.order[endpoint]];
        let (limit, token) = (self.limit(), self.shared.token.clone());
        Connection::open(&self.shared.config, endpoint, limit, &self.shared.clock, token, self.number).await
    }

    async fn serve(&mut self, connection: &Connection) -> Error {
        let _ends = connection.end_on_drop();
        self.shared.liveness.answered(self.shared.clock.now());
        self.shared.watches.connected(connection.number());
        let reason = tokio::select! {
            biased;
            () = connection.ended() => "the connection ended",
            () = until_silent(&self.shared, connection) => "the server did not answer",
        };
        self.shared.watches.disconnected();
        unavailable(reason)
    }
}

/// Completes when the server has not answered a request within the limit. Runs the deferred work of the watches
/// meanwhile.
///
/// The caller of the request may have been cancelled, and receives no answer then. So the server is sent a read after
/// half the limit. It is also sent one after twice the limit without any answer if there are watches: a half-open
/// connection reports no error either.
async fn until_silent(shared: &Arc<Shared>, connection: &Connection) {
    let clock = &*shared.clock;
    loop {
        let limit = shared.liveness.limit();
        let due = clock.now() + limit / CHECKS_PER_LIMIT;
        clock.sleep_until(due).await;
        // While this process was paused, answers may have arrived that it has not read yet.
        shared.liveness.exclude(clock.now().saturating_since(due));
        let silence = shared.liveness.unanswered_for(clock.now());
        if silence >= limit {
            return;
        }
        let idle = shared.liveness.idle_for(clock.now()) >= 2 * limit && shared.watches.has_watches();
        if silence >= limit / 2 || (idle && silence.is_zero()) {
            shared.liveness.sent(clock.now());
            Handle::current().spawn(probe(Arc::clone(shared), connection.clone()));
        }
        if let Some(stream) = shared.watches.run_deferred() {
            shared.read_watches(&Handle::current(), stream);
        }
    }
}

/// Sends a read that needs a quorum.
async fn probe(shared: Arc<Shared>, connection: Connection) {
    let token = connection.token();
    match connection.check_quorum(&shared.config).await {
        Ok(()) => shared.liveness.answered(shared.clock.now()),
        Err(failure) if failure.is_logged_out() => shared.log_in_again(connection, token).await,
        Err(_) => {}
    }
}
