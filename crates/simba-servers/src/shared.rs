use std::env;

/// Returns the value of a variable of the test command, such as the URL of a server that all tests share.
///
/// # Panics
///
/// If it is not set: a missing server fails the test, with a message how to start it.
#[must_use]
pub fn shared(variable: &str) -> String {
    env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: run `eval \"$(cargo xtask servers up)\"` first, or `cargo xtask test`")
    })
}
