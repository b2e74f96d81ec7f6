//! The connection for commands: many calls on their way at once, answered in their order.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Statement};

use crate::config::PostgresConfig;
use crate::error::{Fault, Trouble};
use crate::handle::Nature;
use crate::line::Line;
use crate::statements::{Query, Statements};

/// A parameter of a statement.
pub(crate) type Param<'a> = &'a (dyn ToSql + Sync);

/// A connection for commands.
///
/// Statements go out at once; their answers count once the server is known to take writes.
///
/// Until it is known that one server process stays at its other end, nothing of a session is used on it: a
/// statement prepared there could be another client's of the same name.
///
/// Behind a pooler one statement is under way at a time, and a call that is dropped ends the connection. Behind
/// PgBouncer 1.18 the first statement of a new connection was once answered without a row. The likely cause is a client
/// that ended with several statements under way, whose remaining answers reached the next client.
#[derive(Debug)]
pub(crate) struct Wire {
    line: Line,
    prepared: OnceLock<Vec<Statement>>,
    /// What the handle knows of the other end.
    nature: Arc<AtomicU8>,
    turn: tokio::sync::Mutex<()>,
}

/// A statement behind a pooler; ends the connection if it is dropped before its answer has come.
struct UnderWay<'a> {
    line: &'a Line,
    answered: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.line.abort();
        }
    }
}

impl Wire {
    pub(crate) fn new(line: Line, nature: &Arc<AtomicU8>) -> Self {
        let turn = tokio::sync::Mutex::const_new(());
        Self { line, prepared: OnceLock::new(), nature: Arc::clone(nature), turn }
    }

    /// Waits for an answer; behind a pooler, first for those to all statements before it.
    async fn answer<T>(&self, statement: impl Future<Output = T>) -> T {
        if self.nature.load(Ordering::Acquire) != Nature::Pooled as u8 {
            return statement.await;
        }
        let _turn = self.turn.lock().await;
        let mut under_way = UnderWay { line: &self.line, answered: false };
        let answer = statement.await;
        under_way.answered = true;
        answer
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.line.is_direct()
    }

    pub(crate) fn is_prepared(&self) -> bool {
        self.prepared.get().is_some()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.line.client.is_closed()
    }

    /// Finds out whether the server is one to work with.
    ///
    /// # Errors
    ///
    /// It is not.
    pub(crate) async fn check(&self) -> simba_core::Result<()> {
        if self.line.is_checked() {
            return self.line.check().await;
        }
        self.answer(self.line.check()).await
    }

    /// Gives an answer once it counts. The server was looked at in the same breath, so there is nothing more to
    /// wait for.
    async fn vouched<T>(&self, answer: Result<T, Fault>) -> Result<T, Trouble> {
        self.check().await.map_err(Trouble::Refused)?;
        Ok(answer?)
    }

    /// Ends the connection; calls that are not answered yet fail.
    pub(crate) fn abort(&self) {
        self.line.abort();
    }

    /// Completes when the connection has ended.
    pub(crate) async fn ended(&self) {
        self.line.ended().await;
    }

    /// Sends a statement at once and waits for its rows.
    ///
    /// # Cancel safety
    ///
    /// What was sent is carried out. The driver gives its answer to nobody else.
    pub(crate) async fn rows(
        &self,
        statements: &Statements,
        query: Query,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, Trouble> {
        if let Some(statement) = self.prepared.get().and_then(|prepared| prepared.get(query as usize)) {
            return self.vouched(self.answer(self.line.client.query(statement, params)).await).await;
        }
        let typed: Vec<_> = params.iter().copied().zip(query.types().iter().cloned()).collect();
        let answer = self.answer(self.line.client.query_typed(statements.bounded(query), &typed)).await;
        self.vouched(answer).await
    }

    /// Sends a statement that notifies nobody, for a server whose queue of notifications is full.
    pub(crate) async fn silent_rows(
        &self,
        statements: &Statements,
        query: Query,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>, Trouble> {
        let typed: Vec<_> = params.iter().copied().zip(query.types().iter().cloned()).collect();
        self.text(statements.silent(query), &typed).await
    }

    /// The same for a text of the moment.
    pub(crate) async fn text(
        &self,
        text: &str,
        params: &[(Param<'_>, tokio_postgres::types::Type)],
    ) -> Result<Vec<Row>, Trouble> {
        self.vouched(self.answer(self.line.client.query_typed(text, params)).await).await
    }

    /// Several statements without parameters in one transaction.
    pub(crate) async fn batch(&self, text: &str) -> Result<(), Trouble> {
        self.vouched(self.answer(self.line.client.batch_execute(text)).await).await
    }

    /// Sets the session up and prepares what is asked often: only where the session is ours alone.
    pub(crate) async fn prepare(
        &self,
        statements: &Statements,
        config: &PostgresConfig,
    ) -> Result<(), Trouble> {
        let (client, settings) = (&self.line.client, settings(config));
        let prepare = |query: &Query| client.prepare_typed(statements.plain(*query), query.types());
        let prepared = futures_util::future::try_join_all(Query::OFTEN.iter().map(prepare));
        // The server takes them in this order, so neither need wait for the other's answer.
        let ((), prepared) =
            futures_util::future::try_join(client.batch_execute(&settings), prepared).await?;
        // Whoever came first prepared the same.
        let _ = self.prepared.set(prepared);
        Ok(())
    }
}

/// What a session of ours is like, whatever the server, the database or the role say; what a server does not
/// know is left out.
///
/// A plan is made once for a connection, when the tables may still be empty: so each goes by an index, whatever
/// the planner believes of their sizes. And a client that is gone with half a statement sent must not keep a row
/// locked until the system of the server misses it, hours later.
pub(crate) fn settings(config: &PostgresConfig) -> String {
    let millis = |time: Duration| time.as_millis().max(1).to_string();
    let own = [
        ("lock_timeout", millis(config.lock_timeout)),
        ("statement_timeout", millis(config.statement_timeout)),
        ("transaction_timeout", millis(config.statement_timeout * 2)),
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
    let own = own.iter().map(|(name, value)| format!("('{name}', '{value}')"));
    let fixed = fixed.iter().map(|(name, value)| format!("('{name}', '{value}')"));
    let all = own.chain(fixed).collect::<Vec<_>>().join(", ");
    // Set even if it is on: the session then ignores a later change of the server's configuration.
    format!(
        "SELECT set_config(s.name, v.value, false) FROM (VALUES {all}) AS v (name, value) \
         JOIN pg_settings s ON s.name = v.name; \
         SELECT set_config('synchronous_commit', coalesce( \
             nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)"
    )
}
