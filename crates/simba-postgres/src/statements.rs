//! All statements: text, parameter types, three forms of each; and the rows of their answers.
//!
//! No statement waits for the row of a mutex, since renewals of all mutexes use the same connection: each locks the row
//! with SKIP LOCKED first, and reports or leaves out a row that another transaction has locked. What remains is bounded
//! by [`MAX_WAIT`]: a row that is just being inserted, a queue entry or table that another transaction has locked.
//! A waiter's own queue entry is not skipped: an upsert cannot do that, and a waiter whose entry was not deleted would
//! seem to be alive. Only another program locks it for long.
//!
//! The time is `clock_timestamp()`, the server's time when it is read. That is after the call was made, so a lease that
//! is counted from it never ends before its holder assumes. If a row changed before the statement locked it, the server
//! reads the time again. `statement_timestamp()` is earlier: a lease that was renewed meanwhile would end earlier than
//! its holder assumes. Every statement is a transaction of its own.

use std::time::{Duration, SystemTime};

use simba_core::spi::{Answer, Ownership};
use simba_core::{ContenderId, FencingToken, Result};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};

use crate::error::protocol;
use crate::schema::Tables;

macro_rules! queries {
    ($($query:ident $file:literal [$($kind:ident)*],)*) => {
        /// The statements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Query { $($query),* }

        impl Query {
            pub(crate) const ALL: &[Self] = &[$(Self::$query),*];

            /// Returns the types of the parameters, which saves a round trip to the server.
            pub(crate) const fn types(self) -> &'static [Type] {
                match self { $(Self::$query => &[$(Type::$kind),*]),* }
            }

            const fn template(self) -> &'static str {
                match self { $(Self::$query => include_str!(concat!("sql/", $file, ".sql"))),* }
            }
        }
    };
}

queries! {
    Take "take" [TEXT TEXT TEXT FLOAT8 FLOAT8 INT8 BOOL],
    TakeMany "take_many" [TEXT_ARRAY TEXT_ARRAY TEXT_ARRAY FLOAT8_ARRAY FLOAT8_ARRAY INT8_ARRAY BOOL_ARRAY],
    Release "release" [TEXT_ARRAY TEXT_ARRAY INT8_ARRAY],
    ReleaseUncontended "release_uncontended" [TEXT TEXT INT8],
    Poll "poll" [TEXT TEXT TEXT FLOAT8 FLOAT8 INT8],
    Queue "queue" [TEXT TEXT TEXT TEXT FLOAT8],
    Leave "leave" [TEXT TEXT],
    Wake "wake" [TEXT],
    Inspect "inspect" [TEXT],
    MarkIdle "mark_idle" [TEXT INT8 INT8],
    Watch "watch" [TEXT_ARRAY TEXT FLOAT8],
    Unwatch "unwatch" [TEXT_ARRAY TEXT],
    Sweep "sweep" [],
    Read "read" [TEXT],
    List "list" [],
    Evict "evict" [TEXT TEXT INT8],
    Create "create" [TEXT_ARRAY],
}

impl Query {
    /// The frequent statements, which every connection prepares.
    pub(crate) const PREPARED: &[Self] = Self::ALL.split_at(Self::MarkIdle as usize).0;
}

/// The longest time that a statement waits for a lock. Only inserted rows, queue entries, tables and the server's lock for
/// notifications can be waited for. Another program's transaction holds the last one while it commits, which takes as
/// long as a sync of the disk.
pub(crate) const MAX_WAIT: Duration = Duration::from_millis(50);

/// The channel of a waiter that cannot be notified. No notification is sent to it: each one takes a lock that the whole
/// server shares until its transaction is on the disk.
pub(crate) const NO_CHANNEL: &str = "simba_nobody";

/// The prefix of the channel of a handle whose wakeup connection holds an advisory lock.
pub(crate) const LIVE_PREFIX: &str = "simba_live_";

/// The first key of these advisory locks; the second one is `hashtext` of the channel.
pub(crate) const LIVENESS: i32 = 0x5369_6d62;

/// The server's time in microseconds, a lower bound of new tokens.
const MICROS: &str = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint";

