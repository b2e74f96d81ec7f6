//! Every statement, once: its text, the types of its parameters, and in three forms.
//!
//! Time is `clock_timestamp()`, the server's time at the moment at which it is read. That is after the call was made,
//! so a lease that is counted from it never ends before its holder believes. The server reads it again when a row
//! changed while the statement waited for its lock. `statement_timestamp()` would be the time before that wait, and a
//! lease that was renewed meanwhile would end earlier than its holder believes. Every statement is a transaction of
//! its own.

use std::time::Duration;

use tokio_postgres::types::Type;

use crate::schema::Tables;

macro_rules! queries {
    ($($query:ident $file:literal [$($kind:ident)*],)*) => {
        /// What can be asked of the server.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Query { $($query),* }

        impl Query {
            pub(crate) const ALL: &[Self] = &[$(Self::$query),*];

            /// The types of its parameters: nobody has to ask the server for them.
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
    Free "free" [TEXT TEXT INT8],
    FreeMany "free_many" [TEXT_ARRAY TEXT_ARRAY INT8_ARRAY],
    Look "look" [TEXT TEXT TEXT FLOAT8 FLOAT8 INT8],
    Queue "queue" [TEXT TEXT TEXT FLOAT8 FLOAT8 TEXT FLOAT8],
    Leave "leave" [TEXT TEXT],
    Wake "wake" [TEXT],
    Inspect "inspect" [TEXT],
    Create "create" [TEXT TEXT TEXT FLOAT8 FLOAT8],
    Calm "calm" [TEXT INT8 INT8],
    Watch "watch" [TEXT_ARRAY TEXT FLOAT8],
    Unwatch "unwatch" [TEXT_ARRAY TEXT],
    Sweep "sweep" [],
    Read "read" [TEXT],
    List "list" [],
    Evict "evict" [TEXT TEXT INT8],
}

impl Query {
    /// Those that are asked often, and worth being prepared on every connection.
    pub(crate) const OFTEN: &[Self] = Self::ALL.split_at(Self::Create as usize).0;
}

/// The channel of a waiter that cannot be notified. No message is sent to it: every message takes a lock that the
/// whole server shares until its transaction is on the disk.
pub(crate) const NOBODY: &str = "simba_nobody";

/// How the channel of a handle begins whose connection for wake-ups holds an advisory lock.
pub(crate) const LIVE: &str = "simba_live_";

/// The first key of these advisory locks; the second one is `hashtext` of the channel.
pub(crate) const LIVENESS: i32 = 0x5369_6d62;

/// The store's time in microseconds, which tokens never fall behind.
const MICROS: &str = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint";

/// Whether the handle of the waiter `w` is alive: its connection holds a shared lock, which keeps us from locking it.
/// A waiter without such a lock (behind a pooler, not subscribed yet, of an older version) is alive until its entry
/// ends. The lock is given back at once, so that the many entries of a crashed host need no room at the server.
const ALIVE: &str = "CASE WHEN left(w.channel, 11) = 'simba_live_'
    AND pg_try_advisory_lock({liveness}, hashtext(w.channel))
    THEN NOT pg_advisory_unlock({liveness}, hashtext(w.channel)) ELSE true END";

/// Notifies the first live waiter of the mutex `m` that it is its turn, and the first one of another handle that it is
/// next: that one polls within a second in case the first one dies before it takes the mutex. Waiters of one handle die
/// together, so a second one of the same handle would be no help. The name of a session begins with its handle. The
/// search ends after 100 entries, so that the cost of a release does not grow with the queue. Returns how many waiters
/// were chosen.
const NEXT: &str = "SELECT count(CASE WHEN f.channel = 'simba_nobody' THEN ''
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

/// Notifies the next waiters. The subqueries see the queue as it was before the row was locked; whether it changed
/// meanwhile, the two numbers tell. Where nobody waits they are not carried out.
const CALLED: &str = "m.waited,
    CASE WHEN m.waited > 0 THEN (SELECT s.waited FROM {mutex} s WHERE s.mutex = m.mutex)
        ELSE m.waited END AS seen_waited,
    CASE WHEN m.waited > 0 THEN ({next}) ELSE 0 END AS called";

/// Does not wait for the disk. Only releases use it: a release that a crash of the server undoes leaves the mutex held
/// until its lease ends. An acquisition after the release waits for the disk, and the release is on the disk before it.
const UNSYNCED: &str = "set_config('synchronous_commit', 'off', true) IS NOT NULL";

/// Waits for the disk, whatever the server, the database or the role say: a lease that a crash undoes has two holders.
/// The server reads the setting when it commits this very statement. Stricter settings stay.
const SYNCED: &str = "set_config('synchronous_commit', coalesce(
    nullif(current_setting('synchronous_commit'), 'off'), 'on'), true) IS NOT NULL AND";

