//! Resolves the layers to one store, one lease and one delay.

use std::collections::BTreeMap;
use std::time::Duration;

use simba_core::spi::{ConnectUrl, Password};
use simba_core::{Error, Lease, Result};

use super::keys::{self, Key, Origin};
use super::{Setting, Settings, invalid};

/// The embedded default.
const DEFAULT_URL: &str = "sqlite:";

pub(super) fn resolve(all: &BTreeMap<Key, Setting>) -> Result<Settings> {
    let (store, url) = url(all)?;
    let view = View { all, store };
    if let Some(disabled) = view.get("enabled").filter(|setting| setting.value != "true") {
        let message = match disabled.value.as_str() {
            "false" => "disabled: set `enabled` to true, or remove it",
            _ => "`enabled` is neither true nor false",
        };
        return Err(invalid(&disabled.origin, message));
    }
    let url = view.with_password(url)?;
    let initial_delay = view.time("initial-delay")?.unwrap_or_default();
    Ok(Settings { url, lease: view.lease()?, initial_delay, unknown_variables: Vec::new() })
}

/// Returns the selected store: that of the common `url`, or the only one with a `url` in its table.
fn url(all: &BTreeMap<Key, Setting>) -> Result<(Option<&'static str>, ConnectUrl)> {
    let all_stores = all.get(&Key { store: None, name: "url" });
    let mut own = all.iter().filter(|(key, _)| key.store.is_some() && key.name == "url");
    let chosen = match (all_stores, own.next(), own.next()) {
        (Some(url), ..) => Some(url),
        (None, Some((first, _)), Some((second, other))) => {
            let message = format!("`{first}` and `{second}` are both set: keep one, or set `url`");
            return Err(invalid(&other.origin, &message));
        }
        (None, one, _) => one.map(|(_, setting)| setting),
    };
    let Some(setting) = chosen else { return Ok((Some("sqlite"), DEFAULT_URL.parse()?)) };
    let url: ConnectUrl = setting.value.parse().map_err(|error| with_origin(&setting.origin, &error))?;
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

/// The settings that apply to one store.
struct View<'a> {
    all: &'a BTreeMap<Key, Setting>,
    store: Option<&'static str>,
}

impl<'a> View<'a> {
    /// Returns the setting of the store, or that for all stores.
    fn get(&self, name: &'static str) -> Option<&'a Setting> {
        let own = self.store.and_then(|store| self.all.get(&Key { store: Some(store), name }));
        own.or_else(|| self.all.get(&Key { store: None, name }))
    }

    fn time(&self, name: &'static str) -> Result<Option<Duration>> {
        let parse = |setting: &Setting| {
            humantime::parse_duration(&setting.value).map_err(|_| {
                invalid(&setting.origin, &format!("`{name}` is not a duration: write it as `250ms` or `10s`"))
            })
        };
        self.get(name).map(parse).transpose()
    }

    fn lease(&self) -> Result<Lease> {
        let default = Lease::default();
        let (ttl, transition) = (self.time("ttl")?, self.time("transition")?);
        let lease = Lease::new(ttl.unwrap_or(default.ttl()), transition.unwrap_or(default.transition()));
        let lease = lease.map_err(|error| self.with_origin(&["ttl", "transition"], &error))?;
        let lease = match self.time("grace")? {
            Some(grace) => lease.with_grace(grace).map_err(|error| self.with_origin(&["grace"], &error))?,
            None => lease,
        };
        match self.time("poll")? {
            Some(poll) => lease.with_poll(poll).map_err(|error| self.with_origin(&["poll"], &error)),
            None => Ok(lease),
        }
    }

    /// Returns the URL with the configured password, if there is one.
    fn with_password(&self, url: ConnectUrl) -> Result<ConnectUrl> {
        match (self.get("password"), self.get("password-file")) {
            (Some(one), Some(other)) if one.origin != other.origin => {
                let message =
                    format!("`password-file` and `password` ({}) are both set: keep one", one.origin);
                Err(invalid(&other.origin, &message))
            }
            (Some(_), Some(other)) => {
                Err(invalid(&other.origin, "`password-file` and `password` are both set: keep one"))
            }
            (Some(password), None) => Ok(url.with_password(password.value.clone())),
            (None, Some(file)) => {
                let password = Password::in_file(&file.value);
                // Read the file now to report an error with the origin of its name. Every connection reads it again.
                password.read().map_err(|error| with_origin(&file.origin, &error))?;
                Ok(url.with_password(password))
            }
            (None, None) => Ok(url),
        }
    }

    /// Adds the origin of the first of these keys that is set.
    fn with_origin(&self, names: &[&'static str], error: &Error) -> Error {
        let setting = names.iter().find_map(|name| self.get(name));
        setting.map_or_else(|| error.clone(), |setting| with_origin(&setting.origin, error))
    }
}

fn with_origin(origin: &Origin, error: &Error) -> Error {
    invalid(origin, &error.to_string())
}
