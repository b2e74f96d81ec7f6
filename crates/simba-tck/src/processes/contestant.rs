//! What goes on in the process of a contestant.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Contention, FencingToken, Lease, MutexName, Simba, Tenure};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use super::Shared;
use super::ledger::{Ledger, Note};

/// The variable with the orders of a contestant.
pub(super) const ORDERS: &str = "SIMBA_TCK_CONTESTANT";
/// How often the work under the mutex writes.
const BEAT: Duration = Duration::from_millis(5);
/// How long the work takes to end once it is told to.
pub(super) const WINDING_UP: Duration = Duration::from_millis(100);

/// What a contestant is told: where the store is, which mutex, where the ledger is, and the lease.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Orders {
    pub(super) address: String,
    pub(super) mutex: MutexName,
    pub(super) dir: String,
    pub(super) lease: Lease,
}

impl Orders {
    pub(super) fn to_line(&self) -> String {
        let times = [self.lease.ttl(), self.lease.transition(), self.lease.poll()];
        let [ttl, transition, poll] = times.map(|time| time.as_millis());
        format!("{}\n{}\n{}\n{ttl}\n{transition}\n{poll}", self.address, self.mutex, self.dir)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let (address, mutex, dir) = (lines.next()?, lines.next()?, lines.next()?);
        let mut time = || Some(Duration::from_millis(lines.next()?.parse().ok()?));
        Some(Self {
            address: address.to_owned(),
            mutex: MutexName::new(mutex).ok()?,
            dir: dir.to_owned(),
            lease: Lease::new(time()?, time()?)
                .and_then(|lease| lease.with_poll(time().unwrap_or_default()))
                .ok()?,
        })
    }
}

/// Contends as it is ordered to, until it is told to end.
///
/// # Panics
///
/// Without orders: it is no test of its own.
#[doc(hidden)]
pub fn contest<F: Shared>() {
    let orders = std::env::var(ORDERS).ok().and_then(|text| Orders::parse(&text));
    let orders = orders.expect("this test is a part of others, and does nothing by itself");
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let fixture = F::attach(&orders.address);
        let connection = fixture.connect().await;
        let simba = Simba::builder(connection.backend).lease(orders.lease).build();
        let contention = Arc::new(simba.contend(orders.mutex.clone()));
        let ledger = Arc::new(Ledger::new(Path::new(&orders.dir)));
        let mut told = signal(SignalKind::terminate()).unwrap();
        contention.start().unwrap();
        tokio::spawn(report_waiting(Arc::clone(&contention), Arc::clone(&ledger)));
        let leading = tokio::spawn(lead(Arc::clone(&contention), ledger));
        told.recv().await;
        contention.stop().await.expect("broken: a graceful stop ends");
        leading.abort();
        simba.shutdown().await;
    });
    runtime.shutdown_background();
}

/// Writes down, once, that another holds: from there on the contestant is queued.
async fn report_waiting(contention: Arc<Contention>, ledger: Arc<Ledger>) {
    while contention.owner().id.is_none() {
        tokio::time::sleep(BEAT).await;
    }
    if !contention.is_owner() {
        ledger.note(Note::Waits, FencingToken::new(0)).unwrap();
    }
}

/// Works whenever it leads.
async fn lead(contention: Arc<Contention>, ledger: Arc<Ledger>) {
    while let Ok(tenure) = contention.acquired().await {
        ledger.note(Note::Acquired, tenure.token()).unwrap();
        let worked = tenure.run(work(tenure.clone(), Arc::clone(&ledger))).await;
        if worked.is_err() {
            ledger.note(Note::Lost, tenure.token()).unwrap();
        }
        tenure.lost().await;
    }
}

/// Writes to the resource until it is told to stop, and takes its time to end.
async fn work(tenure: Tenure, ledger: Arc<Ledger>) {
    let expiring = tenure.expiring();
    tokio::pin!(expiring);
    loop {
        // The check and the write are two steps: between them anything may happen, and the token helps.
        if tenure.is_held() {
            ledger.write(tenure.token()).unwrap();
        }
        tokio::select! {
            biased;
            () = &mut expiring => break,
            () = tokio::time::sleep(BEAT) => {}
        }
    }
    tokio::time::sleep(WINDING_UP).await;
    if tenure.is_held() {
        ledger.note(Note::Ended, tenure.token()).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_survive_the_way_to_another_process() {
        let orders = Orders {
            address: "mysql://user:word@host/db".into(),
            mutex: MutexName::new("a-mutex").unwrap(),
            dir: "/a folder".into(),
            lease: Lease::new(Duration::from_millis(600), Duration::from_millis(400)).unwrap(),
        };
        assert_eq!(Orders::parse(&orders.to_line()), Some(orders));
        assert_eq!(Orders::parse("nothing"), None);
    }
}
