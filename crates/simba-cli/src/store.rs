//! Which store, by the command line, the environment and files.

use std::path::PathBuf;
use std::{env, fmt, fs, io};

use simba_mutex::sqlite::SqliteConfig;
use simba_mutex::{Config, ConnectUrl, Error, Settings, Simba};

use crate::args::{Cli, Command};
use crate::failure::{Failure, code};

/// An open store, and what was settled about it.
pub(crate) struct Store {
    pub(crate) simba: Simba,
    pub(crate) settings: Settings,
}

impl Store {
    /// Opens the store that is meant.
    pub(crate) async fn open(cli: &Cli) -> Result<Self, Failure> {
        let settings = settings(cli)?;
        refuse_memory(&settings.url, &cli.command)?;
        tracing::debug!(url = %settings.url, "connecting");
        let backend = simba_mutex::backend(&settings.url).await?;
        let simba = Simba::builder(backend).lease(settings.lease).build();
        Ok(Self { simba, settings })
    }
}

impl fmt::Display for Store {
    /// Where it is, without secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = &self.settings.url;
        match SqliteConfig::from_url(url) {
            // The file of this user has a path that nobody typed.
            Ok(file) if url.path().is_empty() => write!(f, "sqlite:{}", file.path().display()),
            _ => write!(f, "{url}"),
        }
    }
}

/// Files first, then the environment, then what was typed.
pub(crate) fn settings(cli: &Cli) -> Result<Settings, Failure> {
    let mut config = Config::new();
    let named = cli.config.clone().or_else(|| env::var_os("SIMBA_CONFIG").map(PathBuf::from));
    if let Some(file) = named.or_else(usual_file) {
        config = config.file(file)?;
    }
    config = config.environment();
    if let Some(url) = &cli.url {
        let typed = |error: Error| Failure::new(code::USAGE, format!("--on: {error}"));
        config = config.url(url.parse::<ConnectUrl>().map(|_| url).map_err(typed)?);
    }
    let settings = config.resolve()?;
    for variable in &settings.unknown_variables {
        tracing::info!(variable, "the variable is set and has no meaning: ignored");
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
    let message = "`memory:` is seen by this process alone, so every other one would run its command at the same \
                   time: use sqlite:PATH for one host, or a server";
    Err(Failure::new(code::CONFIG, message))
}

/// Refuses a file in a directory that is not there: it may be misspelt, or a disk that is not mounted, and the
/// others contend elsewhere. Only the directory of the default is made.
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
                "the directory `{}` of the store does not exist: correct the path, or make it",
                directory.display()
            );
            Err(Failure::new(code::CONFIG, message))
        }
        // What else is wrong with it is found when the file is opened.
        _ => Ok(()),
    }
}

/// Where settings are kept, if there are any.
fn usual_file() -> Option<PathBuf> {
    let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    let own = env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).or(home);
    let folders = own.into_iter().chain([PathBuf::from("/etc")]);
    folders
        .flat_map(|folder| {
            ["config.toml", "config.yaml", "config.yml"].map(|name| folder.join("simba").join(name))
        })
        .find(|file| file.is_file())
}
