//! The table: its name, its `CREATE TABLE` statement, and the check whether an existing one is Simba's.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use simba_core::spi::Claim;
use simba_core::{Error, ErrorKind, Result};

use crate::connection::Connection;
use crate::error::NAME;
use crate::shared::Shared;
use crate::statements::literal;

const LIMIT: Duration = Duration::from_secs(5);

/// The table of JVM Simba, with the `owner_id` column of its later versions.
const SCHEMA: &str = include_str!("schema.sql");

/// Returns the statement that creates the table under this name.
pub(crate) fn statement(table: &TableName) -> String {
    SCHEMA.replace(&TableName::default().to_string(), &table.to_string())
}

/// A table name: a letter or `_`, then up to 63 letters, digits and `_`. `Display` quotes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableName(String);

const DEFAULT: &str = "simba_mutex";
const MAX_LEN: usize = 64;

impl TableName {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for TableName {
    fn default() -> Self {
        Self(DEFAULT.to_owned())
    }
}

impl FromStr for TableName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let fits = name.len() <= MAX_LEN && name.chars().all(plain);
        if fits && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
            return Ok(Self(name.to_owned()));
        }
        let message = "a table name is a letter or `_`, then up to 63 of A-Z a-z 0-9 _";
        Err(Error::new(ErrorKind::Invalid, message))
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.0)
    }
}

const COLUMNS: &str = "SELECT LOWER(column_name), LOWER(data_type), LOWER(column_type), \
    COALESCE(character_maximum_length, 0), COALESCE(LOWER(character_set_name), '') \
    FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = ?";
type ColumnInfo = (String, String, String, u64, String);

/// The unique keys of one whole column, and that column. A key of an expression has no column.
const UNIQUE: &str = "SELECT index_name, LOWER(MAX(column_name)) FROM information_schema.statistics \
    WHERE table_schema = DATABASE() AND table_name = ? AND non_unique = 0 \
    GROUP BY index_name HAVING COUNT(*) = 1 AND MAX(sub_part) IS NULL AND MAX(column_name) IS NOT NULL";

/// The widths of the table's columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    mutex_len: u64,
    owner_len: u64,
    /// The greatest version that fits.
    pub(crate) max_version: u64,
    is_utf8mb4: bool,
}

impl Shape {
    /// Reads the definition of the table.
    ///
    /// # Errors
    ///
    /// The table is missing, not readable, or another program's; the error names the fix.
    pub(crate) async fn read(connection: &mut Connection, shared: &Shared) -> Result<Self> {
        connection.execute(LIMIT, &shared.statements.columns()).await?;
        let table = literal(shared.config.table.as_str());
        let columns: Vec<ColumnInfo> = connection.query(LIMIT, &COLUMNS.replace('?', &table)).await?;
        let unique: Vec<(String, String)> = connection.query(LIMIT, &UNIQUE.replace('?', &table)).await?;
        // Without a unique name one mutex could have two rows.
        let index = unique.into_iter().find_map(|(index, column)| (column == "mutex").then_some(index));
        let (shape, index) = Self::of(&columns).zip(index).ok_or_else(|| foreign_shape(shared))?;
        shared.statements.use_index(&index);
        Ok(shape)
    }

    fn of(columns: &[ColumnInfo]) -> Option<Self> {
        let column = |name: &str| columns.iter().find(|column| column.0 == name);
        let (mutex, owner, version) = (column("mutex")?, column("owner_id")?, column("version")?);
        let is_text = |column: &ColumnInfo| matches!(&*column.1, "char" | "varchar");
        let is_time = |name: &str| column(name).is_some_and(|column| column.1 == "bigint");
        let times = ["acquired_at", "ttl_at", "transition_at"].iter().all(|name| is_time(name));
        if !is_text(mutex) || !is_text(owner) || !times {
            return None;
        }
        let unsigned = version.2.contains("unsigned");
        let bits = match &*version.1 {
            "int" => 32,
            "bigint" => 64,
            _ => return None,
        };
        let max_version = u64::MAX >> (64 - bits + u32::from(!unsigned));
        Some(Self { mutex_len: mutex.3, owner_len: owner.3, max_version, is_utf8mb4: mutex.4 == "utf8mb4" })
    }

