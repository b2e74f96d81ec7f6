//! The text of every statement, for one table.
//!
//! Values are part of the text, as hexadecimal bytes or decimal numbers. So a statement is one round trip on every
//! connection, new or not, for any number of rows. Preparing statements was measured on both servers: it saves
//! less than a tenth of the time of a commit without a slow disk. Each statement is a transaction of its own.

use std::sync::OnceLock;

use crate::schema::TableName;

/// Milliseconds since 1970 by the server's clock, in UTC: in other time zones one hour repeats when clocks
/// are set back.
const NOW: &str = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)";

/// The settings of a connection for calls. Only MariaDB executes `/*M!`, only MySQL `/*!8`.
///
/// Strict mode is required: a server that clips an out-of-range number would stop tokens from growing. Safe
/// updates would refuse the statement that skips locked rows.
///
/// No renewal waits for a row that a peer has locked. Other statements about one row may, on MySQL for one
/// second, the minimum of `innodb_lock_wait_timeout`. The duration of a commit is limited by the
/// client, by the lease: replication may make every commit slow. The server's limit only ends statements
/// whose client has given up.
pub(crate) const FOR_CALLS: &str = concat!(
    "SET time_zone = '+00:00', autocommit = 1, sql_mode = 'STRICT_ALL_TABLES', innodb_lock_wait_timeout = 1 ",
    ", sql_safe_updates = 0, sql_big_selects = 1 ",
    "/*M!100300 , tx_isolation = 'READ-COMMITTED', innodb_lock_wait_timeout = 0, max_statement_time = 6 */ ",
    "/*!80000 , transaction_isolation = 'READ-COMMITTED' */"
);

/// The settings of a connection that reads many rows. Without big selects, a server with a low `max_join_size` refuses
/// such a read with error 1104.
pub(crate) const FOR_READS: &str = concat!(
    "SET time_zone = '+00:00', autocommit = 1, sql_mode = 'STRICT_ALL_TABLES', innodb_lock_wait_timeout = 1 ",
    ", sql_big_selects = 1 ",
    "/*M!100300 , tx_isolation = 'READ-COMMITTED', max_statement_time = 5 */ ",
    "/*!80000 , transaction_isolation = 'READ-COMMITTED', max_execution_time = 5000 */"
);

/// Only for servers that have it: MySQL from 8.0.1 and MariaDB from 10.6 on.
const SKIP_LOCKED: &str = "/*!80001 SKIP LOCKED */ /*M!100600 SKIP LOCKED */";

/// The maximum number of rows that one statement reads.
pub(crate) const MAX_READ: usize = 8_192;

const COLUMNS: &str = "mutex, acquired_at, ttl_at, transition_at, owner_id, version";

/// What a write does. Every write increases the version, and has an effect only at the version that it names.
/// Ordered by urgency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Extends the lease of a row that has our id and is unexpired.
    Renew,
    /// Frees a row that has our id.
    Free,
    /// Begins a new tenure on a row that has our id and is unexpired.
    Retake,
    /// Takes a free row.
    Take,
    /// Only increases the version of a free row, so that a take in flight has no effect.
    Fence,
}

impl Kind {
    /// Returns the maximum number of mutexes in one statement.
    pub(crate) const fn max(self) -> usize {
        match self {
            // The server searches the whole list of ids for each row.
            Self::Take => 64,
            _ => 128,
        }
    }

    /// Returns whether the write names the owner of the row, which is its sender.
    const fn is_about_own_row(self) -> bool {
        matches!(self, Self::Renew | Self::Free | Self::Retake)
    }

    /// Returns the condition on the end of the lease. In the millisecond in which it ends neither a renewal nor
    /// a take is allowed: JVM peers compare this way.
    fn time_condition(self) -> String {
        match self {
            Self::Renew | Self::Retake => format!("m.transition_at > {NOW} AND "),
            Self::Take | Self::Fence => format!("m.transition_at < {NOW} AND "),
            Self::Free => String::new(),
        }
    }
}

