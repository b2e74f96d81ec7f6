//! The tables: their names, their making, and whether they are as they should be.

use std::fmt;

use simba_core::{Error, ErrorKind, Result};

/// The statements that make the tables.
const DDL: &str = include_str!("schema.sql");

/// A name that goes into statements as it is, so that its pattern is fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identifier(String);

impl Identifier {
    /// Short enough that no name made of it reaches the server's 63 bytes.
    const MAX_LEN: usize = 40;

    pub(crate) fn new(what: &str, name: &str) -> Result<Self> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let right = (1..=Self::MAX_LEN).contains(&name.len())
            && name.chars().all(plain)
            && !name.starts_with(|c: char| c.is_ascii_digit());
        if right {
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

/// Where the tables are.
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

    /// Puts the names into a text.
    pub(crate) fn name(&self, text: &str) -> String {
        text.replace("{mutex}", &self.mutex())
            .replace("{waiter}", &self.waiter())
            .replace("{place}", &format!("{}_waiter_place", self.prefix))
    }

    /// What a person runs to set the store up.
    pub(crate) fn ddl(&self) -> String {
        self.name(DDL)
    }

    /// What a person runs to let a user contend, and no more.
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

/// Asks for the columns of the tables `$1`; no row for a table that is not there.
pub(crate) const COLUMNS: &str = "SELECT t.name, a.attname::text, format_type(a.atttypid, a.atttypmod) \
     FROM unnest($1::text[]) AS t (name) \
     JOIN pg_attribute a ON a.attrelid = to_regclass(t.name) AND a.attnum > 0 AND NOT a.attisdropped";

/// What the server says about the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// As they should be.
    Right,
    /// Not there, or not all of them.
    Missing,
    /// There, and somebody else's: what is wrong.
    Foreign(String),
}

impl Shape {
    /// Judges the columns that [`COLUMNS`] gave: table, column, type.
    pub(crate) fn of(tables: &Tables, columns: &[(String, String, String)]) -> Self {
        let mut missing = false;
        for (table, wanted) in [(tables.mutex(), MUTEX), (tables.waiter(), WAITER)] {
            let has: Vec<_> = columns.iter().filter(|(name, ..)| *name == table).collect();
            missing |= has.is_empty();
            let wrong =
                wanted.iter().find(|(column, kind)| !has.iter().any(|(_, c, k)| c == column && k == kind));
            if let (false, Some((column, kind))) = (has.is_empty(), wrong) {
                return Self::Foreign(format!("the table {table} has no column `{column}` of type {kind}"));
            }
        }
        if missing { Self::Missing } else { Self::Right }
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
    fn a_name_that_could_be_more_than_a_name_is_refused() {
        for bad in ["", "1a", "a-b", "a b", "a\"", "A", "ä", &"a".repeat(41)] {
            assert!(Identifier::new("prefix", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn tables_are_right_missing_or_foreign() {
        let tables = Tables::default();
        let mut all = columns(&tables);
        assert_eq!(Shape::of(&tables, &all), Shape::Right);
        assert_eq!(Shape::of(&tables, &all[..MUTEX.len()]), Shape::Missing);
        all[3].2 = "integer".into();
        let foreign = Shape::of(&tables, &all);
        assert!(matches!(foreign, Shape::Foreign(what) if what.contains("`token` of type bigint")));
    }
}