    /// Refuses a claim whose name or id the table would truncate, or confuse with another name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`], with the fix.
    pub(crate) fn fits(&self, claim: &Claim, shared: &Shared) -> Result<()> {
        let (mutex, id) = (claim.mutex.as_str(), claim.contender.as_str());
        let table = &shared.config.table;
        let long = |text: &str, len: u64| text.chars().count() as u64 > len;
        let refusal = if long(id, self.owner_len) {
            let len = self.owner_len;
            format!(
                "the id `{id}` is longer than the {len} characters of owner_id in {table}: choose a shorter one, \
                     or ALTER TABLE {table} MODIFY owner_id VARCHAR(128) NOT NULL"
            )
        } else if long(mutex, self.mutex_len) {
            let len = self.mutex_len;
            format!(
                "the name is longer than the {len} characters of the column mutex in {table}: \
                     ALTER TABLE {table} MODIFY mutex VARCHAR(66) NOT NULL"
            )
        } else if !self.is_utf8mb4 && !mutex.is_ascii() {
            format!(
                "the column mutex in {table} cannot store every character of the name: \
                     ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4"
            )
        } else if mutex.ends_with(' ') {
            format!("{table} treats a name with a trailing space as equal to one without: remove it")
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Config, refusal).with_backend(NAME).with_mutex(&claim.mutex))
    }
}

pub(crate) fn foreign_shape(shared: &Shared) -> Error {
    let message = format!(
        "the table {} has another shape than Simba's: name another with `table`, then run `simba schema --apply`",
        shared.config.table
    );
    Error::new(ErrorKind::Config, message).with_backend(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_configured_name() {
        assert!(statement(&TableName::default()).contains("`simba_mutex`"));
        let other = statement(&"locks".parse().unwrap());
        assert!(other.contains("`locks`") && !other.contains("simba_mutex"));
    }

    #[test]
    fn valid_names_are_quoted_and_others_refused() {
        assert_eq!("locks_2".parse::<TableName>().unwrap().to_string(), "`locks_2`");
        for wrong in ["", "2x", "a b", "a`b", "a;b", "db.t", "ä", &"x".repeat(65)] {
            let error = wrong.parse::<TableName>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{wrong}");
        }
    }

    fn columns(owner: &str, version: &str) -> Vec<ColumnInfo> {
        let column = |name: &str, kind: &str, len| {
            let data = kind.split(['(', ' ']).next().unwrap().to_owned();
            (name.to_owned(), data, kind.to_owned(), len, "latin1".to_owned())
        };
        vec![
            column("mutex", "varchar(66)", 66),
            column("acquired_at", "bigint(20) unsigned", 0),
            column("ttl_at", "bigint(20) unsigned", 0),
            column("transition_at", "bigint(20) unsigned", 0),
            column("owner_id", owner, 32),
            column("version", version, 0),
        ]
    }

    #[test]
    fn old_and_new_tables_are_accepted() {
        let old = Shape::of(&columns("char(32)", "int(10) unsigned")).unwrap();
        assert_eq!((old.owner_len, old.max_version), (32, u64::from(u32::MAX)));
        let new = Shape::of(&columns("varchar(128)", "bigint unsigned")).unwrap();
        assert_eq!(new.max_version, u64::MAX);
        assert_eq!(Shape::of(&columns("char(32)", "int")).unwrap().max_version, (1 << 31) - 1);
    }

    #[test]
    fn a_table_of_another_shape_is_refused() {
        assert_eq!(Shape::of(&columns("bigint", "int unsigned")), None);
        assert_eq!(Shape::of(&columns("char(32)", "varchar(9)")), None);
        assert_eq!(Shape::of(&columns("char(32)", "int unsigned")[1..]), None);
    }
}
