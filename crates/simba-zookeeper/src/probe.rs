//! Findings for operators: the version of the servers, and settings that endanger mutexes.

use std::time::Duration;

use simba_core::operate::{Finding, Probe};
use simba_core::{Lease, Result};
use simba_net::Endpoint;

use crate::backend::ZookeeperBackend;
use crate::client::{Reply, Request, four_letters};
use crate::error::failed;

/// The time limit for a four-letter command.
const FOUR_LETTER_LIMIT: Duration = Duration::from_secs(1);

impl ZookeeperBackend {
    /// Measures a round trip, and checks the settings of the servers.
    pub(crate) async fn probe_servers(&self) -> Result<Probe> {
        let findings = self.findings().await?;
        let (client, clock) = (self.any_client()?, self.clock());
        let before = clock.now();
        let path = self.config().chroot_or_root().to_owned();
        let answered: Result<Reply, _> = client.call(Request::Exists { path, watch: false }).await;
        answered.map_err(|failure| failed("answer a probe", failure))?;
        let mut probe = Probe::default();
        probe.round_trip = clock.now() - before;
        probe.server = self.version().await;
        probe.findings = findings;
        Ok(probe)
    }

    /// Returns the findings about the servers' settings for the default lease.
    async fn findings(&self) -> Result<Vec<Finding>> {
        let wanted = Lease::default().total();
        let client = self.client(wanted)?;
        client.ready().await?;
        let granted = client.timeout();
        let mut findings = Vec::new();
        if granted != wanted {
            findings.push(Finding::new(
                format!("the default lease needs a session of {wanted:?}, but the server grants {granted:?}"),
                "set minSessionTimeout and maxSessionTimeout of the servers, or use a lease within them",
            ));
        }
        let mut bounds: Vec<Bounds> = Vec::new();
        for endpoint in &self.config().endpoints {
            // Servers answer `conf` only if their settings allow it.
            let conf = self.four_letters("conf", endpoint).await;
            bounds.extend(conf.and_then(|conf| Bounds::of(endpoint, &conf)));
        }
        findings.extend(findings_of(&bounds, granted));
        Ok(findings)
    }

    /// Returns the reply of a server to a four-letter command. A TLS port does not support them.
    async fn four_letters(&self, command: &str, endpoint: &Endpoint) -> Option<String> {
        if self.config().tls.is_some() {
            return None;
        }
        four_letters(command, endpoint, FOUR_LETTER_LIMIT, self.clock()).await
    }

    /// Returns the name and version of the first server, or the name alone if the version is unknown.
    async fn version(&self) -> String {
        let reply = match self.config().endpoints.first() {
            Some(endpoint) => self.four_letters("srvr", endpoint).await,
            None => None,
        };
        let version = reply.as_deref().and_then(|reply| reply.lines().next()?.split_once("version: "));
        let version = version.and_then(|(_, version)| version.split([',', '-', ' ']).next());
        version.map_or_else(|| "ZooKeeper".to_owned(), |version| format!("ZooKeeper {version}"))
    }
}

/// The settings of one server that sessions depend on.
#[derive(Clone, Debug)]
struct Bounds {
    server: String,
    tick: Duration,
    shortest: Duration,
    longest: Duration,
}

impl Bounds {
    /// Parses the reply to `conf`.
    fn of(endpoint: &Endpoint, conf: &str) -> Option<Self> {
        let millis = |name: &str| {
            let value = conf.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value?.trim().parse().ok().map(Duration::from_millis)
        };
        Some(Self {
            server: endpoint.to_string(),
            tick: millis("tickTime")?,
            shortest: millis("minSessionTimeout")?,
            longest: millis("maxSessionTimeout")?,
        })
    }
}

/// Returns the findings about these settings for sessions of this length.
fn findings_of(bounds: &[Bounds], session: Duration) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some((one, others)) = bounds.split_first() else { return findings };
    if let Some(other) =
        others.iter().find(|other| (other.shortest, other.longest) != (one.shortest, one.longest))
    {
        findings.push(Finding::new(
            format!(
                "{} grants sessions of {:?} to {:?}, {} of {:?} to {:?}: a reconnect can shorten a lease",
                one.server, one.shortest, one.longest, other.server, other.shortest, other.longest
            ),
            "set the same minSessionTimeout and maxSessionTimeout on all servers",
        ));
    }
    if let Some(lax) = bounds.iter().find(|server| server.shortest < server.tick * 2) {
        findings.push(Finding::new(
            format!(
                "{} grants sessions of {:?}, shorter than two ticks of {:?}: the leader may expire them too soon",
                lax.server, lax.shortest, lax.tick
            ),
            "set minSessionTimeout to two ticks or more",
        ));
    }
    if let Some(slow) = bounds.iter().find(|server| session < server.tick * 4) {
        findings.push(Finding::new(
            format!(
                "a session of {session:?} is shorter than four ticks of {:?} on {}: the leader may expire it too soon",
                slow.tick, slow.server
            ),
            "use a longer lease, or set a shorter tickTime",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(port: u16, tick: u64, shortest: u64, longest: u64) -> Bounds {
        let conf = format!(
            "clientPort=1\ntickTime={tick}\nminSessionTimeout={shortest}\nmaxSessionTimeout={longest}\n"
        );
        Bounds::of(&Endpoint { host: "h".into(), port }, &conf).unwrap()
    }

    #[test]
    fn servers_with_other_bounds_or_slow_ticks_are_reported() {
        let found = |all: &[Bounds]| {
            let findings = findings_of(all, Duration::from_secs(16));
            findings.into_iter().map(|finding| finding.problem).collect::<Vec<_>>()
        };
        assert!(found(&[]).is_empty());
        assert!(found(&[bounds(1, 2_000, 4_000, 40_000), bounds(2, 2_000, 4_000, 40_000)]).is_empty());
        let differ = [bounds(1, 2_000, 4_000, 40_000), bounds(2, 2_000, 4_000, 8_000)];
        let [problem] = &found(&differ)[..] else { panic!() };
        assert!(problem.contains("h:1 grants sessions of 4s to 40s, h:2 of 4s to 8s"), "{problem}");
        let [problem] = &found(&[bounds(1, 2_000, 400, 40_000)])[..] else { panic!() };
        assert!(problem.contains("h:1 grants sessions of 400ms, shorter than two ticks of 2s"), "{problem}");
        let [problem] = &found(&[bounds(1, 5_000, 10_000, 40_000)])[..] else { panic!() };
        assert!(problem.contains("four ticks of 5s on h:1"), "{problem}");
        assert!(Bounds::of(&Endpoint { host: "h".into(), port: 1 }, "conf is not executed").is_none());
    }
}
