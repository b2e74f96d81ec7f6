//! Operators' calls: list, read, evict, probe.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures_util::future::join_all;
use simba_core::operate::{EvictIf, Eviction, Finding, MutexRecord, Probe};
use simba_core::spi::Operate;
use simba_core::{ErrorKind, FencingToken, MutexName, Result};

use crate::backend::RedisBackend;
use crate::error;
use crate::probe::Info;
use crate::resp::Reply;
use crate::scripts::{Arg, Invocation, Script};
use crate::session::{contender, token_of};
use crate::supervisor::Node;

/// Number of keys that one `SCAN` examines before the server handles other clients.
const SCAN_COUNT: &str = "1000";
/// Number of mutexes that are read concurrently: a list of thousands must not delay renewals.
const READ_CHUNK: usize = 256;

#[async_trait]
impl Operate for RedisBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        let mut names = BTreeSet::new();
        for node in self.shared.route.masters() {
            scan(&node, &mut names).await?;
        }
        let names: Vec<_> = names.into_iter().collect();
        let mut records = Vec::with_capacity(names.len());
        for chunk in names.chunks(READ_CHUNK) {
            for (name, read) in chunk.iter().zip(join_all(chunk.iter().map(|name| self.read(name))).await) {
                match read {
                    Ok(record) => records.push(record),
                    // A key that is not Simba's must not fail the whole list.
                    Err(cause) if cause.kind() == ErrorKind::Protocol => {
                        tracing::warn!(mutex = %name, %cause, "redis: a mutex is omitted from the list");
                    }
                    Err(cause) => return Err(cause),
                }
            }
        }
        Ok(records)
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        let call = Invocation::new(Script::Inspect, mutex, &[Arg::Text("1"), Arg::Text("0")]);
        let (reply, _) = self.shared.route.invoke(&call).await?;
        record(mutex, &reply)
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        let condition = match &condition {
            EvictIf::Token(token) => [Arg::Text("token"), Arg::Number(token.get())],
            EvictIf::Owner(owner) => [Arg::Text("owner"), Arg::Text(owner.as_str())],
            _ => [Arg::Text("any"), Arg::Text("")],
        };
        let standalone = Arg::Number(u64::from(self.shared.route.is_standalone()));
        let args = [condition[0], condition[1], standalone];
        let (reply, _) = self.shared.route.invoke(&Invocation::new(Script::Evict, mutex, &args)).await?;
        match reply.array().unwrap_or_default() {
            [Reply::Int(0)] => Ok(Eviction::Vacant),
            [Reply::Int(1), Reply::Int(left), owner] => {
                let window = Duration::from_millis(u64::try_from(*left).unwrap_or(0));
                Ok(Eviction::Freed { owner: contender(mutex, owner)?, window })
            }
            [Reply::Int(2), owner] => Ok(Eviction::Other(contender(mutex, owner)?)),
            _ => Err(error::unexpected("evict")),
        }
    }

    async fn probe(&self) -> Result<Probe> {
        let clock = &self.shared.context.clock;
        let mut probe = Probe::default();
        if self.shared.context.spread.is_spread() {
            probe.findings.push(Finding::new(
                "keys of different mutexes are on different servers: a proxy spreads them, so calls cannot be batched",
                "connect to the server itself, or with `redis+cluster://` to a cluster",
            ));
        }
        for node in self.shared.route.masters() {
            let pipeline = node.pipeline().await?;
            let before = clock.now();
            pipeline.call(&["PING"]).await?;
            probe.round_trip = probe.round_trip.max(clock.now() - before);
            let info = Info::of(&node).await?;
            probe.server = info.server();
            let step = node.clock_step().map(|step| {
                Finding::new(
                    format!(
                        "the server's clock was set by about {} ms: leases ended too early or too late",
                        step.0
                    ),
                    "synchronize the clocks of all servers by slewing (chrony without `makestep`)",
                )
            });
            for finding in info.findings(self.shared.context.settings.wait.is_some()).into_iter().chain(step)
            {
                if !probe.findings.contains(&finding) {
                    probe.findings.push(finding);
                }
            }
        }
        Ok(probe)
    }
}

/// Collects the names of all mutexes with a holder or a waiter. Fences are skipped: they outlive both.
async fn scan(node: &Node, names: &mut BTreeSet<MutexName>) -> Result<()> {
    let pipeline = node.pipeline().await?;
    let mut cursor = "0".to_owned();
    loop {
        let command = ["SCAN", &cursor, "MATCH", "simba:{*}*", "COUNT", SCAN_COUNT];
        let reply = pipeline.call(&command).await?.into_result()?;
        let Some([next, Reply::Array(keys)]) = reply.array() else { return Err(error::unexpected("SCAN")) };
        names.extend(keys.iter().filter_map(|key| name(key.text()?)));
        match next.text() {
            Some("0") => return Ok(()),
            Some(next) => cursor = next.to_owned(),
            None => return Err(error::unexpected("SCAN")),
        }
    }
}

/// Returns the mutex that a key belongs to.
fn name(key: &str) -> Option<MutexName> {
    let rest = key.strip_prefix("simba:{")?;
    let name = ["}", "}:contender"].iter().find_map(|suffix| rest.strip_suffix(suffix))?;
    MutexName::legacy(name).ok()
}

fn record(mutex: &MutexName, reply: &Reply) -> Result<MutexRecord> {
    let mut record = MutexRecord::free(mutex.clone());
    let parts = reply.array().unwrap_or_default();
    let [Reply::Int(waiters), held @ ..] = parts else { return Err(error::unexpected("inspect")) };
    record.waiters = usize::try_from(*waiters).ok();
    let [Reply::Int(left), Reply::Int(token), Reply::Int(transition), owner] = held else {
        return Ok(record);
    };
    record.owner = Some(contender(mutex, owner)?);
    record.remaining = u64::try_from(*left).ok().map(Duration::from_millis);
    record.token = token_of(*token);
    // A token is the time of its acquisition, unless the server's clock was set back before.
    record.acquired_at = record.token.and_then(acquired_at);
    record.in_transition = record.token.map(|_| left <= transition);
    Ok(record)
}

fn acquired_at(token: FencingToken) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(token.get()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutex_is_parsed_from_its_keys() {
        let of = |key| name(key).map(|name| name.as_str().to_owned());
        assert_eq!(of("simba:{orders}").as_deref(), Some("orders"));
        assert_eq!(of("simba:{orders}:fence"), None);
        assert_eq!(of("simba:{a:b}:contender").as_deref(), Some("a:b"));
        assert_eq!((of("simba:{orders}:alive"), of("other"), of("simba:{}")), (None, None, None));
    }
}
