//! PostgreSQL.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use simba_core::{Backend, Clock, Moment, MutexName, Operate, SystemClock, async_trait};
use simba_postgres::{PostgresBackend, PostgresConfig};
use tokio::sync::{Notify, OnceCell};
use tokio_postgres::{AsyncMessage, Client, NoTls, Statement};

use super::lap::Lap;
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
        let bell = raw.bell(&mutex);
        Ok(Box::new(RawCaller { raw, mutex, bell }))
    }

    /// The server's own lock, which nothing survives: neither the end of its connection nor that of the server.
    async fn peer(&self, samples: usize) -> Result<Option<Peer>> {
        let lap = Lap::default();
        let sides = [advisory(&lap, samples, self.requeue()), advisory(&lap, samples, self.requeue())];
        futures_util::future::try_join_all(sides).await?;
        Ok(Some(Peer { name: "pg_advisory_lock", handovers: lap.take() }))
    }

    fn many(&self) -> usize {
        10_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(5)
    }
}

/// Passes an advisory lock to and fro with another side, each on a connection of its own.
async fn advisory(lap: &Lap, samples: usize, hold: Duration) -> Result<()> {
    let (client, connection) = login()?.connect(NoTls).await?;
    tokio::spawn(connection);
    let take = client.prepare("SELECT pg_advisory_lock(7302)").await?;
    let free = client.prepare("SELECT pg_advisory_unlock(7302)").await?;
    loop {
        client.query(&take, &[]).await?;
        let taken = lap.took();
        SystemClock.sleep_until(SystemClock.now() + hold).await;
        lap.releases();
        client.query(&free, &[]).await?;
        if taken >= samples {
            return Ok(());
        }
    }
}

/// The raw driver: one connection for commands, pipelined, one that listens, and two prepared statements.
struct Raw {
    client: Client,
    take: Statement,
    free: Statement,
    call: Statement,
    bells: Mutex<HashMap<String, Arc<Notify>>>,
    _listener: Client,
}

const TABLE: &str = "CREATE TABLE IF NOT EXISTS bench_raw (mutex text PRIMARY KEY, owner text NOT NULL, \
     until timestamptz NOT NULL) WITH (fillfactor = 50)";
const TAKE: &str = "INSERT INTO bench_raw AS m VALUES ($1, 'raw', clock_timestamp() + interval '16 s') \
     ON CONFLICT (mutex) DO UPDATE SET owner = excluded.owner, until = excluded.until \
     WHERE m.until <= clock_timestamp() RETURNING owner";
const FREE: &str = "UPDATE bench_raw SET owner = '', until = 'epoch' WHERE mutex = $1 AND owner = 'raw'";
const CALL: &str = "SELECT pg_notify('bench_raw', $1)";

impl Raw {
    async fn connect() -> Result<Arc<Self>> {
        let (client, connection) = login()?.connect(NoTls).await?;
        tokio::spawn(connection);
        let (listener, mut connection) = login()?.connect(NoTls).await?;
        client.batch_execute(TABLE).await?;
        let (take, free) = (client.prepare(TAKE).await?, client.prepare(FREE).await?);
        let call = client.prepare(CALL).await?;
        let raw = Arc::new(Self { client, take, free, call, bells: Mutex::default(), _listener: listener });
        let heard = Arc::clone(&raw);
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                if let AsyncMessage::Notification(message) = message {
                    heard.bell_of(message.payload()).notify_one();
                }
            }
        });
        raw._listener.batch_execute("LISTEN bench_raw").await?;
        Ok(raw)
    }

    fn bell(&self, mutex: &MutexName) -> Arc<Notify> {
        self.bell_of(mutex.as_str())
    }

    fn bell_of(&self, mutex: &str) -> Arc<Notify> {
        let mut bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(bells.entry(mutex.to_owned()).or_default())
    }
}

fn login() -> Result<tokio_postgres::Config> {
    let url = url("SIMBA_TCK_POSTGRES")?;
    let host = url.hosts().first().context("the server has an address")?;
    let mut login = tokio_postgres::Config::new();
    login.host(&host.name).port(host.port.unwrap_or(5432)).dbname(url.path().trim_start_matches('/'));
    login.user(url.user().unwrap_or("postgres")).password(url.password().unwrap_or_default());
    Ok(login)
}

/// One caller of the raw driver.
struct RawCaller {
    raw: Arc<Raw>,
    mutex: MutexName,
    bell: Arc<Notify>,
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
            self.bell.notified().await;
            woken = SystemClock.now();
        }
        Ok(woken)
    }

    async fn release(&mut self) -> Result<()> {
        let call = async {
            self.raw.client.execute(&self.raw.call, &[&self.mutex.as_str()]).await?;
            anyhow::Ok(())
        };
        let (freed, called) = tokio::join!(self.free(), call);
        freed.and(called)
    }
}
