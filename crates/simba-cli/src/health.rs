//! `--metrics ADDR`: the endpoints for probes and scrapers.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;

use crate::failure::{Failure, code};

/// From a millisecond to an hour, the range of lease durations.
const BUCKETS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0, 600.0, 3_600.0];

/// Returns whether this process leads.
pub(crate) type Leads = Arc<dyn Fn() -> bool + Send + Sync>;

/// Serves `/metrics`, `/live` and `/ready` in the background, until the program ends.
pub(crate) async fn serve(address: SocketAddr, leads: Leads) -> Result<(), Failure> {
    let recorder = install()?;
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::new(code::UNAVAILABLE, format!("cannot listen on {address} for --metrics: {error}"))
    })?;
    let ready = move || std::future::ready(if leads() { (StatusCode::OK, "leading\n") } else { NOT_LEADING });
    let router = Router::new()
        .route("/live", get(|| std::future::ready("alive\n")))
        .route("/ready", get(ready))
        .route("/metrics", get(move || std::future::ready(recorder.render())));
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "the metrics endpoint has stopped");
        }
    });
    Ok(())
}

const NOT_LEADING: (StatusCode, &str) = (StatusCode::SERVICE_UNAVAILABLE, "not leading\n");

fn install() -> Result<PrometheusHandle, Failure> {
    let builder =
        PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &BUCKETS);
    let installed = builder.and_then(PrometheusBuilder::install_recorder);
    installed.map_err(|error| Failure::new(code::CONFIG, format!("cannot set up metrics: {error}")))
}
