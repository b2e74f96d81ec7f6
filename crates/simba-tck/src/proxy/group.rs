//! A network with a proxy for each of several servers.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use simba_core::spi::ConnectUrl;

use super::FaultProxy;
use crate::{Held, Network};

/// One [`FaultProxy`] in front of each server of a store: a [`Network`] for a client that may use any of them.
#[derive(Debug)]
pub struct Proxies {
    proxies: Vec<FaultProxy>,
    url: ConnectUrl,
}

impl Proxies {
    /// Starts a proxy for each host of this URL.
    ///
    /// # Errors
    ///
    /// There is no free port, or no thread can be started.
    pub async fn start(url: &ConnectUrl) -> io::Result<Self> {
        let mut proxies = Vec::new();
        for host in url.hosts() {
            proxies.push(FaultProxy::start(host).await?);
        }
        // The name `localhost` and not an address: the certificate of a server is often for the name only.
        let mut hosts = url.hosts().to_vec();
        for (host, proxy) in hosts.iter_mut().zip(&proxies) {
            (host.name, host.port) = ("localhost".to_owned(), Some(proxy.address().port()));
        }
        let url = url.clone().with_hosts(hosts);
        Ok(Self { proxies, url })
    }

    /// Prepares all proxies for HTTP/2: see [`FaultProxy::for_http2`].
    #[must_use]
    pub fn for_http2(self) -> Self {
        Self { proxies: self.proxies.into_iter().map(FaultProxy::for_http2).collect(), ..self }
    }

    /// Returns the URL of the same store, through the proxies.
    #[must_use]
    pub const fn url(&self) -> &ConnectUrl {
        &self.url
    }

    /// Returns the address of the proxy for this server.
    ///
    /// # Panics
    ///
    /// If `at` is out of range.
    #[must_use]
    pub fn address(&self, at: usize) -> SocketAddr {
        self.proxies[at].address()
    }

    fn each(&self, act: impl Fn(&FaultProxy)) {
        self.proxies.iter().for_each(act);
    }
}

impl Network for Proxies {
    fn stall(&self) {
        self.each(FaultProxy::stall);
    }

    fn stall_replies(&self) {
        self.each(FaultProxy::stall_replies);
    }

    fn delay(&self, each: Duration, jitter: Duration) {
        self.each(|proxy| proxy.delay(each, jitter));
    }

    fn refuse(&self) {
        self.each(Network::refuse);
    }

    fn requests(&self) -> usize {
        self.proxies.iter().map(FaultProxy::requests).sum()
    }

    fn heal(&self) {
        self.each(FaultProxy::pass);
    }

    fn cut(&self) {
        self.each(FaultProxy::cut);
    }

    fn lose_next_reply(&self) {
        // On the proxy in use; the others would lose a reply much later.
        let used = self.proxies.iter().max_by_key(|proxy| proxy.connections());
        used.iter().for_each(|proxy| proxy.drop_next_reply());
    }

    /// Works with one proxy only: otherwise it is unknown which one gets the next request.
    fn hold_next_request(&self) -> Option<Held> {
        match &self.proxies[..] {
            [only] => Some(only.hold_next_request()),
            _ => None,
        }
    }
}
