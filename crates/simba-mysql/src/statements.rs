//! The text of every statement, for one table.
//!
//! No name and no id ever stands in a text: they are bound. Each statement is a transaction of its own.

use std::sync::OnceLock;

use crate::table::TableName;

/// Milliseconds since 1970, by the server, whatever its time zone: in any other than UTC the hour in which clocks
/// are set back happens twice.
const NOW: &str = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)";

/// What a connection for calls is told first. `/*M!` is heeded by MariaDB alone, `/*!8` by MySQL alone.
///
/// A server that clips a number instead of refusing it would stop tokens from growing, hence the strict mode.
///
/// No statement waits for a row that a peer has locked, since the calls behind it would wait too. On MySQL the one
/// second of `innodb_lock_wait_timeout` is the least there is. How long a commit may take is for the client's own
/// limit, which follows the lease: replication may make every commit slow. The server's limit only ends what nobody
/// waits for any more.
pub(crate) const FOR_CALLS: &str = concat!(
    "SET time_zone = '+00:00', autocommit = 1, sql_mode = 'STRICT_ALL_TABLES', innodb_lock_wait_timeout = 1 ",
    "/*M!100300 , tx_isolation = 'READ-COMMITTED', innodb_lock_wait_timeout = 0, max_statement_time = 6 */ ",
    "/*!80000 , transaction_isolation = 'READ-COMMITTED' */"
);

/// The same for a connection that looks at many rows.
pub(crate) const FOR_LOOKS: &str = concat!(
    "SET time_zone = '+00:00', autocommit = 1, sql_mode = 'STRICT_ALL_TABLES', innodb_lock_wait_timeout = 1 ",
    "/*M!100300 , tx_isolation = 'READ-COMMITTED', max_statement_time = 5 */ ",
    "/*!80000 , transaction_isolation = 'READ-COMMITTED', max_execution_time = 5000 */"
);

/// The most rows of one batch, of one take, and of one look, as powers of two.
const BATCH_POWER: usize = 7;
const TAKE_POWER: usize = 6;
const LOOK_POWER: usize = 15;

/// The most renewals that one statement carries.
pub(crate) const BATCH: usize = 1 << BATCH_POWER;
/// The most mutexes that one statement takes: the server goes through all of them for each row.
pub(crate) const TAKES: usize = 1 << TAKE_POWER;
/// The most rows that one statement looks at.
pub(crate) const LOOK: usize = 1 << LOOK_POWER;

const COLUMNS: &str = "mutex, acquired_at, ttl_at, transition_at, owner_id, version";

/// All statements of one table.
#[derive(Debug)]
pub(crate) struct Statements {
    table: TableName,
    /// Takes what is free, at the version at which it was seen free: a take that arrives late does nothing once the
    /// row has changed.
    pub(crate) take: String,
    /// Ours by our id, unexpired, as we last saw it: what every write says that speaks of our own hold.
    pub(crate) renew: String,
    /// The same where writes of ours were not answered: at any version that they explain.
    pub(crate) renew_among: String,
    pub(crate) retake: String,
    pub(crate) release: String,
    /// Counts the version of a free row up, so that a take that is still under way does nothing.
    pub(crate) fence: String,
    pub(crate) evict: String,
    pub(crate) read: String,
    pub(crate) list: String,
    pub(crate) insert: String,
    /// Fails at once if a peer has locked the row.
    pub(crate) unlocked: String,
    pub(crate) columns: String,
    /// Makes the server find many rows by their names. Left to itself it may read a small table from one end to the other,
    /// and a statement then waits for, or fails at, a row that a peer has locked and that it does not name.
    by_name: OnceLock<String>,
    renewals: [OnceLock<String>; BATCH_POWER + 1],
    releases: [OnceLock<String>; BATCH_POWER + 1],
    unlocked_rows: [OnceLock<String>; BATCH_POWER + 1],
    takes: [OnceLock<String>; TAKE_POWER + 1],
    inserts: [OnceLock<String>; TAKE_POWER + 1],
    looks: [OnceLock<String>; LOOK_POWER + 1],
}

