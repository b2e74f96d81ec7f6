//! Simba on SQLite: mutexes among the processes of one host, without any server.
