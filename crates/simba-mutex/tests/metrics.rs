//! The documented metrics are emitted with their labels, and no others.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use simba_mutex::operate::EvictIf;
use simba_mutex::{Lease, MutexName, Simba, SystemClock};
use simba_tck::{FaultyBackend, Network as _, Switch};

/// The page that lists all metrics.
const PAGE: &str = include_str!("../../../docs/operations.md");

/// Returns the documented metrics with their labels, as `simba_losses_total{backend, reason}`.
fn documented() -> BTreeSet<String> {
    let names = PAGE.lines().filter_map(|line| line.strip_prefix("| `simba_")?.split_once('`'));
    names.map(|(name, _)| format!("simba_{name}")).collect()
}

/// Returns the metrics of a scrape in the same form. The parts of a histogram are one metric.
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
async fn emitted_metrics_and_labels_are_the_documented_ones() {
    simba_tck::explain_failures();
    let recorder = PrometheusBuilder::new().install_recorder().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("simba.db").display());
    let network = Switch::new();
    let backend = simba_mutex::backend(&url.parse().unwrap()).await.unwrap();
    let faulty = FaultyBackend::over(backend, SystemClock, Arc::<Switch>::clone(&network));
    // The lease survives a pause of the machine of two seconds.
    let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(3)).unwrap();
    let simba = Simba::builder(Arc::new(faulty)).with_lease(lease).build();
    // A renewal, then an eviction by an operator.
    let guard = simba.locker("m").lock().await.unwrap();
    let renewed = async {
        while !recorder.render().contains("simba_renewal_seconds_count{") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), renewed).await.unwrap();
    simba.operate().unwrap().evict(&MutexName::new("m").unwrap(), EvictIf::Any).await.unwrap();
    guard.lost().await;
    // The store is unreachable until the deadline.
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
