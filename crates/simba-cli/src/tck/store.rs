//! The store under test, behind a network with injected faults.

use std::fmt::Display;
use std::sync::Arc;

use simba_mutex::spi::{ConnectUrl, Host};
use simba_mutex::{Result, SystemClock, backend};
use simba_tck::{Connection, FaultProxy, FaultyBackend, Fixture, Profile, Switch, async_trait};

/// The store under test.
#[derive(Clone, Debug)]
pub(super) struct Store {
    url: ConnectUrl,
    /// The server behind the fault proxy; `None` if the faults are injected into the backend.
    server: Option<Host>,
}

impl Store {
    /// Connects once, so that an unreachable store is one error and not a hundred.
    ///
    /// # Errors
    ///
    /// The error of the store's own `connect`.
    pub(super) async fn find(url: &ConnectUrl) -> Result<Self> {
        // Uses the first server that accepts the connection: each certificate may be for one server name only.
        for server in servers(url) {
            if backend(&with_address(&server, url, &server)?).await.is_ok() {
                return Ok(Self { url: url.clone(), server: Some(server) });
            }
        }
        backend(url).await?;
        Ok(Self { url: url.clone(), server: None })
    }

    async fn behind_proxy(&self, server: &Host) -> Result<Connection> {
        let proxy = FaultProxy::start(server).await;
        let proxy = proxy.unwrap_or_else(|error| panic!("cannot start the proxy: {error}"));
        let proxy = if self.url.scheme().starts_with("etcd") { proxy.for_http2() } else { proxy };
        let backend = backend(&with_address(&proxy.address(), &self.url, server)?).await?;
        Ok(Connection { backend, network: Arc::new(proxy) })
    }

    async fn behind_switch(&self) -> Result<Connection> {
        let (backend, network) = (backend(&self.url).await?, Switch::new());
        let faulty = FaultyBackend::over(backend, SystemClock, Arc::<Switch>::clone(&network));
        Ok(Connection::new(faulty, network))
    }
}

#[async_trait]
impl Fixture for Store {
    async fn connect(&self) -> Connection {
        let connection = match &self.server {
            Some(server) => self.behind_proxy(server).await,
            None => self.behind_switch().await,
        };
        connection.unwrap_or_else(|error| panic!("cannot connect to the store: {error}"))
    }

    fn profile(&self) -> Profile {
        match self.url.scheme() {
            "mysql" | "mariadb" => Profile::default().with_fifo(false).with_token_visible_to_observers(false),
            _ => Profile::default(),
        }
    }
}

/// Returns the servers of a store whose client renews its session in the background, each with its port. There, a
/// contender counts as dead only if the network is cut; blocking the calls of the backend is not enough.
fn servers(url: &ConnectUrl) -> Vec<Host> {
    let port = match url.scheme() {
        "zookeeper" | "zookeepers" if has_tls(url) => 2281,
        "zookeeper" => 2181,
        "etcd" | "etcds" => 2379,
        _ => return Vec::new(),
    };
    let mut servers = url.hosts().to_vec();
    for server in &mut servers {
        server.port.get_or_insert(port);
    }
    servers
}

fn has_tls(url: &ConnectUrl) -> bool {
    url.scheme().ends_with('s') || url.query("tls").is_some()
}

/// Returns the URL with this address instead of all servers. The address leads to `server`, whose certificate is
/// expected.
fn with_address(address: &impl Display, url: &ConnectUrl, server: &Host) -> Result<ConnectUrl> {
    let user = url.user().map(|user| encode(user) + "@").unwrap_or_default();
    let path: Vec<_> = url.path().split('/').map(encode).collect();
    let own_name = ("tls-name", server.name.as_str());
    let own_name = (has_tls(url) && url.query(own_name.0).is_none()).then_some(own_name);
    let keys: Vec<_> = url
        .queries()
        .chain(own_name)
        .map(|(key, value)| format!("{}={}", encode(key), encode(value)))
        .collect();
    let text = format!("{}://{user}{address}{}?{}", url.scheme(), path.join("/"), keys.join("&"));
    let other: ConnectUrl = text.trim_end_matches('?').parse()?;
    Ok(match url.password() {
        Some(password) => other.with_password(password.to_owned()),
        None => other,
    })
}

/// Percent-encodes any part of a URL.
fn encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let shown = |byte: u8| if plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") };
    text.bytes().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> ConnectUrl {
        text.parse().unwrap()
    }

    fn by_proxy(text: &str) -> ConnectUrl {
        let url = url(text);
        with_address(&"127.0.0.1:9", &url, &servers(&url)[0]).unwrap()
    }

    #[test]
    fn every_server_has_a_port() {
        let shown = |text| servers(&url(text)).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown("etcd://a,b:1/x"), ["a:2379", "b:1"]);
        assert_eq!(shown("zookeeper://a"), ["a:2181"]);
        assert_eq!(shown("zookeeper://a?tls=ca"), ["a:2281"]);
        assert_eq!(shown("redis://a"), [""; 0]);
    }

    #[test]
    fn only_the_address_changes() {
        let same = [
            ("etcd://a,b", "etcd://127.0.0.1:9"),
            ("etcd://u%40:p%2F@a/x%20y/z", "etcd://u%40:p%2F@127.0.0.1:9/x%20y/z"),
            ("zookeeper://a/x?acl=creator&auth=sasl", "zookeeper://127.0.0.1:9/x?acl=creator&auth=sasl"),
            ("etcds://a,b?tls-key=k%26", "etcds://127.0.0.1:9?tls-key=k%26&tls-name=a"),
            ("etcd://[::1]?tls=full", "etcd://127.0.0.1:9?tls=full&tls-name=::1"),
            ("etcds://a?tls-name=b", "etcds://127.0.0.1:9?tls-name=b"),
        ];
        for (one, other) in same {
            // Compares the URLs, because their text hides the secrets.
            assert!(by_proxy(one) == url(other), "{one}");
        }
    }
}
