//! The table, as a file.

use crate::table::TableName;

/// The table of the seeds, with the owner's column of later versions.
const SCHEMA: &str = include_str!("schema.sql");

/// The statement that makes the table under this name.
pub(crate) fn statement(table: &TableName) -> String {
    SCHEMA.replace(&TableName::default().to_string(), &table.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_name_that_was_asked_for() {
        assert!(statement(&TableName::default()).contains("`simba_mutex`"));
        let other = statement(&"locks".parse().unwrap());
        assert!(other.contains("`locks`") && !other.contains("simba_mutex"));
    }
}
