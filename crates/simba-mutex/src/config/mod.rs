//! Layered configuration: files, environment variables, code.

mod document;
mod keys;
mod resolve;
mod variables;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::ConnectUrl;
use simba_core::{Error, ErrorKind, Lease, Result, Simba};

use document::{Node, Table};
use keys::{KEYS, Key, Origin, STORES};
use variables::Variable;

/// The settings of a connection, from files, environment variables and code.
///
/// Later settings override earlier ones: read files first, then the environment, then set values in code. A setting in
/// the table of a store overrides the same setting for all stores.
///
/// | key | default | what |
/// |---|---|---|
/// | `enabled` | `true` | if `false`, connecting fails |
/// | `url` | `sqlite:` | the store |
/// | `password`, `password-file` | | the password, or a file with it that is read at every connection, instead of a password in the URL |
/// | `ttl`, `transition` | `10s`, `6s` | the [`Lease`] |
/// | `grace`, `poll` | half the transition, the ttl | see [`Lease`] |
/// | `initial-delay` | `0s` | how long a contention waits before its first attempt |
///
/// Each store has a table with the same keys: `sqlite`, `mysql` (also `jdbc`, `mariadb`), `postgres`, `redis`,
/// `zookeeper`, `etcd`. In YAML, all keys may be below `simba:`, as with the Spring Boot starter of JVM Simba. The
/// environment variables are `SIMBA_URL`, `SIMBA_TTL`, `SIMBA_REDIS_TTL` and so on. A variable with a similar name, such
/// as `SIMBA_URI`, is refused: if it were ignored, the program would contend on the wrong store.
///
/// # Examples
///
/// ```
/// use simba_mutex::Config;
///
/// let config = Config::new().toml("ttl = \"5s\"\n[redis]\nttl = \"3s\"\n", "simba.toml")?.url("sqlite:orders.db");
/// let settings = config.resolve()?;
/// assert_eq!(settings.lease.ttl().as_secs(), 5);
/// # Ok::<(), simba_mutex::Error>(())
/// ```
#[derive(Clone, Default)]
#[must_use]
pub struct Config {
    settings: BTreeMap<Key, Setting>,
    /// The variables that are refused, each with the reason.
    refused: BTreeMap<String, String>,
    /// The unknown variables that start with `SIMBA_`.
    unknown: BTreeSet<String>,
}

#[derive(Clone)]
struct Setting {
    value: String,
    origin: Origin,
}

/// The resolved settings of a [`Config`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// The URL of the store, with its password.
    pub url: ConnectUrl,
    /// The lease of mutexes.
    pub lease: Lease,
    /// How long a contention waits before its first attempt.
    pub initial_delay: Duration,
    /// The unknown variables that start with `SIMBA_`. They are ignored.
    pub unknown_variables: Vec<String>,
}