impl Statements {
    pub(crate) fn new(table: TableName) -> Self {
        let take = format!(
            "UPDATE {table} SET acquired_at = LAST_INSERT_ID({NOW}), ttl_at = {NOW} + ?, transition_at = {NOW} + ?, \
             owner_id = ?, version = version + 1 WHERE mutex = ? AND transition_at < {NOW} AND version = ?"
        );
        let ours = format!("WHERE mutex = ? AND owner_id = ? AND transition_at > {NOW} AND version = ?");
        let extend = format!("transition_at = {NOW} + ?, version = version + 1");
        let free = format!(
            "UPDATE {table} SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
             version = version + 1 WHERE mutex = ? AND owner_id = ? AND version = ?"
        );
        Self {
            take,
            fence: format!(
                "UPDATE {table} SET version = version + 1 WHERE mutex = ? AND transition_at < {NOW} AND version = ?"
            ),
            // The version after it is known, so the reply has room for the server's time.
            renew: format!("UPDATE {table} SET ttl_at = LAST_INSERT_ID({NOW}) + ?, {extend} {ours}"),
            renew_among: format!(
                "UPDATE {table} SET ttl_at = {NOW} + ?, transition_at = {NOW} + ?, \
                 version = LAST_INSERT_ID(version + 1) WHERE mutex = ? AND owner_id = ? \
                 AND transition_at > {NOW} AND version BETWEEN ? AND ?"
            ),
            retake: format!(
                "UPDATE {table} SET acquired_at = LAST_INSERT_ID({NOW}), ttl_at = {NOW} + ?, {extend} {ours}"
            ),
            evict: free.clone(),
            release: free,
            read: format!("SELECT {COLUMNS}, {NOW} FROM {table} WHERE mutex = ?"),
            list: format!("SELECT {COLUMNS}, {NOW} FROM {table} ORDER BY mutex"),
            insert: format!("INSERT IGNORE INTO {table} ({COLUMNS}) VALUES (?, 0, 0, 0, '', 0)"),
            unlocked: format!("SELECT 1 FROM {table} WHERE mutex = ? FOR UPDATE NOWAIT"),
            columns: format!("SELECT {COLUMNS} FROM {table} LIMIT 0"),
            by_name: OnceLock::new(),
            renewals: Default::default(),
            releases: Default::default(),
            unlocked_rows: Default::default(),
            takes: Default::default(),
            inserts: Default::default(),
            looks: Default::default(),
            table,
        }
    }

    /// Tells which index has the names of the mutexes. Statements about many rows use it from then on.
    pub(crate) fn use_index(&self, index: &str) {
        let _ = self.by_name.set(format!(" FORCE INDEX (`{}`)", index.replace('`', "``")));
    }

    fn by_name(&self) -> &str {
        self.by_name.get().map_or("", String::as_str)
    }

    /// The table that they are about.
    pub(crate) const fn table(&self) -> &TableName {
        &self.table
    }

    /// Renews `count` rows at once: two lengths, then the mutexes, then (mutex, id, version) of each.
    ///
    /// The list is filled up to a power of two, so that a connection keeps a handful of statements however
    /// many rows fall due together. The list of names is for the index: not every server uses it for tuples.
    pub(crate) fn renew_many(&self, count: usize) -> (&str, usize) {
        let (power, size) = padded(count, BATCH_POWER);
        let text = self.renewals[power].get_or_init(|| {
            format!(
                "UPDATE {}{} SET ttl_at = LAST_INSERT_ID({NOW}) + ?, transition_at = {NOW} + ?, \
                 version = version + 1 WHERE mutex IN ({}) AND transition_at > {NOW} \
                 AND (mutex, owner_id, version) IN ({})",
                self.table,
                self.by_name(),
                list("?", size),
                list("(?,?,?)", size),
            )
        });
        (text, size)
    }

    /// Frees `count` rows at once: the mutexes, then (mutex, id, version) of each, filled up likewise.
    pub(crate) fn release_many(&self, count: usize) -> (&str, usize) {
        let (power, size) = padded(count, BATCH_POWER);
        let text = self.releases[power].get_or_init(|| {
            format!(
                "UPDATE {}{} SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
                 version = version + 1 WHERE mutex IN ({}) AND (mutex, owner_id, version) IN ({})",
                self.table,
                self.by_name(),
                list("?", size),
                list("(?,?,?)", size),
            )
        });
        (text, size)
    }

