//! Whether the table is Simba's, and what fits into it.

use std::time::Duration;

use mysql_async::Value;
use simba_core::{Claim, Error, ErrorKind, Result};

use crate::error::{Fault, NAME};
use crate::link::{Link, foreign_shape};
use crate::site::Site;

const LIMIT: Duration = Duration::from_secs(5);

const COLUMNS: &str = "SELECT LOWER(column_name), LOWER(data_type), LOWER(column_type), \
    COALESCE(character_maximum_length, 0), COALESCE(LOWER(character_set_name), '') \
    FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = ?";
type Described = (String, String, String, u64, String);

/// The unique keys of one whole column, and that column. A key of an expression has no column.
const UNIQUE: &str = "SELECT index_name, LOWER(MAX(column_name)) FROM information_schema.statistics \
    WHERE table_schema = DATABASE() AND table_name = ? AND non_unique = 0 \
    GROUP BY index_name HAVING COUNT(*) = 1 AND MAX(sub_part) IS NULL AND MAX(column_name) IS NOT NULL";

/// How wide the columns of the table are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    mutex_len: u64,
    owner_len: u64,
    /// The greatest version that fits.
    pub(crate) max_version: u64,
    any_letter: bool,
}

impl Shape {
    /// Looks at the table.
    ///
    /// # Errors
    ///
    /// It is missing, may not be read, or is another program's; the error says what to do.
    pub(crate) async fn read(link: &mut Link, site: &Site) -> Result<Self> {
        link.command(LIMIT, &site.statements.columns).await.map_err(Fault::into_error)?;
        let table = Value::from(site.statements.table().as_str());
        let columns: Vec<Described> =
            link.query(LIMIT, COLUMNS, vec![table.clone()]).await.map_err(Fault::into_error)?;
        let unique: Vec<(String, String)> =
            link.query(LIMIT, UNIQUE, vec![table]).await.map_err(Fault::into_error)?;
        // Without a unique name two rows could be one mutex.
        let index = unique.into_iter().find_map(|(index, column)| (column == "mutex").then_some(index));
        let (shape, index) = Self::of(&columns).zip(index).ok_or_else(|| foreign_shape(site))?;
        site.statements.use_index(&index);
        Ok(shape)
    }

    fn of(columns: &[Described]) -> Option<Self> {
        let column = |name: &str| columns.iter().find(|column| column.0 == name);
        let (mutex, owner, version) = (column("mutex")?, column("owner_id")?, column("version")?);
        let is_text = |column: &Described| matches!(&*column.1, "char" | "varchar");
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
        Some(Self { mutex_len: mutex.3, owner_len: owner.3, max_version, any_letter: mutex.4 == "utf8mb4" })
    }

    /// Refuses what the table would cut off, or mix up with another name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] or [`ErrorKind::Invalid`], with the cure.
    pub(crate) fn fits(&self, claim: &Claim, site: &Site) -> Result<()> {
        let (mutex, id) = (claim.mutex.as_str(), claim.contender.as_str());
        let table = site.statements.table();
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
        } else if !self.any_letter && !mutex.is_ascii() {
            format!(
                "the column mutex in {table} cannot hold every letter of the name: \
                     ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4"
            )
        } else if mutex.ends_with(' ') {
            format!("{table} does not tell a name with a space at its end from one without: leave it out")
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Config, refusal).with_backend(NAME).with_mutex(&claim.mutex))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(owner: &str, version: &str) -> Vec<Described> {
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
    fn old_and_new_tables_are_simba_s() {
        let old = Shape::of(&columns("char(32)", "int(10) unsigned")).unwrap();
        assert_eq!((old.owner_len, old.max_version), (32, u64::from(u32::MAX)));
        let new = Shape::of(&columns("varchar(128)", "bigint unsigned")).unwrap();
        assert_eq!(new.max_version, u64::MAX);
        assert_eq!(Shape::of(&columns("char(32)", "int")).unwrap().max_version, (1 << 31) - 1);
    }

    #[test]
    fn a_table_of_another_shape_is_not() {
        assert_eq!(Shape::of(&columns("bigint", "int unsigned")), None);
        assert_eq!(Shape::of(&columns("char(32)", "varchar(9)")), None);
        assert_eq!(Shape::of(&columns("char(32)", "int unsigned")[1..]), None);
    }
}