/// Whether the handle of the waiter `w` is alive: its connection holds a shared lock, so that an attempt to lock fails.
/// A waiter without such a lock (behind a pooler, not subscribed yet, of an older version) counts as alive until its
/// entry ends. The lock is released immediately, so that the entries of a crashed host do not fill the lock table.
const ALIVE: &str = "CASE WHEN left(w.channel, 11) = 'simba_live_'
    AND pg_try_advisory_lock({liveness}, hashtext(w.channel))
    THEN NOT pg_advisory_unlock({liveness}, hashtext(w.channel)) ELSE true END";

/// Notifies the first live waiter of the mutex `m` that it is its turn, and the first live waiter of another handle
/// that it is next: that one polls within a second, in case the first one dies before it acquires. Waiters of one
/// handle die together, so a second waiter of the same handle would not help. The name of a session starts with its
/// handle. The search ends after 100 entries, so that the cost of a release does not grow with the queue. Returns the
/// number of waiters found.
const NOTIFY_NEXT: &str = "SELECT count(CASE WHEN f.channel = 'simba_nobody' THEN ''
            ELSE {notify}(f.channel, 'turn ' || f.session)::text END)
        + count(CASE WHEN s.session IS NOT NULL THEN {notify}(s.channel, 'next ' || s.session)::text END)
    FROM (
        SELECT w.channel, w.session, w.place FROM {waiter} w
        WHERE w.mutex = m.mutex AND NOT w.watches AND w.until > clock_timestamp() {others} AND {alive}
        ORDER BY w.place LIMIT 1) f
    LEFT JOIN LATERAL (
        SELECT w.channel, w.session FROM (
            SELECT w.channel, w.session, w.place FROM {waiter} w
            WHERE w.mutex = m.mutex AND w.place > f.place AND NOT w.watches AND w.until > clock_timestamp() {others}
            ORDER BY w.place LIMIT 100) w
        WHERE split_part(w.session, '-', 1) <> split_part(f.session, '-', 1) AND w.channel <> 'simba_nobody'
            AND {alive}
        ORDER BY w.place LIMIT 1) s ON true";

/// Notifies the next waiters. The subqueries see the queue as it was before the row was locked; comparing the first two
/// columns shows whether it changed meanwhile. Without waiters the subqueries are not executed.
const NOTIFIED: &str = "m.waited,
    CASE WHEN m.waited > 0 THEN (SELECT s.waited FROM {mutex} s WHERE s.mutex = m.mutex)
        ELSE m.waited END AS waited_before,
    CASE WHEN m.waited > 0 AND '{notify}' <> 'concat' THEN ({next}) ELSE 0 END AS notified";

/// Grants or renews a lease. A renewal keeps the token, unless that is the lapsed one.
const LEASE: &str = "owner = due.owner, session = due.session,
    token = CASE WHEN m.session = due.session AND m.until > clock_timestamp() AND m.token <> due.lapsed
        THEN m.token ELSE greatest(m.token + 1, {micros}) END,
    acquired_at = CASE WHEN m.session = due.session AND m.until > clock_timestamp() AND m.token <> due.lapsed
        THEN m.acquired_at ELSE clock_timestamp() END,
    renewed_at = clock_timestamp(),
    ttl_at = clock_timestamp() + make_interval(secs => due.ttl),
    until = clock_timestamp() + make_interval(secs => due.total)";

/// Ends a lease.
const FREE: &str = "owner = '', session = '', ttl_at = 'epoch', until = 'epoch'";

/// Whether the session `$3` holds the mutex, or is the first live waiter of a free one.
const TURN: &str = "(h.session = $3 AND h.until > clock_timestamp())
    OR (h.until <= clock_timestamp() AND coalesce((
        SELECT w.session FROM {waiter} w
        WHERE w.mutex = $1 AND NOT w.watches AND w.until > clock_timestamp() AND (w.session = $3 OR {alive})
        ORDER BY w.place LIMIT 1), $3) = $3)";

