//! Starts and stops the servers that the tests run against.
