//! Selects the store, by the command line, the environment and files.

use std::path::{Path, PathBuf};
use std::{env, fmt, fs, io};

use simba_mutex::spi::ConnectUrl;
use simba_mutex::sqlite::SqliteConfig;
use simba_mutex::{Config, Error, Settings, Simba};

use crate::args::{Cli, Command};
use crate::failure::{Failure, code};

/// An open store and its settings.
pub(crate) struct Store {
    pub(crate) simba: Simba,
    pub(crate) settings: Settings,
}

impl Store {
    /// Opens the store of the command line, the environment or the configuration.
    pub(crate) async fn open(cli: &Cli) -> Result<Self, Failure> {
        let settings = settings(cli)?;
        refuse_memory(&settings.url, &cli.command)?;
        tracing::debug!(url = %settings.url, "connecting");
        let backend = simba_mutex::backend(&settings.url).await?;
        let simba = Simba::builder(backend).with_lease(settings.lease).build();
        Ok(Self { simba, settings })
    }
}

impl fmt::Display for Store {
    /// Shows the URL without secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = &self.settings.url;
        match SqliteConfig::from_url(url) {
            // The default file has a path that the user did not type.
            Ok(file) if url.path().is_empty() => write!(f, "sqlite:{}", file.path().display()),
            _ => write!(f, "{url}"),
        }
    }
}

/// Reads the settings: from files, then the environment, then the command line.
pub(crate) fn settings(cli: &Cli) -> Result<Settings, Failure> {
    let mut config = Config::new();
    let named = cli.config.clone().or_else(|| env::var_os("SIMBA_CONFIG").map(PathBuf::from));
    if let Some(file) = named.or_else(default_file) {
        config = config.file(file)?;
    }
    config = config.environment();
    if let Some(url) = &cli.url {
        let typed = |error: Error| Failure::new(code::USAGE, format!("--on: {error}"));
        config = config.url(url.parse::<ConnectUrl>().map(|_| url).map_err(typed)?);
    }
    let settings = config.resolve()?;
    for variable in &settings.unknown_variables {
        tracing::info!(variable, "unknown variable ignored");
    }
    refuse_missing_directory(&settings.url)?;
    Ok(settings)
}

/// Refuses to run a command under a mutex that no other process can see.
fn refuse_memory(url: &ConnectUrl, command: &Command) -> Result<(), Failure> {
    let runs = matches!(command, Command::Run(_) | Command::Lead(_) | Command::Schedule(_));
    if url.scheme() != "memory" || !runs {
        return Ok(());
    }
    let message = "`memory:` is visible to this process only, so other processes would run their command at \
                   the same time: use sqlite:PATH for one host, or a server";
    Err(Failure::new(code::CONFIG, message))
}

/// Refuses a file in a directory that does not exist: the path may be misspelt, or a disk not mounted, and the other
/// processes would contend elsewhere. Only the directory of the default file is created.
fn refuse_missing_directory(url: &ConnectUrl) -> Result<(), Failure> {
    if url.scheme() != "sqlite" || url.path().is_empty() {
        return Ok(());
    }
    let file = SqliteConfig::from_url(url)?;
    let Some(directory) = file.path().parent().filter(|parent| !parent.as_os_str().is_empty()) else {
        return Ok(());
    };
    match fs::metadata(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let message = format!(
                "the directory `{}` of the store does not exist: correct the path, or create it",
                directory.display()
            );
            Err(Failure::new(code::CONFIG, message))
        }
        // Other errors are reported when the file is opened.
        _ => Ok(()),
    }
}

/// Returns the path of the default configuration file, if there is one. A file that cannot be read counts: without it,
/// the store would be another one.
fn default_file() -> Option<PathBuf> {
    // Other paths would be relative to the current directory. The XDG base directory specification ignores them.
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let own = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")));
    let folders = own.into_iter().chain([PathBuf::from("/etc")]);
    folders
        .flat_map(|folder| {
            ["config.toml", "config.yaml", "config.yml"].map(|name| folder.join("simba").join(name))
        })
        .find(|file| !is_absent(file))
}

fn is_absent(file: &Path) -> bool {
    let absent = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
    fs::symlink_metadata(file).is_err_and(|error| absent.contains(&error.kind()))
}
