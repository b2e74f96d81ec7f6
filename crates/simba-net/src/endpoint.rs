use std::{fmt, io};

use simba_core::spi::ConnectUrl;
use simba_core::{Error, ErrorKind};

/// The host and port of a server.
///
/// # Examples
///
/// ```
/// use simba_net::Endpoint;
///
/// let url = "zookeeper://zk1,zk2:2182".parse()?;
/// let endpoints: Vec<_> = Endpoint::all(&url, 2181).iter().map(ToString::to_string).collect();
/// assert_eq!(endpoints, ["zk1:2181", "zk2:2182"]);
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Endpoint {
    /// The name or IP address of the host.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl Endpoint {
    /// Returns the servers that a URL names. A host without a port gets the `default` port.
    #[must_use]
    pub fn all(url: &ConnectUrl, default: u16) -> Vec<Self> {
        let port = |port: Option<u16>| port.unwrap_or(default);
        url.hosts().iter().map(|host| Self { host: host.name.clone(), port: port(host.port) }).collect()
    }

    /// Returns the error of a connection that could not be opened.
    #[must_use]
    pub fn unreachable(&self, error: io::Error) -> Error {
        Error::new(ErrorKind::Unavailable, format!("cannot reach {self}")).with_source(error)
    }

    /// Returns the error of a TLS handshake: permanent if the certificate was rejected or the server does not speak TLS.
    #[must_use]
    pub fn tls_failed(&self, error: io::Error) -> Error {
        let kind = match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => ErrorKind::Config,
            _ => ErrorKind::Unavailable,
        };
        let message = format!("no TLS with {self}: check its certificate, the authority and the port");
        Error::new(kind, message).with_source(error)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            return write!(f, "[{}]:{}", self.host, self.port);
        }
        write!(f, "{}:{}", self.host, self.port)
    }
}
