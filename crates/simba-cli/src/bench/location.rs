//! Selects what to measure: the store itself, or a temporary file on the disk of the store.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

use simba_mutex::spi::ConnectUrl;
use simba_mutex::sqlite::SqliteConfig;

use crate::failure::{Failure, code};

/// The location of the store to measure.
#[derive(Debug)]
pub(crate) struct Location {
    pub(crate) url: ConnectUrl,
    /// A directory for this benchmark only, removed at its end.
    directory: Option<PathBuf>,
}

impl Location {
    /// Returns the URL of a server unchanged. For a file, returns another one on the same disk: a store keeps an
    /// entry for every name that it has ever seen.
    pub(crate) fn of(url: &ConnectUrl) -> Result<Self, Failure> {
        if url.scheme() != "sqlite" {
            return Ok(Self { url: url.clone(), directory: None });
        }
        let path = SqliteConfig::from_url(url)?.path().to_owned();
        let directory = path.with_extension(format!("bench-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&directory).map_err(|error| {
            let directory = directory.display();
            Failure::new(code::DENIED, format!("cannot create the directory `{directory}`: {error}"))
        })?;
        let url = format!("sqlite:{}", directory.join("simba.db").display());
        Ok(Self { url: url.parse()?, directory: Some(directory) })
    }
}

impl Drop for Location {
    fn drop(&mut self) {
        if let Some(directory) = &self.directory {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}
