use std::env;

/// What a variable of the test command says, such as the URL of a server that all tests share.
///
/// # Panics
///
/// If it is not set: a server that is missing fails the test, with a message that says how to start it.
#[must_use]
pub fn shared(variable: &str) -> String {
    env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: run `eval \"$(cargo xtask servers up)\"` first, or `cargo xtask test`")
    })
}
