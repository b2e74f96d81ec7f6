//! What all connections of a handle have in common.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_core::spi::within;
use simba_core::{Clock, Result};

use crate::config::{Pooler, PostgresConfig};
use crate::error::unavailable;
use crate::statements::{MAX_WAIT, Statements};

/// The configuration of a handle, and what it knows about a pooler.
pub(crate) struct Settings {
    pub(crate) config: PostgresConfig,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) statements: Statements,
    pooling: Mutex<Pooling>,
}

/// How server processes are assigned to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pooling {
    /// Not known yet: no session state is used.
    Unknown,
    /// One server process for the whole connection.
    Session,
    /// A server process per transaction.
    Transaction,
}

impl Settings {
    pub(crate) fn new(config: PostgresConfig, clock: Arc<dyn Clock>) -> Self {
        let pooling = match config.pooler {
            Pooler::Auto => Pooling::Unknown,
            Pooler::Yes => Pooling::Transaction,
            Pooler::No => Pooling::Session,
        };
        let statements = Statements::new(&config.tables);
        Self { config, clock, statements, pooling: Mutex::new(pooling) }
    }

    pub(crate) fn pooling(&self) -> Pooling {
        *self.pooling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what it was before.
    pub(crate) fn set_pooling(&self, pooling: Pooling) -> Pooling {
        std::mem::replace(&mut *self.pooling.lock().unwrap_or_else(PoisonError::into_inner), pooling)
    }

    /// Limits a call to the statement timeout plus one second.
    pub(crate) async fn with_timeout<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let limit = self.config.call_timeout();
        let answer = within(&*self.clock, limit, call).await;
        answer.unwrap_or_else(|| Err(unavailable(format!("the server did not answer within {limit:?}"))))
    }
}

/// Returns the statement that configures a session, whatever the server, the database or the role set. Settings that
/// the server does not know are left out.
///
/// A plan is made once per connection, when the tables may still be empty, so every plan must use an index. Keepalives
/// and timeouts end the transaction of a vanished client, which otherwise keeps a row locked for hours.
pub(crate) fn session_settings(config: &PostgresConfig) -> String {
    let millis = |time: Duration| time.as_millis().max(1).to_string();
    let own = [
        ("lock_timeout", &*millis(MAX_WAIT)),
        ("statement_timeout", &millis(config.statement_timeout)),
        ("transaction_timeout", &millis(config.statement_timeout * 2)),
    ];
    let fixed = [
        ("default_transaction_isolation", "read committed"),
        ("plan_cache_mode", "force_generic_plan"),
        ("jit", "off"),
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
        ("enable_sort", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
        ("tcp_keepalives_idle", "5"),
        ("tcp_keepalives_interval", "2"),
        ("tcp_keepalives_count", "3"),
        ("tcp_user_timeout", "10000"),
    ];
    let all = own.iter().chain(&fixed).map(|(name, value)| format!("('{name}', '{value}')"));
    let all = all.collect::<Vec<_>>().join(", ");
    // Set even if it is on, so that the session ignores later changes of the server's configuration.
    format!(
        "SELECT set_config(s.name, v.value, false) FROM (VALUES {all}) AS v (name, value) \
         JOIN pg_settings s ON s.name = v.name; \
         SELECT set_config('synchronous_commit', coalesce( \
             nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)"
    )
}
