//! Where to measure: at the store itself, or beside it where that leaves nothing behind.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

use simba_mutex::ConnectUrl;
use simba_mutex::sqlite::SqliteConfig;

use crate::failure::{Failure, code};

/// A store to measure.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) url: ConnectUrl,
    /// Of the benchmark alone, and gone with it.
    folder: Option<PathBuf>,
}

impl Place {
    /// A server as it is; for a file another one on the same disk, since a store keeps a line for every name that
    /// it has ever seen.
    pub(crate) fn of(url: &ConnectUrl) -> Result<Self, Failure> {
        if url.scheme() != "sqlite" {
            return Ok(Self { url: url.clone(), folder: None });
        }
        let path = SqliteConfig::from_url(url)?.path().to_owned();
        let folder = path.with_extension(format!("bench-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&folder).map_err(|error| {
            let folder = folder.display();
            Failure::new(code::DENIED, format!("cannot make the folder `{folder}` to measure in: {error}"))
        })?;
        let place = format!("sqlite:{}", folder.join("simba.db").display());
        Ok(Self { url: place.parse()?, folder: Some(folder) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}
