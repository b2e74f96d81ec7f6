//! Where downloads are kept.

use std::env;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// Returns a folder of this user. Anybody could put a program of their own into the shared temporary one.
pub(crate) fn folder() -> Result<PathBuf> {
    let own = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let own = own.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    let cache = own.context("neither XDG_CACHE_HOME nor HOME is set")?.join("simba-servers");
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    Ok(cache)
}
