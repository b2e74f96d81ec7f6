//! Uses every store: a lock in a SQLite file, and the configuration of each store with a server.

use simba_mutex::etcd::{EtcdBackend, EtcdConfig};
use simba_mutex::mysql::{MySqlBackend, MySqlConfig};
use simba_mutex::postgres::{PostgresBackend, PostgresConfig};
use simba_mutex::redis::{RedisBackend, RedisConfig};
use simba_mutex::sqlite::{SqliteBackend, SqliteConfig};
use simba_mutex::zookeeper::{ZookeeperBackend, ZookeeperConfig};
use simba_mutex::{Result, Simba};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("simba-downstream-{}", std::process::id()));
    let locked = lock_in(SqliteConfig::new(path.join("simba.db"))).await;
    let _ = std::fs::remove_dir_all(&path);
    locked?;

    // There is no server, so the connect calls are not awaited: they must only compile and link.
    drop(EtcdBackend::connect(EtcdConfig::from_url(&"etcd://localhost".parse()?)?));
    drop(MySqlBackend::connect(MySqlConfig::from_url(&"mysql://root@localhost/simba".parse()?)?));
    drop(PostgresBackend::connect(PostgresConfig::from_url(&"postgres://root@localhost/simba".parse()?)?));
    drop(RedisBackend::connect(RedisConfig::from_url(&"redis://localhost".parse()?)?));
    drop(ZookeeperBackend::connect(ZookeeperConfig::from_url(&"zookeeper://localhost".parse()?)?));
    Ok(())
}

async fn lock_in(config: SqliteConfig) -> Result<()> {
    let simba = Simba::new(SqliteBackend::connect(config).await?);
    let guard = simba.locker("orders").lock().await?;
    println!("locked under token {}", guard.token());
    guard.release().await?;
    simba.shutdown().await;
    Ok(())
}
