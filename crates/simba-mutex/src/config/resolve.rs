//! From layers to one store, one lease, one delay.

use std::collections::BTreeMap;
use std::time::Duration;

use simba_core::{ConnectUrl, Error, Lease, Result};

use super::keys::{self, Key, Origin};
use super::{Setting, Settings, wrong};

/// The embedded default.
const DEFAULT_URL: &str = "sqlite:";

pub(super) fn resolve(all: &BTreeMap<Key, Setting>) -> Result<Settings> {
    let (store, url) = url(all)?;
    let view = View { all, store };
    if let Some(off) = view.get("enabled").filter(|setting| setting.value != "true") {
        let message = match off.value.as_str() {
            "false" => "turned off here: set `enabled` to true, or leave it out",
            _ => "`enabled` is neither true nor false",
        };
        return Err(wrong(&off.origin, message));
    }
    let url = view.with_password(url)?;
    let initial_delay = view.time("initial-delay")?.unwrap_or_default();
    Ok(Settings { url, lease: view.lease()?, initial_delay, unknown_variables: Vec::new() })
}

/// The store that is meant: the one `url` for all, or the one store with a `url` of its own.
fn url(all: &BTreeMap<Key, Setting>) -> Result<(Option<&'static str>, ConnectUrl)> {
    let all_stores = all.get(&Key { store: None, name: "url" });
    let mut own = all.iter().filter(|(key, _)| key.store.is_some() && key.name == "url");
    let chosen = match (all_stores, own.next(), own.next()) {
        (Some(url), ..) => Some(url),
        (None, Some((first, _)), Some((second, other))) => {
            let message = format!("`{first}` and `{second}` are both set: keep one, or choose by `url`");
            return Err(wrong(&other.origin, &message));
        }
        (None, one, _) => one.map(|(_, setting)| setting),
    };
    let Some(setting) = chosen else { return Ok((Some("sqlite"), DEFAULT_URL.parse()?)) };
    let url: ConnectUrl = setting.value.parse().map_err(|error| blame(&setting.origin, &error))?;
    let scheme = url.scheme().split('+').next().unwrap_or_default();
    let store = match scheme {
        "postgresql" => Some("postgres"),
        "rediss" => Some("redis"),
        "zookeepers" => Some("zookeeper"),
        "etcds" => Some("etcd"),
        scheme => keys::store(scheme),
    };
    Ok((store, url))
}

/// All settings as one store sees them.
struct View<'a> {
    all: &'a BTreeMap<Key, Setting>,
    store: Option<&'static str>,
}

impl<'a> View<'a> {
    /// The store's own setting, or that for all.
    fn get(&self, name: &'static str) -> Option<&'a Setting> {
        let own = self.store.and_then(|store| self.all.get(&Key { store: Some(store), name }));
        own.or_else(|| self.all.get(&Key { store: None, name }))
    }

    fn time(&self, name: &'static str) -> Result<Option<Duration>> {
        let parse = |setting: &Setting| {
            humantime::parse_duration(&setting.value).map_err(|_| {
                wrong(
                    &setting.origin,
                    &format!("`{name}` is no length of time: write it as `250ms` or `10s`"),
                )
            })
        };
        self.get(name).map(parse).transpose()
    }

    fn lease(&self) -> Result<Lease> {
        let usual = Lease::default();
        let (ttl, transition) = (self.time("ttl")?, self.time("transition")?);
        let lease = Lease::new(ttl.unwrap_or(usual.ttl()), transition.unwrap_or(usual.transition()));
        let lease = lease.map_err(|error| self.blame(&["ttl", "transition"], &error))?;
        let lease = match self.time("grace")? {
            Some(grace) => lease.with_grace(grace).map_err(|error| self.blame(&["grace"], &error))?,
            None => lease,
        };
        match self.time("poll")? {
            Some(poll) => lease.with_poll(poll).map_err(|error| self.blame(&["poll"], &error)),
            None => Ok(lease),
        }
    }

    /// The URL with the password that stands elsewhere.
    fn with_password(&self, url: ConnectUrl) -> Result<ConnectUrl> {
        match (self.get("password"), self.get("password-file")) {
            (Some(one), Some(other)) if one.origin != other.origin => {
                let message =
                    format!("`password-file` and `password` ({}) are both set: keep one", one.origin);
                Err(wrong(&other.origin, &message))
            }
            (Some(_), Some(other)) => {
                Err(wrong(&other.origin, "`password-file` and `password` are both set: keep one"))
            }
            (Some(password), None) => Ok(url.with_password(password.value.clone())),
            (None, Some(file)) => {
                let text = std::fs::read_to_string(&file.value).map_err(|error| {
                    wrong(&file.origin, &format!("cannot read `{}`: {error}", file.value)).with_source(error)
                })?;
                Ok(url.with_password(text.trim_end_matches(['\r', '\n']).to_owned()))
            }
            (None, None) => Ok(url),
        }
    }

    /// An error of values that stand somewhere, by the first of these keys that is set.
    fn blame(&self, names: &[&'static str], error: &Error) -> Error {
        let setting = names.iter().find_map(|name| self.get(name));
        setting.map_or_else(|| error.clone(), |setting| blame(&setting.origin, error))
    }
}

fn blame(origin: &Origin, error: &Error) -> Error {
    wrong(origin, &error.to_string())
}
