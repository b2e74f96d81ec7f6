//! Connects to the store of a URL.

use std::sync::Arc;

use simba_core::spi::{Backend, ConnectUrl};
use simba_core::{Error, ErrorKind, MemoryBackend, Result, Simba};

/// All schemes, with the feature that each needs.
const SCHEMES: [(&str, &str); 17] = [
    ("memory", ""),
    ("sqlite", "sqlite"),
    ("mysql", "mysql"),
    ("mariadb", "mysql"),
    ("postgres", "postgres"),
    ("postgresql", "postgres"),
    ("redis", "redis"),
    ("rediss", "redis"),
    ("redis+unix", "redis"),
    ("redis+sentinel", "redis"),
    ("redis+cluster", "redis"),
    ("rediss+sentinel", "redis"),
    ("rediss+cluster", "redis"),
    ("zookeeper", "zookeeper"),
    ("zookeepers", "zookeeper"),
    ("etcd", "etcd"),
    ("etcds", "etcd"),
];

/// Connects to the store of a URL.
///
/// # Errors
///
/// [`ErrorKind::Invalid`] if no store of this build has the scheme of the URL, and the errors of the store's `connect`.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_mutex::Result<()> {
/// let simba = simba_mutex::connect("memory:").await?;
/// let guard = simba.locker("orders").lock().await?;
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
pub async fn connect(url: &str) -> Result<Simba> {
    Ok(Simba::builder(backend(&url.parse()?).await?).build())
}

/// Connects to the store of a URL and returns its backend, for [`Simba::builder`].
///
/// # Errors
///
/// As [`connect`].
pub async fn backend(url: &ConnectUrl) -> Result<Arc<dyn Backend>> {
    // The feature of the scheme selects the store. A store that this build does not include has no arm.
    let store = SCHEMES.iter().find(|(scheme, _)| *scheme == url.scheme()).map(|(_, feature)| *feature);
    Ok(match store {
        Some("") => Arc::new(MemoryBackend::new()),
        #[cfg(feature = "sqlite")]
        Some("sqlite") => {
            let config = simba_sqlite::SqliteConfig::from_url(url)?;
            Arc::new(simba_sqlite::SqliteBackend::connect(config).await?)
        }
        #[cfg(feature = "mysql")]
        Some("mysql") => {
            let config = simba_mysql::MySqlConfig::from_url(url)?;
            Arc::new(simba_mysql::MySqlBackend::connect(config).await?)
        }
        #[cfg(feature = "postgres")]
        Some("postgres") => {
            let config = simba_postgres::PostgresConfig::from_url(url)?;
            Arc::new(simba_postgres::PostgresBackend::connect(config).await?)
        }
        #[cfg(feature = "redis")]
        Some("redis") => {
            let config = simba_redis::RedisConfig::from_url(url)?;
            Arc::new(simba_redis::RedisBackend::connect(config).await?)
        }
        #[cfg(feature = "zookeeper")]
        Some("zookeeper") => {
            let config = simba_zookeeper::ZookeeperConfig::from_url(url)?;
            Arc::new(simba_zookeeper::ZookeeperBackend::connect(config).await?)
        }
        #[cfg(feature = "etcd")]
        Some("etcd") => {
            let config = simba_etcd::EtcdConfig::from_url(url)?;
            Arc::new(simba_etcd::EtcdBackend::connect(config).await?)
        }
        _ => return Err(unknown(url.scheme())),
    })
}

fn unknown(scheme: &str) -> Error {
    let message = match SCHEMES.iter().find(|(known, _)| *known == scheme) {
        Some((_, feature)) => {
            format!("this build does not support `{scheme}:`: enable the feature `{feature}` of simba-mutex")
        }
        None => {
            let known = SCHEMES.map(|(known, _)| known).join(", ");
            format!("unknown scheme `{scheme}:`; the schemes are {known}")
        }
    };
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn refusal(url: &str) -> String {
        let error = backend(&url.parse().unwrap()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        error.to_string()
    }

    #[tokio::test]
    async fn unknown_scheme_is_refused_with_the_known_ones() {
        let error = refusal("consul://h").await;
        assert!(
            error.contains("`consul:`") && error.contains("sqlite, mysql") && error.contains("zookeeper"),
            "{error}"
        );
    }

    #[test]
    fn error_about_a_store_that_is_not_built_in_names_its_feature() {
        for (scheme, feature) in SCHEMES.iter().filter(|(_, feature)| !feature.is_empty()) {
            assert!(unknown(scheme).to_string().contains(&format!("the feature `{feature}`")));
        }
    }
}