/// A row to write: the sender's id, and the version at which the write has an effect.
#[derive(Clone, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) mutex: &'a str,
    pub(crate) owner: &'a str,
    pub(crate) version: u64,
}

/// The lengths of a lease in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Terms {
    pub(crate) ttl: u64,
    pub(crate) total: u64,
}

/// The statements of one table.
#[derive(Debug)]
pub(crate) struct Statements {
    table: TableName,
    /// The index hint of statements about many rows. Without it a server may scan a small table, and the
    /// statement then waits for, or fails at, a locked row that it does not name.
    by_name: OnceLock<String>,
}

impl Statements {
    pub(crate) const fn new(table: TableName) -> Self {
        Self { table, by_name: OnceLock::new() }
    }

    /// Sets the index on the mutex names. Statements about many rows use it from then on.
    pub(crate) fn use_index(&self, index: &str) {
        let _ = self.by_name.set(format!(" FORCE INDEX (`{}`)", index.replace('`', "``")));
    }

    /// Returns the statement that writes these rows. A renewal, a take and a retake pass the server's time to
    /// `LAST_INSERT_ID`. With `skip_locked`, rows that a peer has locked are left out; without it the statement
    /// waits for them or fails, but costs the server less.
    pub(crate) fn write(
        &self,
        kind: Kind,
        terms: Terms,
        targets: &[Target<'_>],
        skip_locked: bool,
    ) -> String {
        let Self { table, by_name } = self;
        let by_name = by_name.get().filter(|_| targets.len() > 1).map_or("", String::as_str);
        let chosen = format!("{table} AS m{by_name}");
        let condition = format!("WHERE {}{}", kind.time_condition(), row_condition(kind, targets));
        let set = format!("SET {}version = m.version + 1", assignments(kind, terms, targets));
        if !skip_locked {
            return format!("UPDATE {chosen} {set} {condition}");
        }
        // DISTINCT keeps MySQL from merging the inner query into the outer one, which would wait for locked rows.
        format!(
            "UPDATE (SELECT DISTINCT m.mutex FROM {chosen} {condition} FOR UPDATE {SKIP_LOCKED}) AS unlocked \
             STRAIGHT_JOIN {table} AS m ON m.mutex = unlocked.mutex {set}"
        )
    }

    /// Returns the statement that reads the rows of these mutexes.
    pub(crate) fn read<'a>(&self, mutexes: impl IntoIterator<Item = &'a str>) -> String {
        let names = list(mutexes.into_iter().map(literal));
        format!("SELECT {COLUMNS}, {NOW} FROM {} WHERE mutex IN ({names})", self.table)
    }

    /// Returns the statement that reads all rows.
    pub(crate) fn list(&self) -> String {
        format!("SELECT {COLUMNS}, {NOW} FROM {} ORDER BY mutex", self.table)
    }

    /// Returns the statement that inserts the rows of these mutexes, in order: inserting the same rows in
    /// different orders could deadlock.
    pub(crate) fn insert(&self, mut mutexes: Vec<&str>) -> String {
        mutexes.sort_unstable();
        let rows = list(mutexes.into_iter().map(|mutex| format!("({},0,0,0,'',0)", literal(mutex))));
        format!("INSERT IGNORE INTO {} ({COLUMNS}) VALUES {rows}", self.table)
    }

    /// Returns the statement that fails if the table lacks a column.
    pub(crate) fn columns(&self) -> String {
        format!("SELECT {COLUMNS} FROM {} LIMIT 0", self.table)
    }
}

/// Returns the text as a value that cannot be parsed as SQL, whatever the server's rules for quotes.
pub(crate) fn literal(text: &str) -> String {
    if text.is_empty() {
        return "''".to_owned();
    }
    let mut literal = String::with_capacity(11 + 2 * text.len());
    literal.push_str("_utf8mb4 0x");
    let digit = |nibble: u8| char::from_digit(u32::from(nibble), 16).unwrap_or_default();
    text.bytes().for_each(|byte| literal.extend([digit(byte >> 4), digit(byte & 15)]));
    literal
}

