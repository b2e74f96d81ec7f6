//! Simba on MySQL and MariaDB: the table of JVM Simba, shared with JVM peers.
