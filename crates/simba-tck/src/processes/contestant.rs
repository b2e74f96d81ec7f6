//! The process of a contestant.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Contention, FencingToken, Lease, MutexName, Simba, Tenure};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use super::Shared;
use super::shared_log::{Note, SharedLog};

/// The variable with the settings of a contestant.
pub(super) const SETTINGS: &str = "SIMBA_TCK_CONTESTANT";
/// How often the work under the mutex writes.
const WRITE_INTERVAL: Duration = Duration::from_millis(5);
/// How long the work takes to end once it is asked to stop.
pub(super) const WORK_END: Duration = Duration::from_millis(100);

/// The settings of a contestant: the address of the store, the mutex, the directory of the log, and the lease.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) address: String,
    pub(super) mutex: MutexName,
    pub(super) dir: String,
    pub(super) lease: Lease,
}

impl Settings {
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

/// Contends with the given settings until SIGTERM.
///
/// # Panics
///
/// If the settings are missing: this is the entry point of other tests and not a test.
#[doc(hidden)]
pub fn contest<F: Shared>() {
    let settings = std::env::var(SETTINGS).ok().and_then(|text| Settings::parse(&text));
    let settings = settings.expect("this test is the entry point of other tests, and does nothing by itself");
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let fixture = F::attach(&settings.address);
        let connection = fixture.connect().await;
        let simba = Simba::builder(connection.backend).with_lease(settings.lease).build();
        let contention = Arc::new(simba.contend(settings.mutex.clone()));
        let log = Arc::new(SharedLog::new(Path::new(&settings.dir)));
        let mut terminate = signal(SignalKind::terminate()).unwrap();
        contention.start().unwrap();
        tokio::spawn(report_waiting(Arc::clone(&contention), Arc::clone(&log)));
        let leading = tokio::spawn(lead(Arc::clone(&contention), log));
        terminate.recv().await;
        contention.stop().await.expect("broken: a graceful stop ends");
        leading.abort();
        simba.shutdown().await;
    });
    runtime.shutdown_background();
}

/// Writes a line once another holds: from then on the contestant is queued.
async fn report_waiting(contention: Arc<Contention>, log: Arc<SharedLog>) {
    while contention.owner().id.is_none() {
        tokio::time::sleep(WRITE_INTERVAL).await;
    }
    if !contention.is_owner() {
        log.note(Note::Waits, FencingToken::new(0)).unwrap();
    }
}

/// Works whenever it leads.
async fn lead(contention: Arc<Contention>, log: Arc<SharedLog>) {
    while let Ok(tenure) = contention.acquired().await {
        log.note(Note::Acquired, tenure.token()).unwrap();
        let worked = tenure.run(work(tenure.clone(), Arc::clone(&log))).await;
        if worked.is_err() {
            log.note(Note::Lost, tenure.token()).unwrap();
        }
        tenure.lost().await;
    }
}

/// Writes to the resource until it is asked to stop, and then takes some time to end.
async fn work(tenure: Tenure, log: Arc<SharedLog>) {
    let expiring = tenure.expiring();
    tokio::pin!(expiring);
    loop {
        // The check and the write are two steps: the tenure may end between them, and the token protects the resource.
        if tenure.is_held() {
            log.write(tenure.token()).unwrap();
        }
        tokio::select! {
            biased;
            () = &mut expiring => break,
            () = tokio::time::sleep(WRITE_INTERVAL) => {}
        }
    }
    tokio::time::sleep(WORK_END).await;
    if tenure.is_held() {
        log.note(Note::Ended, tenure.token()).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_formatting_and_parsing() {
        let settings = Settings {
            address: "mysql://user:word@host/db".into(),
            mutex: MutexName::new("a-mutex").unwrap(),
            dir: "/a folder".into(),
            lease: Lease::new(Duration::from_millis(600), Duration::from_millis(400)).unwrap(),
        };
        assert_eq!(Settings::parse(&settings.to_line()), Some(settings));
        assert_eq!(Settings::parse("nothing"), None);
    }
}
