//! The tables, and how a Simba database is recognized.

use rusqlite::Connection;

/// The statements that create the tables. They change nothing on a file that has them.
pub(crate) const SCHEMA: &str = include_str!("schema.sql");

/// Adds the column that files of the first release lack. Nullable, so that programs of that release can still write
/// rows.
const ADD_PROCESS: &str = "ALTER TABLE simba_waiter ADD COLUMN process TEXT";
const HAS_PROCESS: &str =
    "SELECT EXISTS (SELECT 1 FROM pragma_table_info('simba_waiter') WHERE name = 'process')";

/// Creates the tables that are missing and adds the columns that they lack. Changes nothing on a current file.
pub(crate) fn apply(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(SCHEMA)?;
    let has_process: bool = connection.query_row(HAS_PROCESS, [], |row| row.get(0))?;
    if has_process { Ok(()) } else { connection.execute_batch(ADD_PROCESS) }
}

/// The application id in the header of a Simba database: `Simb`.
pub(crate) const APPLICATION_ID: i32 = 0x5369_6d62;

/// The version of the tables that this code reads and writes.
pub(crate) const VERSION: i32 = 1;

/// The identification of a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) application: i32,
    pub(crate) version: i32,
    /// Whether it has no tables.
    pub(crate) empty: bool,
}

impl Mark {
    /// Reads the mark of an open file. This is the first statement on a connection, so it fails on a file that is no
    /// database.
    pub(crate) fn read(connection: &Connection) -> rusqlite::Result<Self> {
        let pragma = |name: &str| connection.pragma_query_value(None, name, |row| row.get(0));
        let application = pragma("application_id")?;
        let version = pragma("user_version")?;
        let count = "SELECT NOT EXISTS (SELECT 1 FROM sqlite_schema)";
        let empty = connection.query_row(count, [], |row| row.get(0))?;
        Ok(Self { application, version, empty })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_sets_the_mark_and_can_be_applied_again() {
        let connection = Connection::open_in_memory().unwrap();
        assert!(Mark::read(&connection).unwrap().empty);
        for _ in 0..2 {
            apply(&connection).unwrap();
            let ours = Mark { application: APPLICATION_ID, version: VERSION, empty: false };
            assert_eq!(Mark::read(&connection).unwrap(), ours);
        }
    }
}
