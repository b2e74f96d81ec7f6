//! A network with a way to each of several servers.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use simba_core::{ConnectUrl, Result};

use super::FaultProxy;
use crate::{Held, Network};

/// One [`FaultProxy`] in front of each server of a store: a [`Network`] for a client that may talk to any of them.
#[derive(Debug)]
pub struct Proxies {
    ways: Vec<FaultProxy>,
    url: String,
}

impl Proxies {
    /// Starts a proxy for each host of this URL.
    ///
    /// # Errors
    ///
    /// When the system gives one no port or no thread.
    pub async fn start(url: &ConnectUrl) -> io::Result<Self> {
        let mut ways = Vec::new();
        for host in url.hosts() {
            ways.push(FaultProxy::start(host).await?);
        }
        let url = through(url, &ways);
        Ok(Self { ways, url })
    }

    /// The same for servers that speak HTTP/2: see [`FaultProxy::for_http2`].
    #[must_use]
    pub fn for_http2(self) -> Self {
        Self { ways: self.ways.into_iter().map(FaultProxy::for_http2).collect(), ..self }
    }

    /// The URL of the same store, by way of the proxies.
    ///
    /// # Errors
    ///
    /// A credential or a path in the URL has characters that would need to be escaped.
    pub fn url(&self) -> Result<ConnectUrl> {
        self.url.parse()
    }

    /// Where the way to this server begins.
    ///
    /// # Panics
    ///
    /// There are not so many.
    #[must_use]
    pub fn address(&self, at: usize) -> SocketAddr {
        self.ways[at].address()
    }

    fn each(&self, act: impl Fn(&FaultProxy)) {
        self.ways.iter().for_each(act);
    }
}

/// By name and not by address: the certificate of a server is often for that alone.
fn through(url: &ConnectUrl, ways: &[FaultProxy]) -> String {
    let hosts: Vec<_> = ways.iter().map(|way| format!("localhost:{}", way.address().port())).collect();
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
        self.each(|way| way.delay(each, jitter));
    }

    fn refuse(&self) {
        self.each(Network::refuse);
    }

    fn requests(&self) -> usize {
        self.ways.iter().map(FaultProxy::requests).sum()
    }

    fn heal(&self) {
        self.each(FaultProxy::pass);
    }

    fn cut(&self) {
        self.each(FaultProxy::cut);
    }

    fn lose_next_reply(&self) {
        // On the one that is in use; the others would lose one much later.
        let used = self.ways.iter().max_by_key(|way| way.connections());
        used.iter().for_each(|way| way.drop_next_reply());
    }

    /// Only where there is one way: nobody knows which one the next request takes.
    fn hold_next_request(&self) -> Option<Held> {
        match &self.ways[..] {
            [only] => Some(only.hold_next_request()),
            _ => None,
        }
    }
}
