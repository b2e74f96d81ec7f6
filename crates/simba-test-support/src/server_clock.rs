use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use simba_servers::Setup;

/// Makes a server read the offset of its clock from this file. A server with threads needs another library.
pub fn with_server_clock(setup: Setup, file: &Path, has_threads: bool) -> Setup {
    setup
        .with_env("LD_PRELOAD", simba_servers::faketime_library(has_threads))
        .with_env("FAKETIME_TIMESTAMP_FILE", file)
        .with_env("FAKETIME_NO_CACHE", "1")
        .with_env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
}

/// Sets the clock of a server to a time in seconds since 1970, from which it continues.
pub fn set_server_clock(file: &Path, time: u64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let offset = i64::try_from(time).unwrap() - i64::try_from(now).unwrap();
    std::fs::write(file, format!("{offset:+}")).unwrap();
}
