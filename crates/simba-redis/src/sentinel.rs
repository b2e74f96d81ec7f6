//! Which server is the master, as the sentinels see it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use simba_core::{Error, ErrorKind, Result};

use crate::config::Address;
use crate::error;
use crate::node::Context;
use crate::resp::Reply;
use crate::wire::Wire;

/// How often a sentinel is asked whether the master is still the master.
const LOOK: Duration = Duration::from_secs(1);

pub(crate) struct Sentinel {
    pub(crate) sentinels: Vec<Address>,
    pub(crate) master: String,
}

/// What one sentinel says about the master.
struct View {
    /// Grows with every failover. 0 if the sentinel does not tell.
    epoch: u64,
    address: Address,
}

impl Sentinel {
    /// Connects to the master.
    pub(crate) async fn connect(&self, context: &Context) -> Result<(Wire, Address)> {
        let View { epoch, address } = self.find(context).await?;
        let mut wire = context.ready(&address).await?;
        let role = wire.ask_within(&*context.clock, context.settings.timeout, &["ROLE"]).await?;
        let role = role.array().and_then(|role| role.first()?.text());
        match role {
            Some("master") => {
                context.sentinel_epoch.store(epoch, Ordering::Relaxed);
                Ok((wire, address))
            }
            _ => {
                let message =
                    format!("the sentinels name {address}, which is no master: a failover is under way");
                Err(error::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Returns the view of the first sentinel that is not behind what this handle has followed before. A sentinel that is
    /// cut off from the others goes on naming the old master.
    async fn find(&self, context: &Context) -> Result<View> {
        let known = context.sentinel_epoch.load(Ordering::Relaxed);
        let (mut last, mut older) = (None, Vec::new());
        // In random order, so that one that is gone does not delay every try.
        let first = fastrand::usize(..self.sentinels.len());
        for at in 0..self.sentinels.len() {
            let sentinel = &self.sentinels[(first + at) % self.sentinels.len()];
            match self.connect_and_ask(sentinel, context).await {
                Ok((_, view)) if view.epoch >= known => return Ok(view),
                Ok((_, view)) => older.push(view),
                Err(cause) => last = Some(cause),
            }
        }
        // Most of them are behind only if they were set up anew.
        if self.is_most(older.len())
            && let Some(view) = older.into_iter().max_by_key(|view| view.epoch)
        {
            return Ok(view);
        }
        let cause = last.unwrap_or_else(error::gone);
        if !cause.is_transient() {
            return Err(cause);
        }
        let message = format!("no sentinel knows the current master `{}`", self.master);
        Err(error::new(ErrorKind::Unavailable, message).with_source(cause))
    }

    fn is_most(&self, count: usize) -> bool {
        count * 2 > self.sentinels.len()
    }

    async fn connect_and_ask(&self, sentinel: &Address, context: &Context) -> Result<(Wire, View)> {
        let (settings, clock) = (&context.settings, &*context.clock);
        let opened = Wire::open(sentinel, settings, &settings.sentinel_login, clock).await;
        let mut wire = opened.map_err(name_the_login)?;
        let view = self.ask(&mut wire, context).await?;
        Ok((wire, view))
    }

    async fn ask(&self, wire: &mut Wire, context: &Context) -> Result<View> {
        // Before the address: a failover between the two questions then looks like a move, not like an old view.
        let epoch = self.ask_epoch(wire, context).await?;
        let question = ["SENTINEL", "get-master-addr-by-name", &self.master];
        let reply = wire.ask_within(&*context.clock, context.settings.timeout, &question).await?;
        if reply == Reply::Nil {
            let message = format!("the sentinels watch no master `{}`: check the name", self.master);
            return Err(error::new(ErrorKind::Config, message));
        }
        let address = reply.array().and_then(|parts| {
            let [host, port] = parts else { return None };
            Some(Address::tcp(host.text()?, port.text()?.parse().ok()?))
        });
        let address = address.ok_or_else(|| error::unexpected("the address of the master"))?;
        Ok(View { epoch, address })
    }

    async fn ask_epoch(&self, wire: &mut Wire, context: &Context) -> Result<u64> {
        let question = ["SENTINEL", "MASTER", &self.master];
        match wire.ask_within(&*context.clock, context.settings.timeout, &question).await {
            Ok(reply) => Ok(epoch(&reply).unwrap_or(0)),
            // The login may not have this right.
            Err(cause) if error::words(&cause).is_some() => Ok(0),
            Err(cause) => Err(cause),
        }
    }

    /// Completes when the sentinels name another master: one that is not behind, or most of them.
    ///
    /// Asks one sentinel each second, in turn: one that is cut off from the others goes on naming the old master.
    pub(crate) async fn moved(&self, address: &Address, context: &Context) -> Error {
        let known = context.sentinel_epoch.load(Ordering::Relaxed);
        // Kept from one question to the next: a new connection for each would be a TLS handshake each second.
        let mut kept: Vec<Option<(Wire, View)>> = self.sentinels.iter().map(|_| None).collect();
        let first = fastrand::usize(..self.sentinels.len());
        for at in (0..self.sentinels.len()).cycle().skip(first) {
            context.clock.sleep_until(context.clock.now() + LOOK).await;
            kept[at] = match kept[at].take() {
                Some((mut wire, _)) => self.ask(&mut wire, context).await.map(|view| (wire, view)),
                None => self.connect_and_ask(&self.sentinels[at], context).await,
            }
            .ok();
            let newer = |view: &View| view.address != *address && view.epoch >= known;
            let elsewhere = kept.iter().flatten().filter(|(_, view)| view.address != *address).count();
            if let Some((_, view)) = &kept[at]
                && (newer(view) || self.is_most(elsewhere))
            {
                // The next connect asks a sentinel at random. It must not go back to the old master because that
                // sentinel is cut off from the others.
                if newer(view) {
                    context.sentinel_epoch.fetch_max(view.epoch, Ordering::Relaxed);
                }
                let message = format!("the master is {} now, no longer {address}", view.address);
                return error::new(ErrorKind::Unavailable, message);
            }
        }
        error::gone()
    }
}

/// Returns the epoch in a reply to `SENTINEL MASTER`, which has names and values in turn.
fn epoch(reply: &Reply) -> Option<u64> {
    let mut pairs = reply.array()?.chunks_exact(2);
    let pair = pairs.find(|pair| pair[0].text() == Some("config-epoch"))?;
    pair[1].text()?.parse().ok()
}

/// Sentinels have a login of their own: who is refused must not look at the servers' one.
fn name_the_login(cause: Error) -> Error {
    match cause.kind() {
        ErrorKind::Denied => {
            let message = "a sentinel refused us: check `sentinel_user` and `sentinel_password` in the URL";
            error::new(ErrorKind::Denied, message).with_source(cause)
        }
        _ => cause,
    }
}
