//! Findings about server settings that endanger mutexes.

use simba_core::operate::Finding;

use crate::backend::Shared;
use crate::error;
use crate::resp::Reply;
use crate::supervisor::Node;

/// Reply of a server to `INFO`.
pub(crate) struct Info(String);

impl Info {
    pub(crate) async fn of(node: &Node) -> simba_core::Result<Self> {
        match node.pipeline().await?.call(&["INFO"]).await?.into_result()? {
            Reply::Bulk(text) => Ok(Self(String::from_utf8_lossy(&text).into_owned())),
            _ => Err(error::unexpected("INFO")),
        }
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
    }

    /// Returns product and version.
    pub(crate) fn server(&self) -> String {
        match (self.get("valkey_version"), self.get("redis_version")) {
            (Some(version), _) => format!("Valkey {version}"),
            (None, Some(version)) => format!("Redis {version}"),
            (None, None) => "Redis of unknown version".into(),
        }
    }

    /// Returns the findings about the server. `waits` is whether acquisitions wait for replicas.
    pub(crate) fn findings(&self, waits: bool) -> Vec<Finding> {
        let mut findings = Vec::new();
        if let Some(policy) = self.get("maxmemory_policy").filter(|policy| *policy != "noeviction") {
            findings.push(Finding::new(
                format!("`maxmemory-policy` is `{policy}`: a full server evicts held mutexes"),
                "set it to `noeviction`, or keep mutexes on a server of their own",
            ));
        }
        if self.get("aof_enabled") == Some("0") {
            findings.push(Finding::new(
                "persistence is off (`appendonly no`): a restart loses all held mutexes",
                "set `appendonly yes`, and `appendfsync always` if a restart must lose nothing",
            ));
        }
        if self.get("role") == Some("slave") {
            findings.push(Finding::new(
                "the server is a replica: it refuses writes",
                "connect to its master, or through the sentinels",
            ));
        }
        if !waits
            && self.get("role") == Some("master")
            && self.get("connected_slaves").is_some_and(|count| count != "0")
        {
            findings.push(Finding::new(
                "the server has replicas, and a failover may lose its last writes: two contenders may hold a \
                 mutex until the first one renews",
                "set `wait_replicas` in the URL, and check fencing tokens at the resource",
            ));
        }
        findings
    }
}

/// Logs a warning for each finding. Skips servers that do not answer `INFO`.
pub(crate) async fn warn_of_findings(shared: &Shared) {
    let waits = shared.context.settings.wait.is_some();
    for node in shared.route.masters() {
        match Info::of(&node).await {
            Ok(info) => {
                for finding in info.findings(waits) {
                    tracing::warn!("redis: {}. Fix: {}", finding.problem, finding.fix);
                }
            }
            Err(cause) => tracing::debug!(%cause, "cannot read INFO"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dangerous_settings_are_findings() {
        let bad = "redis_version:7.0.15\r\nmaxmemory_policy:volatile-lru\r\naof_enabled:0\r\nrole:slave\r\n";
        assert_eq!(Info(bad.into()).findings(false).len(), 3);
        assert_eq!(Info(bad.into()).server(), "Redis 7.0.15");
        let good = "valkey_version:9.1.0\r\nredis_version:7.2.4\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n\
                    role:master\r\nconnected_slaves:0\r\n";
        assert_eq!(Info(good.into()).findings(false), []);
        assert_eq!(Info(good.into()).server(), "Valkey 9.1.0");
    }

    #[test]
    fn replicas_are_a_finding_only_if_acquisitions_do_not_wait_for_them() {
        let master = "redis_version:7.0.15\r\nrole:master\r\nconnected_slaves:2\r\n";
        let [finding] = &Info(master.into()).findings(false)[..] else { panic!("one finding") };
        assert!(finding.fix.contains("wait_replicas"), "{finding:?}");
        assert_eq!(Info(master.into()).findings(true), []);
    }
}