fn assignments(kind: Kind, Terms { ttl, total }: Terms, targets: &[Target<'_>]) -> String {
    let begin = format!(
        "acquired_at = LAST_INSERT_ID({NOW}), ttl_at = {NOW} + {ttl}, transition_at = {NOW} + {total}, "
    );
    match kind {
        Kind::Renew => format!("ttl_at = LAST_INSERT_ID({NOW}) + {ttl}, transition_at = {NOW} + {total}, "),
        Kind::Retake => begin,
        Kind::Take => {
            let ids = list(targets.iter().map(|target| literal(target.owner)));
            let chosen = if targets.len() == 1 {
                ids
            } else {
                format!("ELT(FIELD(m.mutex, {}), {ids})", names(targets))
            };
            format!("{begin}owner_id = {chosen}, ")
        }
        Kind::Free => "acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', ".to_owned(),
        Kind::Fence => String::new(),
    }
}

/// Returns the condition on name, owner and version. The list of names is for the index: not every server uses it
/// for tuples. One row has a form of its own, which the server parses and plans faster.
fn row_condition(kind: Kind, targets: &[Target<'_>]) -> String {
    let is_own = kind.is_about_own_row();
    if let [Target { mutex, owner, version }] = targets {
        let owner = if is_own { format!("m.owner_id = {} AND ", literal(owner)) } else { String::new() };
        return format!("{owner}m.mutex = {} AND m.version = {version}", literal(mutex));
    }
    let tuples = targets.iter().map(|Target { mutex, owner, version }| {
        let owner = if is_own { format!(",{}", literal(owner)) } else { String::new() };
        format!("({}{owner},{version})", literal(mutex))
    });
    let columns = if is_own { "m.mutex, m.owner_id, m.version" } else { "m.mutex, m.version" };
    format!("m.mutex IN ({}) AND ({columns}) IN ({})", names(targets), list(tuples))
}

fn names(targets: &[Target<'_>]) -> String {
    list(targets.iter().map(|target| literal(target.mutex)))
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Kind; 5] = [Kind::Renew, Kind::Free, Kind::Retake, Kind::Take, Kind::Fence];

    fn text(kind: Kind, skip_locked: bool) -> String {
        let target = |mutex, version| Target { mutex, owner: "me", version };
        let targets = [target("a'", 7), target("b", 9)];
        let terms = Terms { ttl: 10_000, total: 16_000 };
        Statements::new(TableName::default()).write(kind, terms, &targets, skip_locked)
    }

    #[test]
    fn values_are_hexadecimal_text_or_decimal_numbers() {
        assert_eq!((literal("a'?"), literal("")), ("_utf8mb4 0x61273f".to_owned(), "''".to_owned()));
        let renewal = text(Kind::Renew, false);
        assert!(!renewal.contains("a'") && renewal.contains("+ 10000"), "{renewal}");
    }

    #[test]
    fn every_write_names_a_version_and_increases_it_and_only_a_new_tenure_sets_acquired_at() {
        for (kind, skip_locked) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
            let text = text(kind, skip_locked);
            assert!(text.contains("version = m.version + 1"), "{text}");
            assert!([",7)", ",9)"].iter().all(|version| text.contains(version)), "{text}");
            assert_eq!(text.contains("SKIP LOCKED"), skip_locked, "{text}");
        }
        assert!(!text(Kind::Renew, true).contains("acquired_at"), "a renewal keeps the start of the tenure");
    }

    #[test]
    fn no_statement_deletes() {
        let all = KINDS.map(|kind| text(kind, true)).concat();
        assert!(!all.to_uppercase().contains("DELETE"));
    }
}
