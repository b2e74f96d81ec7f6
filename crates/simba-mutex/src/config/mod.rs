//! Configuration in layers: files, the environment, code.

mod document;
mod keys;
mod resolve;
mod variables;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use simba_core::{ConnectUrl, Error, ErrorKind, Lease, Result, Simba};

use document::{Node, Table};
use keys::{KEYS, Key, Origin, STORES};
use variables::Variable;

/// Everything that a program needs to connect, from files, the environment and code.
///
/// What is set later wins: read files first, then the environment, then what the code insists on. A setting in
/// the table of a store wins over the same setting for all.
///
/// | key | default | what |
/// |---|---|---|
/// | `enabled` | `true` | whether to connect at all |
/// | `url` | `sqlite:` | the store |
/// | `password`, `password-file` | | the secret, or the file that holds it, instead of in the URL |
/// | `ttl`, `transition` | `10s`, `6s` | the [`Lease`] |
/// | `grace`, `poll` | half the transition, the ttl | see [`Lease`] |
/// | `initial-delay` | `0s` | how long a contention waits before its first try |
///
/// The same keys stand in a table for each store: `sqlite`, `mysql` (also `jdbc`, `mariadb`), `postgres`, `redis`,
/// `zookeeper`, `etcd`. In YAML all of it may stand below `simba:`, as with the Spring Boot starter of JVM Simba. In the
/// environment they are `SIMBA_URL`, `SIMBA_TTL`, `SIMBA_REDIS_TTL` and so on. A variable whose name is nearly one of
/// these, such as `SIMBA_URI`, is refused: without it the program would contend in another store than is meant.
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
    /// Variables that are refused, each with the reason.
    refused: BTreeMap<String, String>,
    /// Variables that begin like ours and are not known.
    unknown: BTreeSet<String>,
}

#[derive(Clone)]
struct Setting {
    value: String,
    origin: Origin,
}

/// What a [`Config`] comes to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// The store, with its password.
    pub url: ConnectUrl,
    /// How long a mutex is held at a time.
    pub lease: Lease,
    /// How long a contention waits before its first try.
    pub initial_delay: Duration,
    /// The variables that begin with `SIMBA_` and have no meaning. They are ignored.
    pub unknown_variables: Vec<String>,
}

impl Config {
    /// Nothing but the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a file: TOML, or YAML if its name says so.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] with the line and the fix. No value is repeated: it may be a secret.
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

    /// Reads settings in TOML; `name` is what an error calls the text.
    ///
    /// # Errors
    ///
    /// As [`file`](Self::file).
    pub fn toml(self, text: &str, name: impl Into<PathBuf>) -> Result<Self> {
        let name = Arc::new(name.into());
        match document::from_toml(text) {
            Ok(found) => self.read(&found, &name),
            Err(complaint) => Err(wrong(&Origin::File(name, complaint.line), &complaint.message)),
        }
    }

    /// Reads settings in YAML; `name` is what an error calls the text.
    ///
    /// # Errors
    ///
    /// As [`file`](Self::file).
    pub fn yaml(self, text: &str, name: impl Into<PathBuf>) -> Result<Self> {
        let name = Arc::new(name.into());
        match document::from_yaml(text) {
            Ok(found) => self.read(&found, &name),
            Err(complaint) => Err(wrong(&Origin::File(name, complaint.line), &complaint.message)),
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
                Variable::Misspelt(meant) => self.refuse_misspelt(name, &meant),
                Variable::Unknown => {
                    self.unknown.insert(name);
                }
                Variable::Other => {}
            }
        }
        self.variables(readable)
    }

    /// Reads variables. One whose name is nearly that of a setting makes [`resolve`](Self::resolve) fail; others that
    /// do not name a setting are ignored.
    pub fn variables(mut self, variables: impl IntoIterator<Item = (String, String)>) -> Self {
        for (name, value) in variables {
            match variables::classify(&name) {
                Variable::Setting(key) => {
                    self.settings.insert(key, Setting { value, origin: Origin::Environment(name) });
                }
                Variable::Misspelt(meant) => self.refuse_misspelt(name, &meant),
                Variable::Unknown => {
                    self.unknown.insert(name);
                }
                Variable::Other => {}
            }
        }
        self
    }

    /// Connects to this store, whatever files and environment say.
    pub fn url(self, url: impl Into<String>) -> Self {
        self.set("url", url.into())
    }

    /// Holds mutexes by this lease, whatever files and environment say.
    pub fn lease(self, ttl: Duration, transition: Duration) -> Self {
        let text = |time| humantime::format_duration(time).to_string();
        self.set("ttl", text(ttl)).set("transition", text(transition))
    }

    /// What all layers come to.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] for a value that is none or contradicts another, with its line and the fix, and for a
    /// variable that is probably misspelt.
    pub fn resolve(&self) -> Result<Settings> {
        if let Some((name, reason)) = self.refused.first_key_value() {
            return Err(wrong(&Origin::Environment(name.clone()), reason));
        }
        let settings = resolve::resolve(&self.settings)?;
        Ok(Settings { unknown_variables: self.unknown.iter().cloned().collect(), ..settings })
    }

    /// Connects to the store that all layers come to.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve) and [`connect`](crate::connect).
    pub async fn connect(&self) -> Result<Simba> {
        let settings = self.resolve()?;
        let backend = crate::backend(&settings.url).await?;
        Ok(Simba::builder(backend).lease(settings.lease).build())
    }

    /// What the code says counts for every store.
    fn set(mut self, name: &'static str, value: String) -> Self {
        self.settings.retain(|key, _| key.name != name);
        self.settings.insert(Key { store: None, name }, Setting { value, origin: Origin::Code });
        self
    }

    fn read(mut self, found: &Table, name: &Arc<PathBuf>) -> Result<Self> {
        // A file for several programs has ours below one key.
        let found = match found.get("simba") {
            Some((_, Node::Table(ours))) => ours,
            _ => found,
        };
        for (word, (line, node)) in found {
            let origin = Origin::File(Arc::clone(name), *line);
            match (keys::key(word), keys::store(word), node) {
                (Some(key), _, Node::Value(value)) => self.put(None, key, value, origin),
                (None, Some(store), Node::Table(table)) => self.read_store(store, table, name)?,
                (None, None, _) => return Err(unknown(&origin, word, true)),
                _ => return Err(wrong(&origin, &format!("`{word}` does not take that"))),
            }
        }
        Ok(self)
    }

    fn read_store(&mut self, store: &'static str, table: &Table, name: &Arc<PathBuf>) -> Result<()> {
        for (word, (line, node)) in table {
            let origin = Origin::File(Arc::clone(name), *line);
            match (keys::key(word), node) {
                (Some(key), Node::Value(value)) => self.put(Some(store), key, value, origin),
                (Some(_), _) => return Err(wrong(&origin, &format!("`{word}` does not take that"))),
                (None, _) => return Err(unknown(&origin, word, false)),
            }
        }
        Ok(())
    }

    fn refuse_misspelt(&mut self, name: String, meant: &str) {
        let reason = format!("there is no such variable; probably {meant} is meant: rename it, or unset it");
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

fn wrong(origin: &Origin, message: &str) -> Error {
    Error::new(ErrorKind::Config, format!("{origin}: {message}"))
}

fn unknown(origin: &Origin, word: &str, at_the_top: bool) -> Error {
    let mut known = KEYS.to_vec();
    if at_the_top {
        known.extend(STORES.iter().map(|(name, _)| *name));
    }
    wrong(origin, &format!("there is no key `{word}`; the keys are {}", known.join(", ")))
}

#[cfg(test)]
mod tests;
