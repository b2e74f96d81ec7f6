//! The store under test, behind a network that can be broken.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use simba_mutex::{ConnectUrl, Host, Lease, Result, SystemClock, backend};
use simba_tck::{Connection, FaultProxy, FaultyBackend, Fixture, Profile, Switch, async_trait};

/// The store under test.
#[derive(Clone, Debug)]
pub(super) struct Store {
    url: ConnectUrl,
    /// The server that the faults are in front of; nothing if they are in front of the backend.
    server: Option<Host>,
}

impl Store {
    /// Connects once, so that a store out of reach is one error and not a hundred.
    ///
    /// # Errors
    ///
    /// What the store's own `connect` says.
    pub(super) async fn find(url: &ConnectUrl) -> Result<Self> {
        // Of several servers the first that lets us in: the certificate of each may be for its own name.
        for server in servers(url) {
            if backend(&by_way_of(&server, url, &server)?).await.is_ok() {
                return Ok(Self { url: url.clone(), server: Some(server) });
            }
        }
        backend(url).await?;
        Ok(Self { url: url.clone(), server: None })
    }

    async fn behind_a_proxy(&self, server: &Host) -> Result<Connection> {
        let proxy = FaultProxy::start(server).await;
        let proxy = proxy.unwrap_or_else(|error| panic!("the system gives no proxy: {error}"));
        let proxy = if self.url.scheme().starts_with("etcd") { proxy.for_http2() } else { proxy };
        let backend = backend(&by_way_of(&proxy.address(), &self.url, server)?).await?;
        Ok(Connection { backend, network: Arc::new(proxy) })
    }

    async fn behind_a_switch(&self) -> Result<Connection> {
        let (backend, network) = (backend(&self.url).await?, Switch::new());
        let faulty = FaultyBackend::over(backend, SystemClock, Arc::<Switch>::clone(&network));
        Ok(Connection::new(faulty, network))
    }
}

#[async_trait]
impl Fixture for Store {
    async fn connect(&self) -> Connection {
        let connection = match &self.server {
            Some(server) => self.behind_a_proxy(server).await,
            None => self.behind_a_switch().await,
        };
        connection.unwrap_or_else(|error| panic!("the store cannot be connected to: {error}"))
    }

    /// The kit's own, and on etcd the shortest that servers grant by default: they count in whole seconds.
    fn lease(&self) -> Lease {
        let (ttl, transition) = match self.url.scheme() {
            "etcd" | "etcds" => (1_200, 800),
            _ => (800, 600),
        };
        // Both are in order.
        Lease::new(Duration::from_millis(ttl), Duration::from_millis(transition)).unwrap_or_default()
    }

    fn profile(&self) -> Profile {
        match self.url.scheme() {
            "mysql" | "mariadb" => Profile::default().with_fifo(false).with_token_visible_to_observers(false),
            "etcd" | "etcds" => Profile::default().with_keeps_token_on_resume(true),
            _ => Profile::default(),
        }
    }
}

/// The servers of a store whose client keeps its session alive by itself, each with its port. Who is to be taken for
/// dead there must not reach them at all: a backend that is not asked any more is not enough.
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

/// The same store, by this address instead of all that the URL names. It is that of `server`, and so is the
/// certificate.
fn by_way_of(address: &impl Display, url: &ConnectUrl, server: &Host) -> Result<ConnectUrl> {
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

/// For any part of a URL.
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
        by_way_of(&"127.0.0.1:9", &url, &servers(&url)[0]).unwrap()
    }

    #[test]
    fn every_server_has_its_port() {
        let shown = |text| servers(&url(text)).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown("etcd://a,b:1/x"), ["a:2379", "b:1"]);
        assert_eq!(shown("zookeeper://a"), ["a:2181"]);
        assert_eq!(shown("zookeeper://a?tls=ca"), ["a:2281"]);
        assert_eq!(shown("redis://a"), [""; 0]);
    }

    #[test]
    fn another_address_changes_nothing_else() {
        let same = [
            ("etcd://a,b", "etcd://127.0.0.1:9"),
            ("etcd://u%40:p%2F@a/x%20y/z", "etcd://u%40:p%2F@127.0.0.1:9/x%20y/z"),
            ("zookeeper://a/x?acl=creator&auth=sasl", "zookeeper://127.0.0.1:9/x?acl=creator&auth=sasl"),
            ("etcds://a,b?tls-key=k%26", "etcds://127.0.0.1:9?tls-key=k%26&tls-name=a"),
            ("etcd://[::1]?tls=full", "etcd://127.0.0.1:9?tls=full&tls-name=::1"),
            ("etcds://a?tls-name=b", "etcds://127.0.0.1:9?tls-name=b"),
        ];
        for (one, other) in same {
            // Not by what is shown, which hides the secrets.
            assert!(by_proxy(one) == url(other), "{one}");
        }
    }
}
