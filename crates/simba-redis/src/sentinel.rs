//! Which server is the master, as the sentinels see it.

use std::time::Duration;

use simba_core::{Error, ErrorKind, Result};

use crate::config::Address;
use crate::error;
use crate::node::Context;
use crate::resp::Reply;
use crate::wire::Wire;

/// How often the sentinels are asked whether the master is still the master.
const LOOK: Duration = Duration::from_secs(1);

pub(crate) struct Sentinel {
    pub(crate) sentinels: Vec<Address>,
    pub(crate) master: String,
}

impl Sentinel {
    /// Connects to the master.
    pub(crate) async fn connect(&self, context: &Context) -> Result<(Wire, Address)> {
        let (_, address) = self.find(context).await?;
        let mut wire = context.ready(&address).await?;
        let role = wire.ask_within(&*context.clock, context.settings.timeout, &["ROLE"]).await?;
        let role = role.array().and_then(|role| role.first()?.text());
        match role {
            Some("master") => Ok((wire, address)),
            _ => {
                let message =
                    format!("the sentinels name {address}, which is no master: a failover is under way");
                Err(error::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Returns the master's address, from the first sentinel that knows it, and the connection to that one.
    async fn find(&self, context: &Context) -> Result<(Wire, Address)> {
        let mut last = None;
        // In random order, so that one that is gone does not delay every try.
        let first = fastrand::usize(..self.sentinels.len());
        for at in 0..self.sentinels.len() {
            let sentinel = &self.sentinels[(first + at) % self.sentinels.len()];
            match self.connect_and_ask(sentinel, context).await {
                Ok(found) => return Ok(found),
                Err(cause) => last = Some(cause),
            }
        }
        let cause = last.unwrap_or_else(error::gone);
        if !cause.is_transient() {
            return Err(cause);
        }
        Err(error::new(ErrorKind::Unavailable, format!("no sentinel knows the master `{}`", self.master))
            .with_source(cause))
    }

    async fn connect_and_ask(&self, sentinel: &Address, context: &Context) -> Result<(Wire, Address)> {
        let (settings, clock) = (&context.settings, &*context.clock);
        let opened = Wire::open(sentinel, settings, &settings.sentinel_login, clock).await;
        let mut wire = opened.map_err(name_the_login)?;
        let address = self.ask(&mut wire, context).await?;
        Ok((wire, address))
    }

    async fn ask(&self, wire: &mut Wire, context: &Context) -> Result<Address> {
        let (settings, clock) = (&context.settings, &*context.clock);
        let question = ["SENTINEL", "get-master-addr-by-name", &self.master];
        let reply = wire.ask_within(clock, settings.timeout, &question).await?;
        if reply == Reply::Nil {
            let message = format!("the sentinels watch no master `{}`: check the name", self.master);
            return Err(error::new(ErrorKind::Config, message));
        }
        let parts = reply.array().and_then(|parts| {
            let [host, port] = parts else { return None };
            Some(Address::tcp(host.text()?, port.text()?.parse().ok()?))
        });
        parts.ok_or_else(|| error::unexpected("the address of the master"))
    }

    /// Completes when the sentinels name another master.
    pub(crate) async fn moved(&self, address: &Address, context: &Context) -> Error {
        // Kept from one question to the next: a connection each second is a handshake each second.
        let mut kept: Option<Wire> = None;
        loop {
            context.clock.sleep_until(context.clock.now() + LOOK).await;
            let now = match kept.take() {
                Some(mut wire) => self.ask(&mut wire, context).await.map(|now| (wire, now)),
                None => self.find(context).await,
            };
            let now = now.map(|(wire, now)| {
                kept = Some(wire);
                now
            });
            match now {
                Ok(now) if now != *address => {
                    let message = format!("the master is {now} now, no longer {address}");
                    return error::new(ErrorKind::Unavailable, message);
                }
                _ => {}
            }
        }
    }
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
