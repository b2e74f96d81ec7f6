//! Every statement, once: its text, the types of its parameters, and in two forms.
//!
//! Time is the moment at which the server began a statement. It is after the call was made, so a lease that is
//! counted from it never ends before its holder believes; and it is one value in a whole statement. Every
//! statement is a transaction of its own.

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
    Take "take" [TEXT TEXT TEXT FLOAT8 FLOAT8 INT8],
    TakeMany "take_many" [TEXT_ARRAY TEXT_ARRAY TEXT_ARRAY FLOAT8_ARRAY FLOAT8_ARRAY INT8_ARRAY],
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

/// The store's time in microseconds, which tokens never fall behind.
const MICROS: &str = "(date_part('epoch', statement_timestamp()) * 1000000)::bigint";

/// Calls the next waiter. The subqueries see the queue as it was before the row was locked; whether it changed
/// meanwhile, the two numbers tell. Where nobody waits they are not carried out.
const CALLED: &str = "m.waited,
    CASE WHEN m.waited > 0 THEN (SELECT s.waited FROM {mutex} s WHERE s.mutex = m.mutex)
        ELSE m.waited END AS seen_waited,
    CASE WHEN m.waited > 0 THEN (
        SELECT count(pg_notify(n.channel, 'turn ' || n.session)) FROM (
            SELECT w.channel, w.session FROM {waiter} w
            WHERE w.mutex = m.mutex AND NOT w.watches AND w.until > statement_timestamp()
                AND w.session <> due.session
            ORDER BY w.place LIMIT 1) n)
        ELSE 0 END AS called";

/// Does not wait for the disk, which is for releases alone: one that a crash of the server undoes leaves the mutex to
/// its lease, and whoever takes it before the crash waits for the disk himself, which keeps both.
const UNSYNCED: &str = "set_config('synchronous_commit', 'off', true) IS NOT NULL";

/// The text of every statement.
#[derive(Debug)]
pub(crate) struct Statements {
    /// For a connection whose settings last.
    plain: Vec<String>,
    /// For a connection that may lead to another server process each time: it brings its bound along.
    bounded: Vec<String>,
}

impl Statements {
    pub(crate) fn new(tables: &Tables, lock_timeout: Duration) -> Self {
        let millis = lock_timeout.as_millis().max(1);
        let bound = format!("set_config('lock_timeout', '{millis}ms', true) IS NOT NULL AND");
        let render = |bound: &str| {
            let text = |query: &Query| render(query.template(), tables, bound);
            Query::ALL.iter().map(text).collect()
        };
        Self { plain: render(""), bounded: render(&bound) }
    }

    pub(crate) fn plain(&self, query: Query) -> &str {
        &self.plain[query as usize]
    }

    pub(crate) fn bounded(&self, query: Query) -> &str {
        &self.bounded[query as usize]
    }
}

fn render(template: &str, tables: &Tables, bound: &str) -> String {
    let text = template.replace("{called}", CALLED).replace("{unsynced}", UNSYNCED);
    tables.name(&text.replace("{micros}", MICROS).replace("{bound}", bound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_is_filled_and_every_parameter_has_a_type() {
        let statements = Statements::new(&Tables::default(), Duration::from_millis(200));
        for query in Query::ALL {
            for text in [statements.plain(*query), statements.bounded(*query)] {
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
}
