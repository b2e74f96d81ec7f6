//! PostgreSQL.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use simba_core::spi::{Backend, Operate, async_trait};
use simba_core::{Clock, Moment, MutexName, SystemClock};
use simba_postgres::{PostgresBackend, PostgresConfig};
use tokio::sync::{Notify, OnceCell};
use tokio_postgres::{AsyncMessage, Client, NoTls, Statement};

use super::handover_timer::HandoverTimer;
use super::url;
use simba_measure::{Caller, Peer, Target};

/// A server on this machine.
#[derive(Debug)]
pub(crate) struct Postgres;

#[async_trait]
impl Target for Postgres {
    fn name(&self) -> &'static str {
        "postgres"
    }

    async fn connect(&self) -> Result<Arc<dyn Backend>> {
        let backend =
            PostgresBackend::connect(PostgresConfig::from_url(&url("SIMBA_TCK_POSTGRES")?)?).await?;
        backend.apply_schema().await?;
        Ok(Arc::new(backend))
    }

    async fn raw(&self, _: &Arc<dyn Backend>, mutex: MutexName) -> Result<Box<dyn Caller>> {
        static RAW: OnceCell<Arc<Raw>> = OnceCell::const_new();
        let raw = Arc::clone(RAW.get_or_try_init(Raw::connect).await?);
        let wakeup = raw.wakeup(mutex.as_str());
        Ok(Box::new(RawCaller { raw, mutex, wakeup }))
    }

    /// Measures the server's own lock, which ends with its connection and with the server.
    async fn peer(&self, samples: usize) -> Result<Option<Peer>> {
        let timer = HandoverTimer::default();
        let sides = [advisory(&timer, samples, self.requeue()), advisory(&timer, samples, self.requeue())];
        futures_util::future::try_join_all(sides).await?;
        Ok(Some(Peer { name: "pg_advisory_lock", handovers: timer.take() }))
    }

    fn many(&self) -> usize {
        10_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(5)
    }
}

/// Acquires and releases an advisory lock in turn with another contender, each on its own connection.
async fn advisory(timer: &HandoverTimer, samples: usize, hold: Duration) -> Result<()> {
    let (client, connection) = login()?.connect(NoTls).await?;
    tokio::spawn(connection);
    let take = client.prepare("SELECT pg_advisory_lock(7302)").await?;
    let free = client.prepare("SELECT pg_advisory_unlock(7302)").await?;
    loop {
        client.query(&take, &[]).await?;
        let handovers = timer.acquired();
        SystemClock.sleep_until(SystemClock.now() + hold).await;
        timer.releasing();
        client.query(&free, &[]).await?;
        if handovers >= samples {
            return Ok(());
        }
    }
}

/// The raw driver: one pipelined connection for prepared statements, and one that listens.
struct Raw {
    client: Client,
    take: Statement,
    free: Statement,
    notify: Statement,
    wakeups: Mutex<HashMap<String, Arc<Notify>>>,
    _listener: Client,
}

const TABLE: &str = "CREATE TABLE IF NOT EXISTS bench_raw (mutex text PRIMARY KEY, owner text NOT NULL, \
     until timestamptz NOT NULL) WITH (fillfactor = 50)";
const TAKE: &str = "INSERT INTO bench_raw AS m VALUES ($1, 'raw', clock_timestamp() + interval '16 s') \
     ON CONFLICT (mutex) DO UPDATE SET owner = excluded.owner, until = excluded.until \
     WHERE m.until <= clock_timestamp() RETURNING owner";
const FREE: &str = "UPDATE bench_raw SET owner = '', until = 'epoch' WHERE mutex = $1 AND owner = 'raw'";
const NOTIFY: &str = "SELECT pg_notify('bench_raw', $1)";

impl Raw {
    async fn connect() -> Result<Arc<Self>> {
        let (client, connection) = login()?.connect(NoTls).await?;
        tokio::spawn(connection);
        let (listener, mut connection) = login()?.connect(NoTls).await?;
        client.batch_execute(TABLE).await?;
        let (take, free) = (client.prepare(TAKE).await?, client.prepare(FREE).await?);
        let notify = client.prepare(NOTIFY).await?;
        let wakeups = Mutex::default();
        let raw = Arc::new(Self { client, take, free, notify, wakeups, _listener: listener });
        let shared = Arc::clone(&raw);
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                if let AsyncMessage::Notification(message) = message {
                    shared.wakeup(message.payload()).notify_one();
                }
            }
        });
        raw._listener.batch_execute("LISTEN bench_raw").await?;
        Ok(raw)
    }

    fn wakeup(&self, mutex: &str) -> Arc<Notify> {
        let mut wakeups = self.wakeups.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(wakeups.entry(mutex.to_owned()).or_default())
    }
}

fn login() -> Result<tokio_postgres::Config> {
    let url = url("SIMBA_TCK_POSTGRES")?;
    let host = url.hosts().first().context("the server has an address")?;
    let mut login = tokio_postgres::Config::new();
    login.host(&host.name).port(host.port.unwrap_or(5432)).dbname(url.path().trim_start_matches('/'));
    login.user(url.user().unwrap_or("postgres"));
    if let Some(password) = url.password() {
        login.password(password.read()?);
    }
    Ok(login)
}

/// One caller of the raw driver.
struct RawCaller {
    raw: Arc<Raw>,
    mutex: MutexName,
    wakeup: Arc<Notify>,
}

impl RawCaller {
    async fn take(&self) -> Result<bool> {
        Ok(!self.raw.client.query(&self.raw.take, &[&self.mutex.as_str()]).await?.is_empty())
    }

    async fn free(&self) -> Result<()> {
        self.raw.client.execute(&self.raw.free, &[&self.mutex.as_str()]).await?;
        Ok(())
    }
}

#[async_trait]
impl Caller for RawCaller {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            if !self.take().await? {
                bail!("an uncontended mutex was refused");
            }
            self.free().await?;
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        let mut woken = SystemClock.now();
        while !self.take().await? {
            self.wakeup.notified().await;
            woken = SystemClock.now();
        }
        Ok(woken)
    }

    async fn release(&mut self) -> Result<()> {
        let notify = async {
            self.raw.client.execute(&self.raw.notify, &[&self.mutex.as_str()]).await?;
            anyhow::Ok(())
        };
        let (freed, notified) = tokio::join!(self.free(), notify);
        freed.and(notified)
    }
}