/// Does not wait for the disk. Used where no lease begins: a release that is lost in a crash of the server leaves the
/// mutex held until its lease ends, and the queue is lost anyway. A later acquisition waits for the disk, and all this
/// is on the disk before it.
const UNSYNCED: &str = "set_config('synchronous_commit', 'off', true) IS NOT NULL";

/// Waits for the disk, whatever the server, the database or the role set: losing a lease in a crash allows two holders.
/// The server reads the setting when it commits this statement. Every other setting is kept, also `local` and `remote_write`.
const SYNCED: &str = "set_config('synchronous_commit', coalesce(
    nullif(current_setting('synchronous_commit'), 'off'), 'on'), true) IS NOT NULL";

/// Where a statement is used.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// On a connection with session settings.
    Plain,
    /// On a connection without session settings: each statement sets what it needs.
    Bounded,
    /// As `Bounded`, without notifications: for a server whose NOTIFY queue is full.
    Silent,
}

/// The text of every statement, by form and query.
pub(crate) struct Statements([Vec<String>; 3]);

impl Statements {
    pub(crate) fn new(tables: &Tables) -> Self {
        let wait = format!("set_config('lock_timeout', '{}ms', true) IS NOT NULL AND ", MAX_WAIT.as_millis());
        let (synced, unsynced) = (wait.clone() + SYNCED, wait + UNSYNCED);
        let render = |synced: &str, unsynced: &str, notify: &str| {
            let text = |query: &Query| {
                let text = expand(query.template(), tables);
                text.replace("{synced}", synced).replace("{unsynced}", unsynced).replace("{notify}", notify)
            };
            Query::ALL.iter().map(text).collect()
        };
        Self([
            render("true", UNSYNCED, "pg_notify"),
            render(&synced, &unsynced, "pg_notify"),
            render(&synced, &unsynced, "concat"),
        ])
    }

    pub(crate) fn text(&self, query: Query, form: Form) -> &str {
        &self.0[form as usize][query as usize]
    }
}

/// Fills in what is the same in all forms of a statement.
fn expand(template: &str, tables: &Tables) -> String {
    // The session that releases a mutex may still be in its queue.
    let next = NOTIFY_NEXT.replace("{others}", "AND w.session <> due.session");
    let text = template.replace("{notified}", &NOTIFIED.replace("{next}", &next));
    let text = text.replace("{next}", &NOTIFY_NEXT.replace("{others}", ""));
    let create = Query::Create.template();
    let text = text.replace("{create}", &create.replace("{watched}", "1")).replace("{watched}", "0");
    let text = text.replace("{lease}", LEASE).replace("{free}", FREE).replace("{turn}", TURN);
    let text = text.replace("{micros}", MICROS).replace("{alive}", ALIVE);
    tables.with_names(&text.replace("{liveness}", &LIVENESS.to_string()))
}

/// Returns a column of a row.
pub(crate) fn get<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T> {
    row.try_get(at)
        .map_err(|error| protocol("the server returned an unexpected column type").with_source(error))
}

pub(crate) fn token(token: i64) -> Result<FencingToken> {
    u64::try_from(token).map(FencingToken::new).map_err(|_| protocol("a token is negative: not from Simba"))
}

pub(crate) fn contender(owner: &str) -> Result<ContenderId> {
    ContenderId::foreign(owner)
        .map_err(|error| protocol("the owner of a mutex is invalid: not from Simba").with_source(error))
}

/// Returns the time from one reading of the server's clock to another; zero if that is in the past.
pub(crate) fn time_until(until: SystemTime, now: SystemTime) -> Duration {
    until.duration_since(now).unwrap_or_default()
}

/// A row that starts with owner, session, token, end and now.
pub(crate) struct HolderRow {
    owner: String,
    pub(crate) session: String,
    pub(crate) token: i64,
    remaining: Duration,
}

impl HolderRow {
    pub(crate) fn read(row: &Row) -> Result<Self> {
        let remaining = time_until(get(row, 3)?, get(row, 4)?);
        Ok(Self { owner: get(row, 0)?, session: get(row, 1)?, token: get(row, 2)?, remaining })
    }

