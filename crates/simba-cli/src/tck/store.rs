//! The store under test, behind a network with injected faults.

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
            if backend(&with_address(server.clone(), url, &server)).await.is_ok() {
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
        let backend = backend(&with_address(proxy.address().into(), &self.url, server)).await?;
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

/// The key for the name that the certificate of the server must have.
const TLS_NAME: &str = "tls-name";

fn has_tls(url: &ConnectUrl) -> bool {
    url.scheme().ends_with('s') || url.query("tls").is_some()
}

/// Returns the URL with this address instead of all servers. The address leads to `server`, whose certificate is
/// expected.
fn with_address(address: Host, url: &ConnectUrl, server: &Host) -> ConnectUrl {
    let other = url.clone().with_hosts([address]);
    match has_tls(url) && url.query(TLS_NAME).is_none() {
        true => other.with_query(TLS_NAME, &server.name),
        false => other,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn url(text: &str) -> ConnectUrl {
        text.parse().unwrap()
    }

    fn by_proxy(text: &str) -> ConnectUrl {
        let url = url(text);
        with_address(SocketAddr::from(([127, 0, 0, 1], 9)).into(), &url, &servers(&url)[0])
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
