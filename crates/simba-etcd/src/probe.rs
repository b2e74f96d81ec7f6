//! Findings for operators: the version of the servers, their problems, and whether they renew leases.

use simba_core::operate::{Finding, Probe};
use simba_core::{Lease, Result};

use crate::backend::EtcdBackend;
use crate::client::StatusResponse;
use crate::error::failed;

impl EtcdBackend {
    /// Measures a round trip to a quorum, and checks that leases are granted and renewed.
    pub(crate) async fn probe_servers(&self) -> Result<Probe> {
        let client = self.client();
        let before = client.now();
        client.range(client.quorum_read()).await.map_err(|failure| failed("answer a probe", failure))?;
        let mut probe = Probe::default();
        probe.round_trip = client.now() - before;
        let status = client.status().await.map_err(|failure| failed("report its status", failure))?;
        probe.server = format!("etcd {}", status.version);
        probe.findings = self.findings(status).await?;
        Ok(probe)
    }

    /// Returns the problems of the servers, and whether they grant and renew the default lease.
    async fn findings(&self, status: StatusResponse) -> Result<Vec<Finding>> {
        let to_finding = |error| {
            let fix = "see `etcdctl endpoint status` and `etcdctl alarm list`";
            Finding::new(format!("a member reports: {error}"), fix)
        };
        let mut findings: Vec<_> = status.errors.into_iter().map(to_finding).collect();
        findings.extend(defect_of(&status.version));
        if let Err(error) = self.check_renewal(&mut findings).await {
            let fix = "name the members in the URL, not a proxy that distributes calls, and check their logs";
            findings.push(Finding::new(format!("a lease cannot be granted and renewed: {error}"), fix));
        }
        Ok(findings)
    }

    /// Requests a lease and renews it, as a holder does.
    async fn check_renewal(&self, findings: &mut Vec<Finding>) -> Result<()> {
        let wanted = Lease::default().total();
        let shared = self.shared_lease(wanted)?;
        let lease = shared.get_or_grant().await?;
        if lease.ttl() > wanted {
            findings.push(Finding::new(
                format!("the default lease of {wanted:?} is granted for {:?}", lease.ttl()),
                "use longer leases, or set a shorter `--election-timeout`: a dead holder blocks for the granted time",
            ));
        }
        shared.renew().await
    }
}

/// Returns a finding if servers of this version may confirm a lease that has ended, or end one that was just renewed
/// (etcd-io/etcd#20418 and #15247).
fn defect_of(version: &str) -> Option<Finding> {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().ok());
    let mut next = || numbers.next().flatten();
    matches!((next()?, next()?, next()?), (3, 4, ..42) | (3, 5, ..28) | (3, 6, ..9)).then(|| {
        Finding::new(
            format!(
                "etcd {version} may confirm a lease that has ended, or end one that was renewed, after a leader was paused: \
                 two may hold a mutex"
            ),
            "upgrade every member to 3.4.42, 3.5.28, 3.6.9 or later",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_on_which_two_may_hold_a_mutex_is_a_finding() {
        for version in ["3.4.0", "3.4.23", "3.4.41", "3.5.0", "3.5.27", "3.6.0", "3.6.0-rc.1", "3.6.8+git"] {
            let finding = defect_of(version).unwrap_or_else(|| panic!("{version}"));
            assert!(finding.problem.contains(version) && finding.fix.contains("3.5.28"), "{finding:?}");
        }
        for version in ["3.4.42", "3.5.28", "3.6.9", "3.6.10-rc.0", "3.7.0", "4.4.1", "", "unknown"] {
            assert_eq!(defect_of(version), None, "{version}");
        }
    }
}