    /// Returns whether the mutex is free.
    pub(crate) fn is_free(&self) -> bool {
        self.remaining.is_zero()
    }

    /// Returns the answer for a session that does not hold the mutex.
    pub(crate) fn answer(self) -> Result<Answer> {
        Ok(if self.is_free() { Answer::Vacant } else { Answer::Held(self.ownership()?) })
    }

    pub(crate) fn ownership(self) -> Result<Ownership> {
        Ok(Ownership::new(contender(&self.owner)?, Some(token(self.token)?), self.remaining))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statements() -> Statements {
        Statements::new(&Tables::default())
    }

    #[test]
    fn every_placeholder_is_filled_and_every_parameter_has_a_type() {
        let statements = statements();
        for query in Query::ALL {
            for form in [Form::Plain, Form::Bounded, Form::Silent] {
                let text = statements.text(*query, form);
                assert!(!text.contains('{'), "{text}");
                let (most, next) = (query.types().len(), query.types().len() + 1);
                assert!(most == 0 || text.contains(&format!("${most}")), "{query:?} does not use all");
                assert!(!text.contains(&format!("${next}")), "{query:?} uses more");
            }
        }
    }

    /// Every row of a mutex is locked with SKIP LOCKED before it is changed, and inserted only if it does not exist.
    #[test]
    fn no_statement_waits_for_the_row_of_a_mutex() {
        let statements = statements();
        for query in Query::ALL {
            let text = statements.text(*query, Form::Plain);
            let locks = text.matches("FOR NO KEY UPDATE").count() + text.matches("FOR UPDATE").count();
            assert_eq!(text.matches("SKIP LOCKED").count(), locks, "{query:?}");
            assert!(text.matches("UPDATE simba_mutex").count() <= locks, "{query:?}");
            let inserts = text.matches("INSERT INTO simba_mutex").count();
            assert_eq!(text.matches("(SELECT true FROM simba_mutex e").count(), inserts, "{query:?}");
        }
    }

    #[test]
    fn statements_that_can_wait_for_a_lock_limit_that_without_session_settings() {
        let statements = statements();
        // The last two skip locked rows.
        let reading = [Query::Inspect, Query::Read, Query::List, Query::Unwatch, Query::Sweep];
        for query in Query::ALL {
            let wait = format!("'{}ms'", MAX_WAIT.as_millis());
            let bounded = statements.text(*query, Form::Bounded).contains(&wait);
            assert_eq!(bounded, !reading.contains(query), "{query:?}");
            assert!(!statements.text(*query, Form::Plain).contains("lock_timeout"));
        }
    }

    #[test]
    fn statements_that_set_a_lease_are_synced_without_session_settings() {
        let statements = statements();
        let leases = [Query::Take, Query::TakeMany, Query::Poll, Query::Evict];
        for query in Query::ALL {
            let text = statements.text(*query, Form::Bounded);
            assert_eq!(text.contains("'off'), 'on')"), leases.contains(query), "{query:?}");
            assert!(!(text.contains("'off', true)") && leases.contains(query)), "{query:?}");
            let begins_lease = text.contains("make_interval(secs => due.total)");
            assert!(!begins_lease || leases.contains(query), "{query:?}");
        }
    }

    #[test]
    fn no_statement_uses_the_time_before_a_lock_wait() {
        let statements = statements();
        for query in Query::ALL {
            let text = statements.text(*query, Form::Bounded);
            let stale = ["statement_timestamp", "transaction_timestamp", "now()", "current_timestamp"];
            assert!(!stale.iter().any(|time| text.contains(time)), "{query:?}");
        }
    }

    #[test]
    fn statements_without_notify_send_no_notification() {
        let statements = statements();
        for query in Query::ALL {
            assert!(!statements.text(*query, Form::Silent).contains("pg_notify"), "{query:?}");
        }
        assert!(ALIVE.contains(&format!("left(w.channel, {}) = '{LIVE_PREFIX}'", LIVE_PREFIX.len())));
        assert!(NOTIFY_NEXT.contains(&format!("'{NO_CHANNEL}'")));
    }
}
