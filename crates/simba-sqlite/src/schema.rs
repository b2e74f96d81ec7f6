//! What a file of ours looks like, and what marks it.

use rusqlite::Connection;

/// The statements that make an empty file ours. Harmless on one that is.
pub(crate) const SCHEMA: &str = include_str!("schema.sql");

/// Marks a file as ours in its header: `Simb`.
pub(crate) const APPLICATION_ID: i32 = 0x5369_6d62;

/// The version of the tables that this code reads and writes.
pub(crate) const VERSION: i32 = 1;

/// What a file says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) application: i32,
    pub(crate) version: i32,
    /// Whether there is anything in it.
    pub(crate) empty: bool,
}

impl Mark {
    /// Reads the mark of an open file. The first thing that is asked of it, so a file that is no database is
    /// found here.
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
    fn the_schema_carries_the_marks_and_can_be_applied_again() {
        let connection = Connection::open_in_memory().unwrap();
        assert!(Mark::read(&connection).unwrap().empty);
        for _ in 0..2 {
            connection.execute_batch(SCHEMA).unwrap();
            let ours = Mark { application: APPLICATION_ID, version: VERSION, empty: false };
            assert_eq!(Mark::read(&connection).unwrap(), ours);
        }
    }
}
