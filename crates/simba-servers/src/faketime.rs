//! Servers with a modified clock.

/// Returns the library of Debian's package `faketime` to preload into a server; `threaded` for a server with threads.
#[must_use]
pub fn faketime_library(threaded: bool) -> String {
    let name = if threaded { "libfaketimeMT" } else { "libfaketime" };
    format!("/usr/lib/{}-linux-gnu/faketime/{name}.so.1", std::env::consts::ARCH)
}
