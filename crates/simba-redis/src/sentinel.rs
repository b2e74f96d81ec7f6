//! Sentinels: finds the current master and notices a failover.

use std::sync::atomic::Ordering;
use std::time::Duration;

use simba_core::{Error, ErrorKind, Result};

use crate::config::Address;
use crate::connection::Connection;
use crate::error;
use crate::resp::Reply;
use crate::supervisor::Context;

/// Interval at which the sentinels are queried for the current master.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(crate) struct Sentinel {
    pub(crate) sentinels: Vec<Address>,
    pub(crate) master: String,
}

/// The master as one sentinel sees it.
struct View {
    /// Configuration epoch, which grows with every failover. 0 if the sentinel does not report it.
    epoch: u64,
    address: Address,
}

impl Sentinel {
    /// Connects to the master.
    pub(crate) async fn connect(&self, context: &Context) -> Result<(Connection, Address)> {
        let View { epoch, address } = self.find_master(context).await?;
        let mut connection = context.connect(&address).await?;
        let role = connection.call(context, &["ROLE"]).await?;
        if role.array().and_then(|role| role.first()?.text()) != Some("master") {
            let message =
                format!("the sentinels name {address}, which is not a master: a failover is in progress");
            return Err(error::new(ErrorKind::Unavailable, message));
        }
        context.sentinel_epoch.store(epoch, Ordering::Relaxed);
        Ok((connection, address))
    }

    /// Returns the view of the first sentinel whose epoch is not older than the one that this handle has followed. A
    /// sentinel that is partitioned from the others still names the old master.
    async fn find_master(&self, context: &Context) -> Result<View> {
        let known = context.sentinel_epoch.load(Ordering::Relaxed);
        let (mut last, mut older) = (None, Vec::new());
        for at in self.indexes().take(self.sentinels.len()) {
            match self.connect_and_query(&self.sentinels[at], context).await {
                Ok((_, view)) if view.epoch >= known => return Ok(view),
                Ok((_, view)) => older.push(view),
                Err(cause) => last = Some(cause),
            }
        }
        // A majority with older epochs means that the sentinels were set up again.
        if self.is_majority(older.len())
            && let Some(view) = older.into_iter().max_by_key(|view| view.epoch)
        {
            return Ok(view);
        }
        let cause = last.unwrap_or_else(error::disconnected);
        if !cause.is_transient() {
            return Err(cause);
        }
        let message = format!("no sentinel knows the current master `{}`", self.master);
        Err(error::new(ErrorKind::Unavailable, message).with_source(cause))
    }

    /// Returns the sentinels in turn for ever, from a random one: a dead one must not delay every attempt.
    fn indexes(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.sentinels.len()).cycle().skip(fastrand::usize(..self.sentinels.len()))
    }

    fn is_majority(&self, count: usize) -> bool {
        count * 2 > self.sentinels.len()
    }

    async fn connect_and_query(&self, sentinel: &Address, context: &Context) -> Result<(Connection, View)> {
        let opened = Connection::open(sentinel, context, &context.settings.sentinel_login, &[]).await;
        let (mut connection, _) = opened.map_err(explain_refused_login)?;
        let view = self.query(&mut connection, context).await?;
        Ok((connection, view))
    }

    async fn query(&self, connection: &mut Connection, context: &Context) -> Result<View> {
        // Before the address: a failover between the two queries must not pair the new epoch with the old address.
        let epoch = self.query_epoch(connection, context).await?;
        let command = ["SENTINEL", "get-master-addr-by-name", &self.master];
        let reply = connection.call(context, &command).await?;
        if reply == Reply::Nil {
            let message = format!("the sentinels monitor no master `{}`: check the name", self.master);
            return Err(error::new(ErrorKind::Config, message));
        }
        let address = reply.array().and_then(|parts| {
            let [host, port] = parts else { return None };
            Some(Address::tcp(host.text()?, port.text()?.parse().ok()?))
        });
        let address = address.ok_or_else(|| error::unexpected("SENTINEL get-master-addr-by-name"))?;
        Ok(View { epoch, address })
    }

    async fn query_epoch(&self, connection: &mut Connection, context: &Context) -> Result<u64> {
        let command = ["SENTINEL", "MASTER", &self.master];
        match connection.call(context, &command).await {
            Ok(reply) => Ok(epoch(&reply).unwrap_or(0)),
            // The login may lack the right to this command.
            Err(cause) if error::reply_of(&cause).is_some() => Ok(0),
            Err(cause) => Err(cause),
        }
    }

    /// Completes when another master is named by a sentinel with a current epoch, or by a majority of the sentinels.
    ///
    /// Queries one sentinel each second, in turn: one that is partitioned from the others still names the old master.
    pub(crate) async fn master_changed(&self, address: &Address, context: &Context) -> Error {
        let known = context.sentinel_epoch.load(Ordering::Relaxed);
        // Connections are kept: a new one for each query would be a TLS handshake each second.
        let mut kept: Vec<Option<(Connection, View)>> = self.sentinels.iter().map(|_| None).collect();
        for at in self.indexes() {
            context.clock.sleep_until(context.clock.now() + POLL_INTERVAL).await;
            kept[at] = match kept[at].take() {
                Some((mut connection, _)) => {
                    self.query(&mut connection, context).await.map(|view| (connection, view))
                }
                None => self.connect_and_query(&self.sentinels[at], context).await,
            }
            .ok();
            let newer = |view: &View| view.address != *address && view.epoch >= known;
            let elsewhere = kept.iter().flatten().filter(|(_, view)| view.address != *address).count();
            if let Some((_, view)) = &kept[at]
                && (newer(view) || self.is_majority(elsewhere))
            {
                // The next connect starts at a random sentinel. The epoch keeps it from returning to the old master if
                // that sentinel is partitioned from the others.
                if newer(view) {
                    context.sentinel_epoch.fetch_max(view.epoch, Ordering::Relaxed);
                }
                let message = format!("the master is {} now, no longer {address}", view.address);
                return error::new(ErrorKind::Unavailable, message);
            }
        }
        error::disconnected()
    }
}

/// Returns the epoch in a reply to `SENTINEL MASTER`, a list of alternating names and values.
fn epoch(reply: &Reply) -> Option<u64> {
    let mut pairs = reply.array()?.chunks_exact(2);
    let pair = pairs.find(|pair| pair[0].text() == Some("config-epoch"))?;
    pair[1].text()?.parse().ok()
}

/// Names the URL keys of the sentinels' login in a refusal, since the servers have another login.
fn explain_refused_login(cause: Error) -> Error {
    if cause.kind() != ErrorKind::Denied {
        return cause;
    }
    let message = "a sentinel refused the login: check `sentinel_user` and `sentinel_password` in the URL";
    error::new(ErrorKind::Denied, message).with_source(cause)
}
