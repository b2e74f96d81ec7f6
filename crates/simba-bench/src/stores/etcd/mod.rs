//! A single etcd server.

mod connection;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use simba_core::spi::{Backend, async_trait};
use simba_core::{Clock, Moment, MutexName, SystemClock};
use simba_etcd::{EtcdBackend, EtcdConfig};
use tokio::sync::OnceCell;

use self::connection::{Range, RawConnection, Txn, Watch};
use super::handover_timer::HandoverTimer;
use super::url;
use simba_measure::{Caller, Peer, Target};

/// The server that the tests share.
const VARIABLE: &str = "SIMBA_TCK_ETCD";
/// How long the peer holds its lock. It watches from a past revision, whose events servers send ten times a second: with
/// a shorter hold only that delay would be measured.
const PEER_HOLDS: Duration = Duration::from_millis(120);
/// The number of hand-overs of the peer: few, since each takes [`PEER_HOLDS`].
const PEER_SAMPLES: usize = 50;
/// The lease of the floor and of the peer in seconds: longer than a run, since it is not renewed.
const LEASE: i64 = 900;

#[derive(Debug)]
pub(crate) struct Etcd;

#[async_trait]
impl Target for Etcd {
    fn name(&self) -> &'static str {
        "etcd"
    }

    async fn connect(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(EtcdBackend::connect(EtcdConfig::from_url(&url(VARIABLE)?)?).await?))
    }

    async fn raw(&self, _: &Arc<dyn Backend>, mutex: MutexName) -> Result<Box<dyn Caller>> {
        // One connection and one lease for all callers, as the backend has one of each.
        static SHARED: OnceCell<(RawConnection, i64)> = OnceCell::const_new();
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (connection, lease) = SHARED.get_or_try_init(connect).await?.clone();
        let prefix = format!("simba/{mutex}/");
        let key = format!("{prefix}raw-{}", COUNT.fetch_add(1, Ordering::Relaxed)).into_bytes();
        Ok(Box::new(RawCaller { connection, lease, prefix, key, watch: None }))
    }

    /// Measures the server's own lock, whose callers wait within the server.
    async fn peer(&self, samples: usize) -> Result<Option<Peer>> {
        let timer = HandoverTimer::default();
        let samples = samples.min(PEER_SAMPLES);
        let sides = [lock_service(&timer, samples), lock_service(&timer, samples)];
        futures_util::future::try_join_all(sides).await?;
        Ok(Some(Peer { name: "etcd's lock service", handovers: timer.take() }))
    }

    fn note(&self) -> Option<&'static str> {
        Some("the server syncs its disk, which takes a large part of the measured time")
    }

    fn many(&self) -> usize {
        10_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(5)
    }
}

async fn connect() -> Result<(RawConnection, i64)> {
    let mut connection = RawConnection::connect(&url(VARIABLE)?).await?;
    let lease = connection.grant(LEASE).await?;
    Ok((connection, lease))
}

/// Acquires and releases a lock of the server in turn with another contender, each with its own connection and lease.
async fn lock_service(timer: &HandoverTimer, samples: usize) -> Result<()> {
    let (mut connection, lease) = connect().await?;
    let name = format!("peer-{}", std::process::id());
    loop {
        let key = connection.lock(&name, lease).await?;
        let handovers = timer.acquired();
        SystemClock.sleep_until(SystemClock.now() + PEER_HOLDS).await;
        timer.releasing();
        connection.unlock(key).await?;
        if handovers >= samples {
            return Ok(());
        }
    }
}

/// The minimal requests of a lock: creating a key that must not exist, with a lease, and deleting it.
struct RawCaller {
    connection: RawConnection,
    lease: i64,
    prefix: String,
    key: Vec<u8>,
    watch: Option<Watch>,
}

impl RawCaller {
    /// Waits until this key is deleted.
    async fn until_deleted(&mut self, key: Vec<u8>, from: i64) -> Result<()> {
        let watch = match &mut self.watch {
            Some(watch) => {
                watch.add(key, from)?;
                watch
            }
            None => self.watch.insert(Watch::open(&mut self.connection, key, from).await?),
        };
        watch.deleted().await
    }
}

#[async_trait]
impl Caller for RawCaller {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            let created = self.connection.txn(Txn::create(&self.key, self.lease)).await?;
            ensure!(created.succeeded, "an uncontended mutex was refused");
            self.release().await?;
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        let join = Txn::create(&self.key, self.lease).after(Range::last(&self.prefix));
        let joined = self.connection.txn(join).await?;
        ensure!(joined.succeeded, "the own key still exists");
        // Not from a past revision, whose events the server sends late.
        let from = joined.header.as_ref().context("an answer has a header")?.revision + 1;
        let mut woken = SystemClock.now();
        if let Some(before) = joined.found() {
            self.until_deleted(before, from).await?;
            woken = SystemClock.now();
            let first = self.connection.range(Range::first(&self.prefix)).await?;
            ensure!(first.kvs.first().is_some_and(|first| first.key == self.key), "another key is first");
        }
        Ok(woken)
    }

    async fn release(&mut self) -> Result<()> {
        self.connection.delete(self.key.clone()).await
    }
}
