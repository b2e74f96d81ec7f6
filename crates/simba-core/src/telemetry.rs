//! Counters and histograms through the `metrics` facade. Without that feature, nothing is recorded.
//!
//! No label names a mutex: a process may hold a hundred thousand.

use std::time::Duration;

use crate::error::ErrorKind;
use crate::types::Loss;

/// Records how long a locker waited for the mutex.
pub(crate) fn waited(backend: &'static str, time: Duration) {
    observe("simba_wait_seconds", backend, time);
}

/// Records that a tenure began.
pub(crate) fn acquired(backend: &'static str) {
    count("simba_acquisitions_total", [("backend", backend)]);
}

/// Records that a tenure ended after `time`.
pub(crate) fn ended(backend: &'static str, time: Duration, loss: &Loss) {
    observe("simba_hold_seconds", backend, time);
    count("simba_losses_total", [("backend", backend), ("reason", loss.as_str())]);
}

/// Records a renewal that was answered after `latency`, with `slack` left to the deadline.
pub(crate) fn renewed(backend: &'static str, latency: Duration, slack: Duration) {
    observe("simba_renewal_seconds", backend, latency);
    observe("simba_renewal_slack_seconds", backend, slack);
}

/// Records that a call to the store failed.
pub(crate) fn failed(backend: &'static str, kind: ErrorKind) {
    count("simba_store_errors_total", [("backend", backend), ("kind", kind.as_str())]);
}

#[cfg(feature = "metrics")]
fn observe(name: &'static str, backend: &'static str, time: Duration) {
    metrics::histogram!(name, "backend" => backend).record(time);
}

#[cfg(feature = "metrics")]
fn count<const N: usize>(name: &'static str, labels: [(&'static str, &'static str); N]) {
    metrics::counter!(name, &labels[..]).increment(1);
}

#[cfg(not(feature = "metrics"))]
const fn observe(_: &str, _: &str, _: Duration) {}

#[cfg(not(feature = "metrics"))]
const fn count<const N: usize>(_: &str, _: [(&str, &str); N]) {}
