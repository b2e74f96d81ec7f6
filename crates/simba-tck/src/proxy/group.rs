//! A network with a proxy for each of several servers.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use simba_core::Result;
use simba_core::spi::ConnectUrl;

use super::FaultProxy;
use crate::{Held, Network};

/// One [`FaultProxy`] in front of each server of a store: a [`Network`] for a client that may use any of them.
#[derive(Debug)]
pub struct Proxies {
    proxies: Vec<FaultProxy>,
    url: String,
}

impl Proxies {
    /// Starts a proxy for each host of this URL.
    ///
    /// # Errors
    ///
    /// There is no free port or no thread.
    pub async fn start(url: &ConnectUrl) -> io::Result<Self> {
        let mut proxies = Vec::new();
        for host in url.hosts() {
            proxies.push(FaultProxy::start(host).await?);
        }
        let url = proxied_url(url, &proxies);
        Ok(Self { proxies, url })
    }

    /// Prepares all proxies for HTTP/2: see [`FaultProxy::for_http2`].
    #[must_use]
    pub fn for_http2(self) -> Self {
        Self { proxies: self.proxies.into_iter().map(FaultProxy::for_http2).collect(), ..self }
    }

    /// Returns the URL of the same store, proxied_url the proxies.
    ///
    /// # Errors
    ///
    /// A user, a password or a path in the URL has characters that would need to be escaped.
    pub fn url(&self) -> Result<ConnectUrl> {
        self.url.parse()
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

/// Returns the URL with the host name `localhost` and not with an address: the certificate of a server is often for the
/// name only.
fn proxied_url(url: &ConnectUrl, proxies: &[FaultProxy]) -> String {
    let hosts: Vec<_> = proxies.iter().map(|proxy| format!("localhost:{}", proxy.address().port())).collect();
    let login = match (url.user(), url.password()) {
        (Some(user), Some(password)) => format!("{user}:{password}@"),
        _ => String::new(),
    };
    let query: Vec<_> = url.queries().map(|(key, value)| format!("{key}={value}")).collect();
    let text = format!("{}://{login}{}{}?{}", url.scheme(), hosts.join(","), url.path(), query.join("&"));
    text.trim_end_matches('?').to_owned()
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
