use std::fmt;

use simba_core::ConnectUrl;

/// Where a server listens.
///
/// # Examples
///
/// ```
/// use simba_net::Place;
///
/// let url = "zookeeper://zk1,zk2:2182".parse()?;
/// let places: Vec<_> = Place::all(&url, 2181).iter().map(ToString::to_string).collect();
/// assert_eq!(places, ["zk1:2181", "zk2:2182"]);
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Place {
    /// A name or an address.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl Place {
    /// The servers that a URL names, at the `usual` port where it names none.
    #[must_use]
    pub fn all(url: &ConnectUrl, usual: u16) -> Vec<Self> {
        let place =
            |host: &simba_core::Host| Self { host: host.name.clone(), port: host.port.unwrap_or(usual) };
        url.hosts().iter().map(place).collect()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            return write!(f, "[{}]:{}", self.host, self.port);
        }
        write!(f, "{}:{}", self.host, self.port)
    }
}
