//! Every metric that the documents name is emitted, with its labels, and no other.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use simba_mutex::operate::EvictIf;
use simba_mutex::{Lease, MutexName, Simba, SystemClock};
use simba_tck::{FaultyBackend, Network as _, Switch};

/// The page that names them all.
const PAGE: &str = include_str!("../../../docs/operations.md");

/// A metric and its labels, as `simba_losses_total{backend, reason}`.
fn documented() -> BTreeSet<String> {
    let names = PAGE.lines().filter_map(|line| line.strip_prefix("| `simba_")?.split_once('`'));
    names.map(|(name, _)| format!("simba_{name}")).collect()
}

/// The same of a scrape; the parts of a histogram are one metric.
fn emitted(scrape: &str) -> BTreeSet<String> {
    let series = scrape.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    series.map(metric_of).collect()
}

fn metric_of(line: &str) -> String {
    let (name, rest) = line.split_once('{').unwrap();
    let name = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
    let labels = rest.split_once('}').unwrap().0.split(',');
    let mut labels: Vec<&str> = labels.map(|label| label.split_once('=').unwrap().0).collect();
    labels.retain(|label| !["le", "quantile"].contains(label));
    labels.sort_unstable();
    format!("{name}{{{}}}", labels.join(", "))
}

#[tokio::test]
async fn every_documented_metric_is_emitted_with_its_labels_and_no_other() {
    let recorder = PrometheusBuilder::new().install_recorder().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("simba.db").display());
    let network = Switch::new();
    let backend = simba_mutex::backend(&url.parse().unwrap()).await.unwrap();
    let faulty = FaultyBackend::over(backend, SystemClock, Arc::<Switch>::clone(&network));
    let lease = Lease::new(Duration::from_millis(600), Duration::from_millis(400)).unwrap();
    let simba = Simba::builder(Arc::new(faulty)).lease(lease).build();
    // A renewal, then an end out of band.
    let guard = simba.locker("m").lock().await.unwrap();
    tokio::time::sleep(lease.ttl()).await;
    simba.operate().unwrap().evict(&MutexName::new("m").unwrap(), EvictIf::Any).await.unwrap();
    guard.lost().await;
    // A store out of reach, until the deadline.
    let guard = simba.locker("m").lock().await.unwrap();
    network.refuse();
    guard.lost().await;
    network.heal();
    simba.shutdown().await;
    let scrape = recorder.render();
    assert_eq!(emitted(&scrape), documented(), "{scrape}");
    for reason in ["vanished", "deadline"] {
        assert!(scrape.contains(&format!("reason=\"{reason}\"")), "{scrape}");
    }
    assert!(scrape.contains("kind=\"unavailable\"") && scrape.contains("backend=\"sqlite\""), "{scrape}");
}