/// The text of every statement.
#[derive(Debug)]
pub(crate) struct Statements {
    /// For a connection whose settings last.
    plain: Vec<String>,
    /// For a connection that may lead to another server process each time: it brings its settings along.
    bounded: Vec<String>,
    /// As `bounded`, but notifies nobody: for a server whose queue of notifications is full.
    silent: Vec<String>,
}

impl Statements {
    pub(crate) fn new(tables: &Tables, lock_timeout: Duration) -> Self {
        let millis = lock_timeout.as_millis().max(1);
        let bound = format!("set_config('lock_timeout', '{millis}ms', true) IS NOT NULL AND");
        let render = |bound: &str, synced: &str, notify: &str| {
            let text = |query: &Query| render(query.template(), tables, (bound, synced, notify));
            Query::ALL.iter().map(text).collect()
        };
        Self {
            plain: render("", "", "pg_notify"),
            bounded: render(&bound, SYNCED, "pg_notify"),
            silent: render(&bound, SYNCED, "concat"),
        }
    }

    pub(crate) fn plain(&self, query: Query) -> &str {
        &self.plain[query as usize]
    }

    pub(crate) fn bounded(&self, query: Query) -> &str {
        &self.bounded[query as usize]
    }

    pub(crate) fn silent(&self, query: Query) -> &str {
        &self.silent[query as usize]
    }
}

fn render(template: &str, tables: &Tables, (bound, synced, notify): (&str, &str, &str)) -> String {
    // The one that frees a mutex may be in its queue still.
    let called = CALLED.replace("{next}", &NEXT.replace("{others}", "AND w.session <> due.session"));
    let text = template.replace("{called}", &called).replace("{next}", &NEXT.replace("{others}", ""));
    let text = text.replace("{alive}", ALIVE).replace("{liveness}", &LIVENESS.to_string());
    let text = text.replace("{unsynced}", UNSYNCED).replace("{synced}", synced).replace("{bound}", bound);
    tables.name(&text.replace("{micros}", MICROS).replace("{notify}", notify))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_is_filled_and_every_parameter_has_a_type() {
        let statements = Statements::new(&Tables::default(), Duration::from_millis(200));
        for query in Query::ALL {
            for text in [statements.plain(*query), statements.bounded(*query), statements.silent(*query)] {
                assert!(!text.contains('{'), "{text}");
                let (most, next) = (query.types().len(), query.types().len() + 1);
                assert!(most == 0 || text.contains(&format!("${most}")), "{query:?} does not use all");
                assert!(!text.contains(&format!("${next}")), "{query:?} uses more");
            }
        }
    }

    #[test]
    fn what_locks_a_row_brings_its_bound_along_where_settings_do_not_last() {
        let statements = Statements::new(&Tables::default(), Duration::from_millis(200));
        let reading = [Query::Wake, Query::Inspect, Query::Read, Query::List, Query::Unwatch, Query::Sweep];
        for query in Query::ALL {
            let bounded = statements.bounded(*query).contains("'200ms'");
            assert_eq!(bounded, !reading.contains(query), "{query:?}");
            assert!(!statements.plain(*query).contains("lock_timeout"));
        }
    }

    #[test]
    fn what_sets_a_lease_is_synced_where_settings_do_not_last() {
        let statements = Statements::new(&Tables::default(), Duration::from_millis(200));
        let leases = [Query::Take, Query::TakeMany, Query::Look, Query::Queue, Query::Create];
        for query in Query::ALL {
            let synced = statements.bounded(*query).contains("'off'), 'on')");
            assert_eq!(synced, leases.contains(query), "{query:?}");
        }
    }

    #[test]
    fn no_statement_uses_the_time_before_it_waited_for_a_row() {
        let statements = Statements::new(&Tables::default(), Duration::from_millis(200));
        for query in Query::ALL {
            let text = statements.bounded(*query);
            let stale = ["statement_timestamp", "transaction_timestamp", "now()", "current_timestamp"];
            assert!(!stale.iter().any(|time| text.contains(time)), "{query:?}");
        }
    }

    #[test]
    fn a_silent_statement_notifies_nobody() {
        let statements = Statements::new(&Tables::default(), Duration::from_millis(200));
        for query in Query::ALL {
            assert!(!statements.silent(*query).contains("pg_notify"), "{query:?}");
        }
        assert!(ALIVE.contains(&format!("left(w.channel, {}) = '{LIVE}'", LIVE.len())));
        assert!(NEXT.contains(&format!("'{NOBODY}'")));
    }
}
