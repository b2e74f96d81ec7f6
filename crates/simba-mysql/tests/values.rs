//! Values at their limits: versions, tokens and ids.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::Product;
use common::SECOND;
use common::calls::{table_at, token};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use simba_core::operate::{EvictIf, Eviction};
use simba_core::spi::{Backend, Claim, Prior};
use simba_core::{ContenderId, ErrorKind, FencingToken, Lease};

on_both_servers! {
    row_44_versions_at_their_limits
}

/// Row 44: a version near 2^31 works, at the limit of its column it is an error, in a wider column it works.
async fn row_44_versions_at_their_limits(on: Product) {
    let (simba, mutex) = table_at(on, "row44_jvm", "INT UNSIGNED", (1 << 31) - 2).await;
    for wanted in [(1 << 31) - 1, (1 << 31) + 1] {
        let guard = simba.locker(mutex.clone()).lock().await.unwrap();
        assert_eq!(guard.token().get(), wanted);
        guard.release().await.unwrap();
    }

    let (simba, mutex) = table_at(on, "row44_int", "INT UNSIGNED", (1 << 32) - 2).await;
    let guard = simba.locker(mutex.clone()).lock().await.unwrap();
    assert_eq!(guard.token().get(), u64::from(u32::MAX));
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    // As after the end of the lease.
    let mut admin = common::admin(&on.admin_url()).await;
    admin.query_drop("UPDATE row44_int SET transition_at = 0").await.unwrap();
    for _ in 0..3 {
        let error = simba.locker(mutex.clone()).lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("BIGINT UNSIGNED"), "{error}");
    }

    let (simba, mutex) = table_at(on, "row44_bigint", "BIGINT UNSIGNED", (1 << 32) - 1).await;
    for wanted in [1 << 32, (1 << 32) + 2] {
        let guard = simba.locker(mutex.clone()).lock().await.unwrap();
        assert_eq!(guard.token().get(), wanted);
        guard.release().await.unwrap();
    }
}

/// An operator names the holder by its token, where the row shows it, or by its id.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_the_row_does_not_show_frees_nothing() {
    let backend: std::sync::Arc<dyn Backend> =
        std::sync::Arc::new(common::connect(&common::least_url(common::shared().await)).await);
    let operate = backend.operate().unwrap();
    let lease = Lease::new(30 * SECOND, 30 * SECOND).unwrap();
    let claim = Claim::new(common::name("evict"), ContenderId::generate(), lease);
    let (mutex, id) = (claim.mutex.clone(), claim.contender.clone());
    let mut session = backend.open(claim).await.unwrap();
    let first = token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
    let by_token = |token: FencingToken| operate.evict(&mutex, EvictIf::Token(token));
    let later = FencingToken::new(first.get() + 1);
    assert_eq!(
        by_token(later).await.unwrap(),
        Eviction::Other(id.clone()),
        "no token is greater than the version"
    );
    assert!(matches!(by_token(first).await.unwrap(), Eviction::Freed { owner, .. } if owner == id));

    let second = token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
    assert_eq!(token(session.contend(Prior::Held).await.unwrap()), Some(second));
    for unsure in [first, second] {
        let error = by_token(unsure).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(&format!("--if-owner {id}")), "{error}");
    }
    assert!(operate.read(&mutex).await.unwrap().owner == Some(id.clone()), "nothing was freed");
    let freed = operate.evict(&mutex, EvictIf::Owner(id.clone())).await.unwrap();
    assert!(matches!(freed, Eviction::Freed { owner, .. } if owner == id));
}

/// An id that is longer than the owner's column is refused before it is used.
#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_does_not_fit_is_refused_at_open() {
    let (_, mutex) = table_at(Product::MariaDb, "narrow", "INT UNSIGNED", 1).await;
    let mut admin: Conn = common::admin(&common::admin_url()).await;
    admin.query_drop("ALTER TABLE narrow MODIFY owner_id CHAR(8) NOT NULL").await.unwrap();
    let backend =
        common::connect(&format!("{}?table=narrow", common::least_url(common::shared().await))).await;
    let fits = Claim::new(mutex.clone(), ContenderId::new("eight-ch").unwrap(), common::lease());
    assert!(backend.open(fits).await.is_ok());
    let long = Claim::new(mutex, ContenderId::new("nine-char").unwrap(), common::lease());
    let error = backend.open(long).await.err().unwrap();
    assert!(error.kind() == ErrorKind::Config && error.to_string().contains("VARCHAR(128)"), "{error}");
}