    /// Reads the names of those of `count` rows that no peer has locked, without waiting for the others.
    pub(crate) fn unlocked_many(&self, count: usize) -> (&str, usize) {
        let (power, size) = padded(count, BATCH_POWER);
        let text = self.unlocked_rows[power].get_or_init(|| {
            let names = list("?", size);
            let (table, by_name) = (&self.table, self.by_name());
            // For an index with all columns that are asked for, a server reads all of it in spite of the hint.
            format!(
                "SELECT mutex, version FROM {table}{by_name} WHERE mutex IN ({names}) FOR UPDATE SKIP LOCKED"
            )
        });
        (text, size)
    }

    /// Takes `count` free rows at once: two lengths, the mutexes, the ids in the same order, the mutexes again,
    /// then (mutex, version) of each, filled up likewise.
    pub(crate) fn take_many(&self, count: usize) -> (&str, usize) {
        let (power, size) = padded(count, TAKE_POWER);
        let text = self.takes[power].get_or_init(|| {
            format!(
                "UPDATE {}{} SET acquired_at = LAST_INSERT_ID({NOW}), ttl_at = {NOW} + ?, \
                 transition_at = {NOW} + ?, owner_id = ELT(FIELD(mutex, {}), {}), version = version + 1 \
                 WHERE mutex IN ({}) AND transition_at < {NOW} AND (mutex, version) IN ({})",
                self.table,
                self.by_name(),
                list("?", size),
                list("?", size),
                list("?", size),
                list("(?,?)", size),
            )
        });
        (text, size)
    }

    /// Makes `count` rows at once, filled up likewise.
    pub(crate) fn insert_many(&self, count: usize) -> (&str, usize) {
        let (power, size) = padded(count, TAKE_POWER);
        let text = self.inserts[power].get_or_init(|| {
            let rows = list("(?,0,0,0,'',0)", size);
            format!("INSERT IGNORE INTO {} ({COLUMNS}) VALUES {rows}", self.table)
        });
        (text, size)
    }

    /// Reads `count` rows at once, filled up likewise.
    pub(crate) fn read_many(&self, count: usize) -> (&str, usize) {
        let (power, size) = padded(count, LOOK_POWER);
        let text = self.looks[power].get_or_init(|| {
            format!("SELECT {COLUMNS}, {NOW} FROM {} WHERE mutex IN ({})", self.table, list("?", size))
        });
        (text, size)
    }
}

/// The least power of two that holds `count`, and that number.
fn padded(count: usize, most: usize) -> (usize, usize) {
    let power = (count.max(1).next_power_of_two().trailing_zeros() as usize).min(most);
    (power, 1 << power)
}

fn list(item: &str, count: usize) -> String {
    let mut list = String::with_capacity(count * (item.len() + 1));
    for at in 0..count {
        if at > 0 {
            list.push(',');
        }
        list.push_str(item);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statements() -> Statements {
        Statements::new(TableName::default())
    }

    #[test]
    fn a_batch_is_filled_up_to_a_power_of_two() {
        let statements = statements();
        for (count, size) in [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (BATCH, BATCH)] {
            let (text, filled) = statements.renew_many(count);
            assert_eq!(filled, size);
            assert_eq!(text.matches('?').count(), 2 + 4 * size);
        }
        let (text, filled) = statements.take_many(3);
        assert_eq!((filled, text.matches('?').count()), (4, 2 + 5 * 4));
        let (text, filled) = statements.read_many(5);
        assert_eq!((filled, text.matches('?').count()), (8, 8));
    }

    #[test]
    fn every_write_counts_the_version_up_and_only_a_take_changes_the_owner() {
        let statements = statements();
        for text in [
            &statements.take,
            &statements.fence,
            &statements.renew,
            &statements.renew_among,
            &statements.retake,
            &statements.release,
        ] {
            assert!(text.contains("version + 1"), "{text}");
        }
        assert!(!statements.renew.contains("acquired_at"), "a renewal keeps the beginning of the tenure");
        assert!(!statements.renew_among.contains("acquired_at"));
        assert!(!statements.renew_many(2).0.contains("acquired_at"));
    }

    #[test]
    fn nothing_deletes() {
        let statements = statements();
        assert!(!format!("{statements:?}").to_uppercase().contains("DELETE"));
    }
}
