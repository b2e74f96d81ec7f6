//! Log lines: to stderr, at the requested level.

use std::io;

use tracing_subscriber::EnvFilter;

/// Sets up logging by `SIMBA_LOG`, or by the number of `-v`.
pub(crate) fn init(verbose: u8, quiet: bool) {
    let level = match verbose {
        0 if quiet => "error",
        0 => "warn",
        1 => "info,simba=debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env("SIMBA_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_target(false)
        // If stderr cannot be written, the error cannot be printed either.
        .log_internal_errors(false)
        .with_ansi(false)
        .try_init();
}
