//! The directory for downloads.

use std::env;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// Returns a directory of this user. In the shared temporary directory, any user could place a program.
pub(crate) fn dir() -> Result<PathBuf> {
    let own = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let own = own.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    let cache = own.context("neither XDG_CACHE_HOME nor HOME is set")?.join("simba-servers");
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    Ok(cache)
}
