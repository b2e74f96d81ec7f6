//! Findings for operators: the version of the servers, their problems, and whether they renew leases.

use simba_core::operate::{Finding, Probe};
use simba_core::{Lease, Result};

use crate::backend::EtcdBackend;
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
        probe.findings = self.findings(status.errors).await?;
        Ok(probe)
    }

    /// Returns the problems of the servers, and whether they grant and renew the default lease.
    async fn findings(&self, errors: Vec<String>) -> Result<Vec<Finding>> {
        let to_finding = |error| {
            let fix = "see `etcdctl endpoint status` and `etcdctl alarm list`";
            Finding::new(format!("a member reports: {error}"), fix)
        };
        let mut findings: Vec<_> = errors.into_iter().map(to_finding).collect();
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
