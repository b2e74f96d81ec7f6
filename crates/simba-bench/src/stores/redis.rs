//! A standalone Redis.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt as _;
use redis::aio::{MultiplexedConnection, PubSub};
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo as _, Script};
use simba_core::spi::{Backend, async_trait};
use simba_core::{Clock, ContenderId, Moment, MutexName, SystemClock};
use simba_redis::{RedisBackend, RedisConfig};
use tokio::sync::OnceCell;

use super::url;
use simba_measure::{Caller, Target};

/// The server that the tests share.
const VARIABLE: &str = "SIMBA_TCK_REDIS";

/// Acquires a free mutex: the minimal script of a woken waiter.
const TAKE: &str = "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', 16000)";

/// Frees the mutex if the caller owns it: the minimal script of a release.
const FREE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// Frees the mutex and wakes the next waiter in the queue.
const FREE_AND_WAKE: &str = "
redis.call('DEL', KEYS[1])
local next = redis.call('ZPOPMIN', KEYS[2])[1]
if next then redis.call('PUBLISH', KEYS[1] .. ':' .. next, 'released@@' .. ARGV[1]) end";

#[derive(Debug)]
pub(crate) struct Redis;

#[async_trait]
impl Target for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    async fn connect(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(RedisBackend::connect(RedisConfig::from_url(&url(VARIABLE)?)?).await?))
    }

    async fn raw(&self, _: &Arc<dyn Backend>, mutex: MutexName) -> Result<Box<dyn Caller>> {
        // One connection for all callers, as the backend uses one for its calls.
        static SHARED: OnceCell<MultiplexedConnection> = OnceCell::const_new();
        let commands = SHARED.get_or_try_init(connect).await?.clone();
        let key = format!("simba:{{{mutex}}}");
        let id = ContenderId::generate().to_string();
        let [take, free, free_and_wake] = [TAKE, FREE, FREE_AND_WAKE].map(Script::new);
        Ok(Box::new(Raw { commands, subscription: None, key, id, take, free, free_and_wake }))
    }

    fn handover_goal(&self) -> &'static str {
        // The floor is a wake-up and one script call.
        "ratio <= 1.3"
    }

    fn many(&self) -> usize {
        100_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(2)
    }
}

fn client() -> Result<Client> {
    let info = url(VARIABLE)?.to_string().into_connection_info()?;
    // Off by default: without it, the raw client is too slow for a floor.
    let tcp = TcpSettings::default().set_nodelay(true);
    Ok(Client::open(info.set_tcp_settings(tcp))?)
}

async fn connect() -> Result<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_pipeline_buffer_size(1024);
    Ok(client()?.get_multiplexed_async_connection_with_config(&config).await?)
}

/// A common lock without Simba: `SET NX`, and a script that deletes the key.
struct Raw {
    commands: MultiplexedConnection,
    subscription: Option<PubSub>,
    key: String,
    id: String,
    take: Script,
    free: Script,
    free_and_wake: Script,
}

impl Raw {
    async fn take(&mut self) -> Result<bool> {
        let mut take = redis::cmd("SET");
        take.arg(&self.key).arg(&self.id).arg("NX").arg("PX").arg(16_000);
        let taken: Option<String> = take.query_async(&mut self.commands).await?;
        Ok(taken.is_some())
    }

    async fn take_by_script(&mut self) -> Result<bool> {
        let mut take = self.take.key(&self.key);
        let taken: Option<String> = take.arg(&self.id).invoke_async(&mut self.commands).await?;
        Ok(taken.is_some())
    }
}

#[async_trait]
impl Caller for Raw {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            ensure!(self.take().await?, "an uncontended mutex was refused");
            let mut free = self.free.key(&self.key);
            let _: i64 = free.arg(&self.id).invoke_async(&mut self.commands).await?;
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        if self.subscription.is_none() {
            let mut subscription = client()?.get_async_pubsub().await?;
            subscription.subscribe(format!("{}:{}", self.key, self.id)).await?;
            self.subscription = Some(subscription);
        }
        while !self.take_by_script().await? {
            let queue = format!("{}:contender", self.key);
            let score = SystemClock.now().since_zero().as_secs_f64();
            let mut wait = redis::cmd("ZADD");
            let _: i64 = wait.arg(queue).arg(score).arg(&self.id).query_async(&mut self.commands).await?;
            let subscription = self.subscription.as_mut().context("it is subscribed")?;
            subscription.on_message().next().await.context("the connection broke")?;
        }
        // After the message and the script call.
        Ok(SystemClock.now())
    }

    async fn release(&mut self) -> Result<()> {
        let mut release = self.free_and_wake.key(&self.key);
        release.key(format!("{}:contender", self.key)).arg(&self.id);
        let _: redis::Value = release.invoke_async(&mut self.commands).await?;
        Ok(())
    }
}
