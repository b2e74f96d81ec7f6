//! The tables: their names, DDL and grants, and a check of their columns.

use std::fmt;

use simba_core::{Error, ErrorKind, Result};

/// The statements that create the tables.
const DDL: &str = include_str!("schema.sql");

/// An identifier that goes into statements unquoted; its characters are restricted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identifier(String);

impl Identifier {
    /// Keeps every name that is built from it below the server's limit of 63 bytes.
    const MAX_LEN: usize = 40;

    pub(crate) fn new(what: &str, name: &str) -> Result<Self> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let valid = (1..=Self::MAX_LEN).contains(&name.len())
            && name.chars().all(plain)
            && !name.starts_with(|c: char| c.is_ascii_digit());
        if valid {
            return Ok(Self(name.into()));
        }
        let message = format!("the {what} is 1 to {} of a-z 0-9 _, not starting with a digit", Self::MAX_LEN);
        Err(Error::new(ErrorKind::Invalid, message).with_backend(crate::NAME))
    }
}

impl fmt::Display for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The names of the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) schema: Option<Identifier>,
    pub(crate) prefix: Identifier,
}

impl Default for Tables {
    fn default() -> Self {
        Self { schema: None, prefix: Identifier("simba".into()) }
    }
}

impl Tables {
    pub(crate) fn mutex(&self) -> String {
        self.qualified("mutex")
    }

    pub(crate) fn waiter(&self) -> String {
        self.qualified("waiter")
    }

    fn qualified(&self, table: &str) -> String {
        match &self.schema {
            Some(schema) => format!("{schema}.{}_{table}", self.prefix),
            None => format!("{}_{table}", self.prefix),
        }
    }

    /// Replaces the placeholders for names in a text.
    pub(crate) fn with_names(&self, text: &str) -> String {
        text.replace("{mutex}", &self.mutex())
            .replace("{waiter}", &self.waiter())
            .replace("{place}", &format!("{}_waiter_place", self.prefix))
    }

    /// Returns the statements that create the tables.
    pub(crate) fn ddl(&self) -> String {
        self.with_names(DDL)
    }

    /// Returns the statements that grant a user the privileges that contending needs, and no more.
    pub(crate) fn grants(&self, user: &str) -> String {
        let user = user.replace('"', "\"\"");
        let (mutex, waiter) = (self.mutex(), self.waiter());
        let schema = self.schema.as_ref().map_or("public", |schema| &schema.0);
        format!(
            "GRANT USAGE ON SCHEMA {schema} TO \"{user}\"; \
             GRANT SELECT, INSERT, UPDATE ON {mutex} TO \"{user}\"; \
             GRANT SELECT, INSERT, UPDATE, DELETE ON {waiter} TO \"{user}\";"
        )
    }
}

const MUTEX: &[(&str, &str)] = &[
    ("mutex", "character varying(66)"),
    ("owner", "text"),
    ("session", "text"),
    ("token", "bigint"),
    ("acquired_at", "timestamp with time zone"),
    ("renewed_at", "timestamp with time zone"),
    ("ttl_at", "timestamp with time zone"),
    ("until", "timestamp with time zone"),
    ("waited", "bigint"),
    ("watched", "bigint"),
];

const WAITER: &[(&str, &str)] = &[
    ("mutex", "character varying(66)"),
    ("session", "text"),
    ("contender", "text"),
    ("channel", "text"),
    ("watches", "boolean"),
    ("place", "bigint"),
    ("until", "timestamp with time zone"),
];

/// Reads the columns of the tables `$1`; no row for a missing table.
pub(crate) const COLUMNS: &str = "SELECT t.name, a.attname::text, format_type(a.atttypid, a.atttypmod) \
     FROM unnest($1::text[]) AS t (name) \
     JOIN pg_attribute a ON a.attrelid = to_regclass(t.name) AND a.attnum > 0 AND NOT a.attisdropped";

/// The result of comparing the tables with the expected columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// All columns are as expected.
    Valid,
    /// At least one table does not exist.
    Missing,
    /// A table has other columns, for the reason given.
    Mismatch(String),
}

impl Shape {
    /// Checks the result of [`COLUMNS`]: table, column, type.
    pub(crate) fn from_columns(tables: &Tables, columns: &[(String, String, String)]) -> Self {
        let mut missing = false;
        for (table, expected) in [(tables.mutex(), MUTEX), (tables.waiter(), WAITER)] {
            let has: Vec<_> = columns.iter().filter(|(name, ..)| *name == table).collect();
            missing |= has.is_empty();
            let wrong =
                expected.iter().find(|(column, kind)| !has.iter().any(|(_, c, k)| c == column && k == kind));
            if let (false, Some((column, kind))) = (has.is_empty(), wrong) {
                return Self::Mismatch(format!("the table {table} has no column `{column}` of type {kind}"));
            }
        }
        if missing { Self::Missing } else { Self::Valid }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(tables: &Tables) -> Vec<(String, String, String)> {
        let of = |table: String, columns: &[(&str, &str)]| {
            columns.iter().map(move |(c, k)| (table.clone(), (*c).into(), (*k).into())).collect::<Vec<_>>()
        };
        [of(tables.mutex(), MUTEX), of(tables.waiter(), WAITER)].concat()
    }

    #[test]
    fn names_follow_the_schema_and_the_prefix() {
        let tables = Tables {
            schema: Some(Identifier::new("schema", "locks").unwrap()),
            prefix: Identifier::new("prefix", "app").unwrap(),
        };
        let ddl = tables.ddl();
        assert!(ddl.contains("locks.app_mutex (") && ddl.contains("app_waiter_place ON locks.app_waiter"));
        assert!(!ddl.contains('{'));
        assert!(tables.grants("a\"b").contains("ON locks.app_waiter TO \"a\"\"b\""));
    }

    #[test]
    fn an_identifier_with_other_characters_is_refused() {
        for bad in ["", "1a", "a-b", "a b", "a\"", "A", "ä", &"a".repeat(41)] {
            assert!(Identifier::new("prefix", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn tables_are_valid_missing_or_mismatched() {
        let tables = Tables::default();
        let mut all = columns(&tables);
        assert_eq!(Shape::from_columns(&tables, &all), Shape::Valid);
        assert_eq!(Shape::from_columns(&tables, &all[..MUTEX.len()]), Shape::Missing);
        all[3].2 = "integer".into();
        let mismatch = Shape::from_columns(&tables, &all);
        assert!(matches!(mismatch, Shape::Mismatch(what) if what.contains("`token` of type bigint")));
    }
}
