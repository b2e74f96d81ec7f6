//! Simba on PostgreSQL: a table, a queue and NOTIFY.
