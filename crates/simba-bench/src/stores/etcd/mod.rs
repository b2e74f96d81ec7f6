//! One etcd.

mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use simba_core::{Backend, Clock, Moment, MutexName, SystemClock, async_trait};
use simba_etcd::{EtcdBackend, EtcdConfig};
use tokio::sync::OnceCell;

use self::wire::{Ear, Range, Txn, Wire};
use super::lap::Lap;
use super::url;
use simba_measure::{Caller, Peer, Target};

/// The server that the tests share.
const VARIABLE: &str = "SIMBA_TCK_ETCD";
/// How long the peer holds its lock. It watches from the past, which servers tell ten times a second: earlier than this,
/// that alone would be measured.
const PEER_HOLDS: Duration = Duration::from_millis(120);
/// How many hand-overs of the peer are enough, since each takes so long.
const PEER_SAMPLES: usize = 50;
/// The lease of the floor and of the peer in seconds: longer than a run, since nobody renews it.
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
        // One connection and one lease for all callers, as ours has one of each.
        static SHARED: OnceCell<(Wire, i64)> = OnceCell::const_new();
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (wire, lease) = SHARED.get_or_try_init(connect).await?.clone();
        let prefix = format!("simba/{mutex}/");
        let key = format!("{prefix}raw-{}", COUNT.fetch_add(1, Ordering::Relaxed)).into_bytes();
        Ok(Box::new(RawCaller { wire, lease, prefix, key, ear: None }))
    }

    /// The server's own lock: it waits for its turn within the server.
    async fn peer(&self, samples: usize) -> Result<Option<Peer>> {
        let lap = Lap::default();
        let samples = samples.min(PEER_SAMPLES);
        let sides = [served(&lap, samples), served(&lap, samples)];
        futures_util::future::try_join_all(sides).await?;
        Ok(Some(Peer { name: "etcd's lock service", handovers: lap.take() }))
    }

    fn note(&self) -> Option<&'static str> {
        Some("the server waits for its disk, which is a good part of what is measured here")
    }

    fn many(&self) -> usize {
        10_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(5)
    }
}

async fn connect() -> Result<(Wire, i64)> {
    let mut wire = Wire::connect(&url(VARIABLE)?).await?;
    let lease = wire.grant(LEASE).await?;
    Ok((wire, lease))
}

/// Passes a lock of the server to and fro with another side, each on a connection and with a lease of its own.
async fn served(lap: &Lap, samples: usize) -> Result<()> {
    let (mut wire, lease) = connect().await?;
    let name = format!("peer-{}", std::process::id());
    loop {
        let key = wire.lock(&name, lease).await?;
        let taken = lap.took();
        SystemClock.sleep_until(SystemClock.now() + PEER_HOLDS).await;
        lap.releases();
        wire.unlock(key).await?;
        if taken >= samples {
            return Ok(());
        }
    }
}

/// The requests that a lock needs at the least: a key that must not exist and ends with a lease, and its end.
struct RawCaller {
    wire: Wire,
    lease: i64,
    prefix: String,
    key: Vec<u8>,
    ear: Option<Ear>,
}

impl RawCaller {
    /// Completes when this key has gone.
    async fn until_gone(&mut self, key: Vec<u8>, from: i64) -> Result<()> {
        let ear = match &mut self.ear {
            Some(ear) => {
                ear.watch(key, from)?;
                ear
            }
            None => self.ear.insert(Ear::open(&mut self.wire, key, from).await?),
        };
        ear.gone().await
    }
}

#[async_trait]
impl Caller for RawCaller {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            let made = self.wire.txn(Txn::make(&self.key, self.lease)).await?;
            ensure!(made.succeeded, "an uncontended mutex was refused");
            self.release().await?;
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        let join = Txn::make(&self.key, self.lease).after(Range::last(&self.prefix));
        let joined = self.wire.txn(join).await?;
        ensure!(joined.succeeded, "the own key is still there");
        // Not from the past, which is told late.
        let from = joined.header.as_ref().context("an answer has a header")?.revision + 1;
        let mut woken = SystemClock.now();
        if let Some(before) = joined.found() {
            self.until_gone(before, from).await?;
            woken = SystemClock.now();
            let first = self.wire.range(Range::first(&self.prefix)).await?;
            ensure!(first.kvs.first().is_some_and(|first| first.key == self.key), "somebody else is first");
        }
        Ok(woken)
    }

    async fn release(&mut self) -> Result<()> {
        self.wire.delete(self.key.clone()).await
    }
}
