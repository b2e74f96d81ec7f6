//! What is told beside the output: to stderr, as much as is asked for.

use std::io;

use tracing_subscriber::EnvFilter;

/// Listens to `SIMBA_LOG`, or to the number of `-v`.
pub(crate) fn listen(verbose: u8, quiet: bool) {
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
        // Where stderr cannot be written there is nobody to tell of it either.
        .log_internal_errors(false)
        .with_ansi(false)
        .try_init();
}