impl Config {
    /// Returns a configuration with the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a file: YAML if its name ends with `.yaml` or `.yml`, otherwise TOML.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] with the line and the fix. The error contains no value, since that may be a secret.
    pub fn file(self, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| {
            let message = format!("cannot read {}: {error}", path.display());
            Error::new(ErrorKind::Config, message).with_source(error)
        })?;
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("yaml" | "yml") => self.yaml(&text, path),
            _ => self.toml(&text, path),
        }
    }

    /// Reads settings in TOML; `name` is the name of the text in errors.
    ///
    /// # Errors
    ///
    /// As [`file`](Self::file).
    pub fn toml(self, text: &str, name: impl Into<PathBuf>) -> Result<Self> {
        let name = Arc::new(name.into());
        match document::from_toml(text) {
            Ok(found) => self.read(&found, &name),
            Err(error) => Err(invalid(&Origin::File(name, error.line), &error.message)),
        }
    }

    /// Reads settings in YAML; `name` is the name of the text in errors.
    ///
    /// # Errors
    ///
    /// As [`file`](Self::file).
    pub fn yaml(self, text: &str, name: impl Into<PathBuf>) -> Result<Self> {
        let name = Arc::new(name.into());
        match document::from_yaml(text) {
            Ok(found) => self.read(&found, &name),
            Err(error) => Err(invalid(&Origin::File(name, error.line), &error.message)),
        }
    }

    /// Reads the environment of this process. See [`variables`](Self::variables).
    pub fn environment(mut self) -> Self {
        let named = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        let (mut readable, mut unreadable) = (Vec::new(), Vec::new());
        for (name, value) in named {
            match value.into_string() {
                Ok(value) => readable.push((name, value)),
                Err(_) => unreadable.push(name),
            }
        }
        for name in unreadable {
            match variables::classify(&name) {
                Variable::Setting(_) => {
                    self.refused.insert(name, "the value is not UTF-8".into());
                }
                Variable::Misspelt(intended) => self.refuse_misspelt(name, &intended),
                Variable::Unknown => {
                    self.unknown.insert(name);
                }
                Variable::Other => {}
            }
        }
        self.variables(readable)
    }

    /// Reads variables. A URL overrides the URLs of all stores in files that were read before.
    /// [`resolve`](Self::resolve) fails if the name of one is similar to that of a setting. Other variables that are not
    /// settings are ignored.
    pub fn variables(mut self, variables: impl IntoIterator<Item = (String, String)>) -> Self {
        for (name, value) in variables {
            match variables::classify(&name) {
                Variable::Setting(key) => {
                    if key.name == "url" {
                        // The variable selects the store, also if it names another store than a file.
                        self.settings.retain(|key, setting| {
                            key.name != "url" || !matches!(setting.origin, Origin::File(..))
                        });
                    }
                    self.settings.insert(key, Setting { value, origin: Origin::Environment(name) });
                }
                Variable::Misspelt(intended) => self.refuse_misspelt(name, &intended),
                Variable::Unknown => {
                    self.unknown.insert(name);
                }
                Variable::Other => {}
            }
        }
        self
    }

    /// Sets the store. Overrides files and environment.
    pub fn url(self, url: impl Into<String>) -> Self {
        self.set("url", url.into())
    }

    /// Sets the lease. Overrides files and environment.
    pub fn lease(self, ttl: Duration, transition: Duration) -> Self {
        let text = |time| humantime::format_duration(time).to_string();
        self.set("ttl", text(ttl)).set("transition", text(transition))
    }

    /// Resolves all layers.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for an invalid value and for contradicting values, with the line and the fix, and for a
    /// variable that is probably misspelt.
    pub fn resolve(&self) -> Result<Settings> {
        if let Some((name, reason)) = self.refused.first_key_value() {
            return Err(invalid(&Origin::Environment(name.clone()), reason));
        }
        let settings = resolve::resolve(&self.settings)?;
        Ok(Settings { unknown_variables: self.unknown.iter().cloned().collect(), ..settings })
    }

    /// Resolves all layers and connects to the store.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve) and [`connect`](crate::connect).
    pub async fn connect(&self) -> Result<Simba> {
        let settings = self.resolve()?;
        let backend = crate::backend(&settings.url).await?;
        Ok(Simba::builder(backend).with_lease(settings.lease).build())
    }

    /// Sets a value for all stores, and removes the values of single stores.
    fn set(mut self, name: &'static str, value: String) -> Self {
        self.settings.retain(|key, _| key.name != name);
        self.settings.insert(Key { store: None, name }, Setting { value, origin: Origin::Code });
        self
    }

    fn read(mut self, found: &Table, name: &Arc<PathBuf>) -> Result<Self> {
        // A file for several programs has the settings of Simba below one key.
        let found = match found.get("simba") {
            Some((_, Node::Table(ours))) => ours,
            _ => found,
        };
        for (key, (line, node)) in found {
            let origin = Origin::File(Arc::clone(name), *line);
            match (keys::key(key), keys::store(key), node) {
                (Some(known), _, Node::Value(value)) => self.put(None, known, value, origin),
                (None, Some(store), Node::Table(table)) => self.read_store(store, table, name)?,
                (None, None, _) => return Err(unknown(&origin, key, true)),
                _ => return Err(invalid(&origin, &format!("`{key}` has a value of the wrong type"))),
            }
        }
        Ok(self)
    }

    fn read_store(&mut self, store: &'static str, table: &Table, name: &Arc<PathBuf>) -> Result<()> {
        for (key, (line, node)) in table {
            let origin = Origin::File(Arc::clone(name), *line);
            match (keys::key(key), node) {
                (Some(known), Node::Value(value)) => self.put(Some(store), known, value, origin),
                (Some(_), _) => {
                    return Err(invalid(&origin, &format!("`{key}` has a value of the wrong type")));
                }
                (None, _) => return Err(unknown(&origin, key, false)),
            }
        }
        Ok(())
    }

    fn refuse_misspelt(&mut self, name: String, intended: &str) {
        let reason = format!("unknown variable, probably a misspelt {intended}: rename it, or unset it");
        self.refused.insert(name, reason);
    }

    fn put(&mut self, store: Option<&'static str>, name: &'static str, value: &str, origin: Origin) {
        self.settings.insert(Key { store, name }, Setting { value: value.to_owned(), origin });
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origins =
            self.settings.iter().map(|(key, setting)| (key.to_string(), setting.origin.to_string()));
        f.debug_map().entries(origins).finish()
    }
}

fn invalid(origin: &Origin, message: &str) -> Error {
    Error::new(ErrorKind::Config, format!("{origin}: {message}"))
}

fn unknown(origin: &Origin, key: &str, at_top_level: bool) -> Error {
    let mut known = KEYS.to_vec();
    if at_top_level {
        known.extend(STORES.iter().map(|(name, _)| *name));
    }
    invalid(origin, &format!("unknown key `{key}`; the keys are {}", known.join(", ")))
}

#[cfg(test)]
mod tests;
